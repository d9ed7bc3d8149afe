#!/usr/bin/env python3
"""The C ABI stays as it is: what libimbrex.so shows, what imbrex.h and its parts declare, and what version 1 promised.

abi_test.py LIBRARY. Promised declarations are in abi_1_functions.txt, those of structs in abi_1.txt (structs_test.cpp compares the
numbers). A new function or field needs a line there; a line that no longer holds breaks programs: IMBREX_ABI_VERSION then has to grow.
"""
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
HEADERS = [HERE.parents[1] / "include/imbrex" / name for name in ("imbrex.h", "imbrex_named_tensors.h", "imbrex_batches.h", "imbrex_recurrent.h", "plugin.h")]


def without_comments(text):
    return re.sub(r"/\*.*?\*/", " ", text, flags=re.S)


def functions(text):
    """Name and declaration of each function, in one spelling."""
    for declaration in re.findall(r"^IMBREX_API\s+([^;]*);", text, flags=re.M):
        declaration = " ".join(declaration.split())
        yield re.search(r"(\w+)\s*\(", declaration).group(1), declaration


def structs(text):
    """Name and fields of each struct that the header defines itself."""
    for body, name in re.findall(r"typedef struct \{(.*?)\}\s*(\w+);", text, flags=re.S):
        fields = []
        for declaration in filter(None, (d.strip() for d in body.split(";"))):
            pointer = re.search(r"\(\*(\w+)\)\s*\(", declaration)
            parts = [pointer.group(1)] if pointer else [re.search(r"(\w+)$", p.strip()).group(1) for p in declaration.split(",")]
            fields += parts
        yield name, fields


def promised_structs():
    promised, fields = {}, None
    for line in (HERE / "abi_1.txt").read_text().splitlines():
        words = line.split()
        if line.startswith(" "):
            fields.append(words[0])
        else:
            fields = promised.setdefault(words[0], [])
    return promised


def main():
    text = without_comments("\n".join(header.read_text() for header in HEADERS))
    declared = dict(functions(text))
    problems = []

    shown = subprocess.run(["nm", "-D", "--defined-only", sys.argv[1]], check=True, capture_output=True, text=True).stdout
    symbols = {line.split()[-1].split("@")[0] for line in shown.splitlines()}
    problems += [f"{name} is declared, but the library does not show it" for name in sorted(declared.keys() - symbols)]
    problems += [f"the library shows {name}, which imbrex.h does not declare" for name in sorted(symbols - declared.keys())]

    promised = set((HERE / "abi_1_functions.txt").read_text().splitlines())
    problems += [f"broken: {line}" for line in sorted(promised - set(declared.values()))]
    problems += [f"not in abi_1_functions.txt: {line}" for line in sorted(set(declared.values()) - promised)]

    has = dict(structs(text))
    for name, fields in promised_structs().items():
        if has.get(name, [])[: len(fields)] != fields:
            problems.append(f"broken: {name} began with {', '.join(fields)}")
    problems += [f"not in abi_1.txt: {name}" for name in sorted(has.keys() - promised_structs().keys())]
    problems += [f"not in abi_1.txt: {name}.{f}" for name, fields in has.items() for f in fields if f not in promised_structs().get(name, [])]

    for problem in problems:
        print(problem)
    print(f"C ABI: {len(declared)} functions, {len(has)} structs, {len(problems)} problems")
    return 1 if problems or len(declared) < 10 else 0


if __name__ == "__main__":
    sys.exit(main())
