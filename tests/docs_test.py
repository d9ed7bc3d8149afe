#!/usr/bin/env python3
"""Checks that README.md, docs/ and the pages of examples/ speak of things that exist: paths, links, anchors, files, functions, members, error
codes, environment variables, options of the program, and the names of the "In imbrex" columns.

Run by ctest. The columns "In imbrex" of docs/coming-from-*.md name types, members, functions, environment variables, options and
labels of later parts; a renamed member or a new alias without a row fails here. Their other columns name things of other programs.
"""
import re
import sys
from pathlib import Path

SPAN = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"(include|src|docs|tests|python|scripts|bench|examples|cmake|data|\.ci)/[\w./-]*")
LINK = re.compile(r"\]\(([^)\s]+)\)")
SOURCES = ("include", "src", "bench", "examples", "python", "scripts", "tests", "cmake", ".ci")
SUFFIXES = {".h", ".hpp", ".c", ".cpp", ".inl", ".cu", ".cuh", ".py", ".sh", ".rs", ".txt", ".json", ".cmake", ""}
FOREIGN_FILES = {"dlpack.h", "config.json"}
# Options of vLLM, SGLang and pip in pages about them.
FOREIGN_OPTIONS = {
    "--additional-config",
    "--cuda-graph-backend-prefill",
    "--gpu-memory-utilization",
    "--prefill-attention-backend",
    "--decode-attention-backend",
    "--linear-attn-decode-backend",
    "--linear-attn-prefill-backend",
    "--linear-attn-verify-backend",
    "--speculative-draft-attention-backend",
    "--speculative-draft-sink-size",
    "--speculative-eagle-topk",
}


def without_code_blocks(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def pages(root):
    return [root / "README.md", *sorted((root / "docs").rglob("*.md")), *sorted((root / "examples").rglob("*.md"))]


def documents(root):
    for path in pages(root):
        yield path, without_code_blocks(path.read_text())


def about_others(path):
    return path.name.startswith("coming-from-")


def without_comments(text):
    return re.sub(r"//.*", "", text)


def type_bodies(header):
    """Name, base or empty, and text between the braces of every struct, class and enum."""
    for match in re.finditer(r"\b(?:struct|class|enum class)\s+(\w+)\b(?!\s*>)(?:[^;{()]*:\s*public\s+(\w+))?[^;{()]*{", header):
        depth, at = 1, match.end()
        while depth > 0:
            depth += {"{": 1, "}": -1}.get(header[at], 0)
            at += 1
        yield match.group(1), match.group(2) or "", header[match.end() : at - 1]


class Names:
    """What the public headers, the program and the environment table define."""

    def __init__(self, root):
        self.text = "\n".join(without_comments(p.read_text()) for p in sorted((root / "include/imbrex").glob("*.h*")))
        self.types = {}
        bases = {}
        for name, base, body in type_bodies(self.text):
            self.types[name] = self.types.get(name, "") + body
            bases.setdefault(name, base)
        for name, base in bases.items():
            while base:
                self.types[name] += self.types.get(base, "")
                base = bases.get(base)
        for name, meant in re.findall(r"\busing\s+(\w+)\s*=\s*(\w*)", self.text):  # of a template, its name
            self.types.setdefault(name, self.types.get(meant, ""))
        self.environment = (root / "src/core/env.h").read_text()
        self.program = "\n".join(p.read_text() for p in sorted((root / "src/cli").glob("*.cpp")))

    def problem(self, token):
        """Why this token of an "In imbrex" column is wrong, or None. Unknown kinds of tokens pass."""
        if match := re.fullmatch(r"(\w+)::(\w+)(\(\))?", token):
            name, member, call = match.groups()
            if name not in self.types:
                return f"no type {name} in the public headers"
            if not re.search(rf"\b{member}\b" + (r"\s*\(" if call else ""), self.types[name]):
                return f"no {member} in {name}"
        elif match := re.fullmatch(r"(\w+)\(\)", token):
            if not re.search(rf"\b{match.group(1)}\s*\(", self.text):
                return "no such function in the public headers"
        elif re.fullmatch(r"[A-Z][a-z]+[A-Z]?\w*", token):
            if token not in self.types:
                return "no such type in the public headers"
        elif re.fullmatch(r"IMBREX_\w+", token):
            if f'"{token}"' not in self.environment:
                return "no such variable in src/core/env.h"
        elif re.fullmatch(r"--[\w-]+", token) or re.fullmatch(r"imbrex \w+", token):
            if self.program and f"{token.removeprefix('imbrex ')}" not in self.program:
                return "not in src/cli"
        return None


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def in_imbrex_cells(text):
    """Line number and text of every cell below a header "In imbrex"."""
    column = None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("|"):
            column = None
            continue
        row = cells(line)
        if column is None:
            lower = [cell.lower() for cell in row]
            column = lower.index("in imbrex") if "in imbrex" in lower else -1
        elif column >= 0 and not re.fullmatch(r"[\s|:-]+", line):
            yield number, row[column] if len(row) == 4 else None


def check_paths(root):
    for path, text in documents(root):
        for token in SPAN.findall(text):
            if PATH.fullmatch(token) and not (root / token).exists() and not (about_others(path) and token.startswith("python/sglang")):
                yield f"{path.relative_to(root)}: {token} does not exist"


class Sources:
    """Names of files, and words, of everything that is not a document."""

    def __init__(self, root):
        found = [p for folder in SOURCES for p in (root / folder).rglob("*") if p.is_file() and p.suffix in SUFFIXES and p.name != "docs_test.py"]
        found += [p for p in root.iterdir() if p.is_file() and p.suffix in {".txt", ".json", ".toml", ""}]
        self.files = {p.name for p in found}
        self.text = "\n".join(p.read_text(errors="replace") for p in found)
        self.words = set(re.findall(r"\w+", self.text))
        self.options = set(re.findall(r"--[a-z][\w-]*", self.text)) | FOREIGN_OPTIONS
        self.codes = set(re.findall(r"`([\w.]+)`", (root / "docs/errors.md").read_text()))
        self.code_heads = {code.split(".")[0] for code in self.codes if "." in code}

    def problem(self, token):
        """Why this token in backticks names nothing, or None. Unknown kinds of tokens pass."""
        if re.fullmatch(r"[\w./-]+\.(cuh|cu|h|hpp|cpp|inl|py|sh|md|cmake)", token):
            name = token.split("/")[-1]
            return None if name in self.files | FOREIGN_FILES or token.endswith(".md") else "no such file"
        if match := re.fullmatch(r"(\w+)\(\)", token):
            return None if match.group(1) in self.words else "no such function"
        if match := re.fullmatch(r"(\w+)::(\w+)(\(\))?", token):
            return None if {match.group(1), match.group(2)} <= self.words else "no such member"
        if match := re.fullmatch(r"(IMBREX_\w+)(=\S*)?( .*)?", token):
            return None if match.group(1) in self.words else "no such variable or macro"
        if match := re.match(r"--[a-z][\w-]*", token):
            return None if match.group() in self.options else "no such option"
        if re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)+", token) and token.split(".")[0] in self.code_heads - {"config"}:
            return None if token in self.codes else "no such code in docs/errors.md"
        return None


def check_names(root):
    sources = Sources(root)
    for path, text in documents(root):
        if about_others(path) or path.name == "errors.md":
            continue  # check_columns() reads the former; core_tests compares the latter with the sources
        for token in SPAN.findall(text):
            if problem := sources.problem(token):
                yield f"{path.relative_to(root)}: {token}: {problem}"


def commands(text):
    """Calls of the program, in blocks without a language and in backticks: the subcommand, and the options behind it."""
    lines, fence = SPAN.findall(without_code_blocks(text)), None
    for line in text.splitlines():
        if line.startswith("```"):
            fence = line if fence is None else None
        elif fence == "```":
            lines.append(line.split(" #")[0])
    for line in lines:
        if match := re.match(r"(?:[A-Z_]+=\S+ )*(?:\S+/)?imbrex ([a-z]+)\b(.*)", line):
            yield match.group(1), re.findall(r"--[a-z][\w-]*", match.group(2))


def check_commands(root):
    """Every subcommand and option of a shown command is one of src/cli."""
    program = "\n".join(p.read_text() for p in (root / "src/cli").glob("*.cpp"))
    verbs = set(re.findall(r'add_subcommand\("(\w+)"', program))
    if not verbs:
        yield "src/cli: no subcommands found"
    for path in pages(root):
        for verb, options in commands(path.read_text()):
            if verb not in verbs:
                yield f"{path.relative_to(root)}: imbrex {verb}: no such subcommand"
            for option in options:
                if option not in program:
                    yield f"{path.relative_to(root)}: imbrex {verb} {option}: no such option"


def anchors(path):
    for heading in re.findall(r"^#+ (.+)$", without_code_blocks(path.read_text()), re.M):
        yield re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def check_links(root):
    for path, text in documents(root):
        for link in LINK.findall(text):
            if re.match(r"[a-z]+:", link):
                continue
            target, _, anchor = link.partition("#")
            file = path.parent / target if target else path
            if not file.exists():
                yield f"{path.relative_to(root)}: the link {link} leads nowhere"
            elif anchor and file.suffix == ".md" and anchor not in anchors(file):
                yield f"{path.relative_to(root)}: {link} is not a heading of {file.name}"


def check_columns(root):
    names = Names(root)
    for path in sorted((root / "docs").glob("coming-from-*.md")):
        text = path.read_text()
        labels = set(re.findall(r"^\| (later: [^|]+?|gone|caller) \|", text, re.M))
        rows = 0
        for number, cell in in_imbrex_cells(text):
            rows += 1
            where = f"{path.relative_to(root)}:{number}"
            if not cell:
                yield f"{where}: the row does not have four cells, or says nothing in the third"
                continue
            if re.match(r"later|gone|caller", cell) and cell not in labels:
                yield f"{where}: {cell} is not a label of the legend"
            for token in SPAN.findall(cell):
                if problem := names.problem(token):
                    yield f"{where}: {token}: {problem}"
        if rows == 0:
            yield f"{path.relative_to(root)}: no table with a column In imbrex"


def check_aliases(root):
    """Every name that select() knows from vLLM or SGLang has a row in that document."""
    source = (root / "src/family/aliases.cpp").read_text()
    for origin in ("vllm", "sglang"):
        section = (root / f"docs/coming-from-{origin}.md").read_text().split("## Backend names", 1)[-1].split("\n## ", 1)[0]
        known = set(re.findall(r"\w+", section))
        names = [n for call in re.findall(rf"\b{origin}\(([^;]*)\);", source) for n in re.findall(r'"([^"]+)"', call[call.rfind("{") :])]
        if not names:
            yield f"src/family/aliases.cpp: no names of {origin} found"
        for name in names:
            if name not in known:
                yield f"docs/coming-from-{origin}.md: the alias {name} is missing under Backend names"


def check_quirks(root):
    """Every row of docs/quirks.md names tests, and each is there."""
    sources = "\n".join(p.read_text() for p in sorted((root / "tests").rglob("*.cpp")))
    tests = {"::".join(names) for names in re.findall(r"\bTEST(?:_[FP])?\((\w+),\s*(\w+)\)", sources)}
    for row in re.findall(r"^\| .*\|$", (root / "docs/quirks.md").read_text(), re.M):
        named = SPAN.findall(cells(row)[-1])
        if not named and cells(row)[-1] != "test":
            yield f"docs/quirks.md: no test in the row {row}"
        for test in named:
            if test not in tests:
                yield f"docs/quirks.md: {test}: no such test"


def main():
    root = Path(__file__).resolve().parents[1]
    problems = [p for check in (check_paths, check_names, check_commands, check_links, check_columns, check_aliases, check_quirks) for p in check(root)]
    for problem in problems:
        print(problem)
    print(f"docs: {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
