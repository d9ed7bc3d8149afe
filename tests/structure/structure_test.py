#!/usr/bin/env python3
"""Checks the rules of the house that a compiler does not: include arrows, kernel isolation, file length, leftovers.

Run by ctest and scripts/lint.sh. Each check takes the repository root and returns the list of its complaints;
structure_selftest.py plants a violation of every rule and expects it to be found.
"""
import argparse
import re
import subprocess
import sys
from pathlib import Path

SOURCE_SUFFIXES = {".c", ".cpp", ".h", ".hpp", ".cu", ".cuh", ".inl"}
TEXT_SUFFIXES = SOURCE_SUFFIXES | {".py", ".sh", ".cmake", ".txt", ".md", ".json", ".yml", ".html", ".js", ".css", ""}
MAX_LINES = 450
# Longer on purpose. Each needs a reason.
LONG_FILES = {}

# Which folders of src/ a folder may include. Public headers count as part of the folder they are declared for.
ARROWS = {
    "core": {"core"},
    "expression": {"expression", "core"},
    "family": {"family", "core"},
    "attention": {"attention", "expression", "family", "core"},
    "short_conv": {"short_conv", "family", "core"},
    "recurrent": {"recurrent", "short_conv", "family", "core"},
    "mla": {"mla", "attention", "family", "core"},
    "model": {"model", "attention", "short_conv", "recurrent", "mla", "family", "core"},
    "cpu": {"cpu", "attention", "expression", "short_conv", "recurrent", "mla", "family", "core"},
    "gpu": {"gpu", "attention", "family", "core"},
    "cuda": {"cuda", "gpu", "attention", "expression", "short_conv", "recurrent", "mla", "family", "core"},
    "conformance": {"conformance", "attention", "expression", "short_conv", "recurrent", "mla", "family", "core"},
    "serve": {"serve", "conformance", "model", "attention", "expression", "short_conv", "recurrent", "mla", "family", "core"},
    "api": {"api", "model", "attention", "expression", "short_conv", "recurrent", "mla", "family", "core"},
    "cli": {"cli", "expression", "serve", "conformance", "api", "model", "attention", "short_conv", "recurrent", "mla", "family", "core"},
}
HARDWARE = {"cpu", "cuda"}
# Which folders of src/cuda/ a folder there may include. What lies in src/cuda/ itself stands above them, but for what crosses into kernels.
CUDA_ARROWS = {
    "driver": {"driver"},
    "kernels": {"kernels"},
    "attention": {"attention", "driver", "kernels"},
    "ops": {"ops", "driver", "kernels"},
    "plan": {"plan", "attention", "driver", "kernels"},
    "state": {"state", "plan", "driver", "kernels"},
    "recurrent": {"recurrent", "state", "attention", "driver", "kernels"},
    "short_conv": {"short_conv", "state", "attention", "driver", "kernels"},
    "mla": {"mla", "plan", "attention", "driver", "kernels"},
}
CUDA_PARAMS = ("src/cuda/params.h", "src/cuda/state_params.h", "src/cuda/short_conv_params.h", "src/cuda/recurrent_params.h", "src/cuda/mla_params.h", "src/cuda/merge_params.h")
REGISTRY = "src/attention/registry.cpp"
PUBLIC_CORE = {"tensor.h", "error.h", "capture.h", "device.h", "device_platform.h", "device_stream.h", "parallel.h", "workspace.h"}
PUBLIC_EXPRESSION = {"expression.h", "bound_expression.h"}
PUBLIC_FAMILY = {"batch.h", "family.h", "layer_spec.h", "plan.h"}
PUBLIC_SHORT_CONV = {"short_conv.h"}
PUBLIC_RECURRENT = {"recurrent.h"}
PUBLIC_MLA = {"mla.h"}
PUBLIC_MODEL = {"model.h"}
PUBLIC_API = {"imbrex.h", "imbrex.hpp", "imbrex_batches.h", "imbrex_named_tensors.h", "imbrex_recurrent.h", "plugin.h"}

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)
# A third-party header, and the folders of src/ that may use it.
THIRD_PARTY = [
    (re.compile(r"^CLI/"), {"cli"}),
    (re.compile(r"^(gtest|gmock|benchmark)/"), set()),
    (re.compile(r"^(cuda|nvrtc|cublas|cute|cutlass)"), set()),
    (re.compile(r"^[a-z0-9]*intrin\.h$"), {"cpu", "core"}),
]


def sources(root, *folders):
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and path.suffix in SOURCE_SUFFIXES:
                yield path


def includes(path):
    return INCLUDE.findall(path.read_text(errors="replace"))


def folder_of_public(name):
    for folder, names in (("core", PUBLIC_CORE), ("expression", PUBLIC_EXPRESSION), ("family", PUBLIC_FAMILY), ("short_conv", PUBLIC_SHORT_CONV), ("recurrent", PUBLIC_RECURRENT), ("mla", PUBLIC_MLA), ("model", PUBLIC_MODEL), ("api", PUBLIC_API)):
        if name in names:
            return folder
    return "attention"


def cuda_texts(root):
    """Texts of kernels, by the name that an #include has for them: that of the file, in whatever folder."""
    texts = {}
    for path in sources(root, "src/cuda"):
        if path.suffix in (".cu", ".cuh"):
            texts.setdefault(path.name, []).append(path.resolve())
    return texts


def resolve(root, path, name, texts):
    """The file that a quoted include means, or None."""
    for base in (root / "src", root / "include", path.parent):
        if (base / name).is_file():
            return (base / name).resolve()
    return texts.get(name, [None])[0]


def check_arrows(root):
    """Includes go one way: cli, api, serve -> model -> attention -> family -> core; cpu, cuda, conformance -> attention; cpu, cuda, conformance, model, serve -> short_conv -> family; cpu, cuda, conformance, serve, cli -> recurrent -> family; cuda -> gpu -> attention; cli, serve -> conformance."""
    problems = []
    texts = cuda_texts(root)
    for path in sources(root, "src"):
        relative = path.relative_to(root).as_posix()
        folder = relative.split("/")[1]
        if folder not in ARROWS:
            problems.append(f"{relative}: src/{folder} is not a folder of the plan; give it a place in ARROWS")
            continue
        allowed = set(ARROWS[folder]) | (HARDWARE if relative == REGISTRY else set())
        for kind, name in includes(path):
            if kind == "<":
                for pattern, users in THIRD_PARTY:
                    if pattern.match(name) and folder not in users:
                        problems.append(f"{relative}: src/{folder} may not include <{name}>")
                continue
            target = resolve(root, path, name, texts)
            if target is None:
                problems.append(f'{relative}: "{name}" is not a file of src/ or include/')
                continue
            parts = target.relative_to(root.resolve()).as_posix().split("/")
            to = parts[1] if parts[0] == "src" else folder_of_public(parts[-1])
            if to not in allowed:
                problems.append(f'{relative}: src/{folder} may not include "{name}" (it belongs to {to})')
    return problems


def check_cuda_arrows(root):
    """Folders of src/cuda include one way: short_conv, recurrent -> state -> plan; mla -> plan -> attention -> driver, kernels; ops -> driver, kernels."""
    problems = []
    texts = cuda_texts(root)
    for path in sources(root, "src/cuda"):
        parts = path.relative_to(root / "src/cuda").parts
        if len(parts) == 1:
            continue
        relative = path.relative_to(root).as_posix()
        if parts[0] not in CUDA_ARROWS:
            problems.append(f"{relative}: src/cuda/{parts[0]} is not a folder of the plan; give it a place in CUDA_ARROWS")
            continue
        for _, name in includes(path):
            target = resolve(root, path, name, texts)
            to = target.relative_to(root.resolve()).as_posix() if target else ""
            if not to.startswith("src/cuda/") or to in CUDA_PARAMS:
                continue
            if to.split("/")[2] not in CUDA_ARROWS[parts[0]]:
                problems.append(f'{relative}: src/cuda/{parts[0]} may not include "{name}"')
    return problems


def check_public_headers(root):
    """Public headers stand alone: each other and the standard library, nothing else."""
    problems = []
    for path in sources(root, "include"):
        relative = path.relative_to(root).as_posix()
        for kind, name in includes(path):
            if kind == '"' and not (name.startswith("imbrex/") and (root / "include" / name).is_file()):
                problems.append(f'{relative}: a public header may not include "{name}"')
            if kind == "<" and not re.fullmatch(r"[a-z_]+|std(int|def|bool)\.h", name):
                problems.append(f"{relative}: a public header may not include <{name}>")
    return problems


def check_kernels(root):
    """CPU kernel files, and all they include, see plain structs and instructions only.

    They are compiled for one instruction set and chosen at run time: an inline function of a shared header that is compiled
    in one of them could be the copy that the linker keeps for the whole program.
    """
    problems = []
    kernels = root / "src/cpu/kernels"
    allowed_files = {(root / name).resolve() for name in ("src/cpu/params.h", "src/cpu/short_conv_params.h", "src/cpu/recurrent_params.h", "src/cpu/head_products_params.h",
                                                          "src/attention/ds_mla.h", "include/imbrex/work.h")}
    todo = list(sources(root, "src/cpu/kernels"))
    seen = {path.resolve() for path in todo}
    while todo:
        path = todo.pop()
        relative = path.resolve().relative_to(root.resolve()).as_posix()
        for kind, name in includes(path):
            if kind == "<":
                if name != "immintrin.h":
                    problems.append(f"{relative}: kernel code may not include <{name}>")
                continue
            target = resolve(root, path, name, {})
            if target is None or (target not in allowed_files and target.parent != kernels.resolve()):
                problems.append(f'{relative}: kernel code may not include "{name}"')
            elif target not in seen:
                seen.add(target)
                todo.append(target)
    return problems


def check_cuda_kernels(root):
    """CUDA kernel texts, and all they include, are compiled without any header but ours: each other and plain structs."""
    problems = []
    texts = cuda_texts(root)
    for name, paths in texts.items():
        for path in paths[1:]:
            problems.append(f"{path.relative_to(root.resolve()).as_posix()}: another text of a CUDA kernel is named {name}; they are embedded by name")
    shared = [(root / name).resolve() for name in (*CUDA_PARAMS, "src/attention/cut_item.h", "src/attention/ds_mla.h", "src/expression/operations.h", "src/expression/short_operations.h", "src/expression/element_here.h", "include/imbrex/work.h")]
    for path in [*(path for paths in texts.values() for path in paths), *(path for path in shared if path.is_file())]:
        relative = path.relative_to(root.resolve()).as_posix()
        for kind, name in includes(path):
            # The compiler finds a file by the name it was embedded under, not by where it lies.
            embedded = [(base / name).resolve() for base in (root / "include", root / "src")]
            if kind == "<" or not (name in texts or any(file in shared for file in embedded)):
                problems.append(f"{relative}: a CUDA kernel may not include {name}")
    return problems


def check_shape(root):
    """Files are short, and open with one sentence that says what they are."""
    problems = []
    for path in sources(root, "include", "src", "tests", "bench", "examples", "python/src"):
        relative = path.relative_to(root).as_posix()
        lines = path.read_text(errors="replace").splitlines()
        if len(lines) > LONG_FILES.get(relative, MAX_LINES):
            problems.append(f"{relative}: {len(lines)} lines, at most {MAX_LINES}: two rooms in one?")
        first = [line for line in lines if line.strip() and line.strip() != "#pragma once"][:1]
        if not first or not first[0].startswith(("//", "/*")):
            problems.append(f"{relative}: does not open with a sentence on what it is and who uses it")
    return problems


# Written so that this file does not contain what it looks for.
LEFTOVERS = [
    (re.compile(r"\bTO" r"DO\b|\bFIX" r"ME\b|\bX" r"XX\b"), "a note for later"),
    (re.compile(r"(?<![\w.])/(wor" r"k|hom" r"e|roo" r"t|Use" r"rs)/\w"), "a path of somebody's machine"),
    (re.compile(r"\b(Chat" r"GPT|Clau" r"de|Copi" r"lot|language mod" r"el assistant|AI[- ]generated)\b"), "a word on who typed it"),
]


def check_leftovers(root):
    """No notes for later, no paths of a developer's machine."""
    problems = []
    folders = ["include", "src", "tests", "bench", "cmake", "scripts", "docs", ".ci"]
    paths = [p for f in folders for p in sorted((root / f).rglob("*"))] + sorted(root.glob("*"))
    for path in paths:
        if not path.is_file() or path.suffix not in TEXT_SUFFIXES or path.stat().st_size > 1 << 20 or "corpus" in path.parts:
            continue
        if path.name == ".git":  # of a second work tree: it names the first
            continue
        relative = path.relative_to(root).as_posix()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            for pattern, what in LEFTOVERS:
                if pattern.search(line):
                    problems.append(f"{relative}:{number}: {what}: {line.strip()[:100]}")
    return problems


def check_environment(root):
    """The environment is read in one file, and every variable is named IMBREX_*."""
    readers, problems = [], []
    for path in sources(root, "src"):
        relative = path.relative_to(root).as_posix()
        text = path.read_text(errors="replace")
        if re.search(r"\bgetenv\s*\(", text):
            readers.append(relative)
        for name in re.findall(r'\bgetenv\s*\(\s*"([^"]+)"', text):
            if not name.startswith("IMBREX_"):
                problems.append(f"{relative}: reads {name}; our variables are named IMBREX_*")
    if len(readers) > 1:
        problems.append(f"the environment is read in {len(readers)} files, not one: {', '.join(readers)}")
    return problems


def check_driver_table(root):
    """Every function of the CUDA driver's table is used by the library: each one that is not makes some driver too old for nothing. Constants,
    which tests may use alone, cost no driver anything."""
    table = root / "src/cuda/driver/driver.h"
    if not table.exists():
        return []
    names = re.findall(r"^  X\((\w+),", table.read_text(), re.M)

    def words(*folders):
        return {word for path in sources(root, *folders) if path != table for word in re.findall(r"\w+", path.read_text(errors="replace"))}

    library, tests = words("src"), words("tests")
    unused = [name for name in names if name not in library and (not name.startswith("k") or name not in tests)]
    return [f"src/cuda/driver/driver.h: {name} is used nowhere" for name in unused]


def check_cuda_words(root):
    """Every word that kernels are written in (src/cuda/kernels) is used by a kernel, not only by the test of the words."""
    problems = []
    texts = {path: re.sub(r"//.*", "", path.read_text(errors="replace")) for path in sources(root, "src/cuda") if path.suffix in (".cu", ".cuh")}
    used = [word for text in texts.values() for word in re.findall(r"\w+", text)]
    for path, text in texts.items():
        if path.parent != root / "src/cuda/kernels":
            continue
        for name in set(re.findall(r"^DEVICE [\w:&*<> ]*?\b(\w+)\(", text, re.M)):
            if used.count(name) == len(re.findall(rf"^DEVICE [^\n(]*\b{name}\(", text, re.M)):
                problems.append(f"{path.relative_to(root).as_posix()}: no kernel uses {name}")
    return problems


def nm_symbols(path):
    """(type, demangled name) of every symbol of an object file."""
    out = subprocess.run(["nm", "-C", str(path)], check=True, capture_output=True, text=True).stdout
    for line in out.splitlines():
        match = re.match(r"^[0-9a-f ]*\s([A-Za-z])\s(.+)$", line)
        if match:
            yield match.groups()


def check_kernel_objects(objects):
    """Object files of CPU kernels: nothing weak leaks out, nothing of the C++ library is called, names are ours and unique."""
    problems, owners = [], {}
    for path in objects:
        for kind, name in nm_symbols(path):
            where = f"{path.name}: {name}"
            if kind in "WVuwv":
                problems.append(f"{where} is weak: the linker may keep this copy for code that runs on any machine")
            elif kind == "U" and re.match(r"std::|operator (new|delete)|__cxa_|__gxx_", name):
                problems.append(f"{where}: kernel code may not call the C++ library")
            elif kind in "TDBRC":
                if not name.startswith("imbrex::") and "imbrex::" not in name.split("(")[0]:
                    problems.append(f"{where} is exported from outside namespace imbrex")
                if name in owners:
                    problems.append(f"{where} is exported by {owners[name]} too")
                owners[name] = path.name
    return problems


TREE_CHECKS = [
    check_arrows,
    check_cuda_arrows,
    check_public_headers,
    check_kernels,
    check_cuda_kernels,
    check_shape,
    check_leftovers,
    check_environment,
    check_driver_table,
    check_cuda_words,
]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", nargs="*", type=Path, help="check these kernel object files instead of the tree")
    args = parser.parse_args()
    root = Path(__file__).resolve().parents[2]
    problems = check_kernel_objects(args.objects) if args.objects is not None else [p for check in TREE_CHECKS for p in check(root)]
    for problem in problems:
        print(problem)
    if args.objects is not None:
        print(f"structure: {len(args.objects)} kernel objects, {len(problems)} problems")
        return 1 if problems or not args.objects else 0
    print(f"structure: {len(TREE_CHECKS)} checks, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
