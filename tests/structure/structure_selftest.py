#!/usr/bin/env python3
"""Shows that every check of structure_test.py can fail: plants a violation in a small tree and expects the complaint. Run by ctest."""
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import structure_test as structure  # noqa: E402

CLEAN = {
    "include/imbrex/tensor.h": "#pragma once\n// A view.\n#include <cstdint>\n",
    "include/imbrex/work.h": "#pragma once\n// Work.\n",
    "include/imbrex/spec.h": '#pragma once\n// A spec.\n#include "imbrex/tensor.h"\n',
    "include/imbrex/model.h": '#pragma once\n// A model.\n#include "imbrex/spec.h"\n',
    "src/core/tensor.cpp": '// Views.\n#include "imbrex/tensor.h"\n\n#include <fmt/format.h>\n',
    "src/core/env.cpp": '// Environment.\nchar* x = getenv("IMBREX_BACKEND");\n',
    "src/attention/spec.h": '// Specs.\n#include "imbrex/spec.h"\n#include "core/env.cpp"\n',
    "src/attention/registry.cpp": '// Backends.\n#include "cpu/params.h"\n',
    "src/model/model.cpp": '// Models.\n#include "imbrex/model.h"\n#include "attention/spec.h"\n',
    "src/cpu/params.h": '// Parameters.\n#include "imbrex/work.h"\n',
    "src/cpu/kernels/tile.h": "// Tiles.\n#include <immintrin.h>\n",
    "src/cpu/kernels/avx2.cpp": '// AVX2.\n#include "cpu/kernels/tile.h"\n#include "cpu/params.h"\n',
    "src/cuda/params.h": '// Parameters.\n#include "imbrex/work.h"\n',
    "src/cuda/backend.h": "// Backends.\n",
    "src/cuda/kernels/words.cuh": "// Words.\n",
    "src/cuda/ops/copy.cu": '// Copies.\n#include "cuda/params.h"\n#include "words.cuh"\n',
    "src/cuda/ops/copy.h": '// Copies.\n#include "cuda/params.h"\n',
    "src/cli/main.cpp": '// The program.\n#include <CLI/CLI.hpp>\n#include "model/model.cpp"\n',
}

# check, file, its new text, and a part of the complaint that must come
VIOLATIONS = [
    ("check_arrows", "src/core/tensor.cpp", '// x\n#include "attention/spec.h"\n', 'may not include "attention/spec.h"'),
    ("check_arrows", "src/core/tensor.cpp", '// x\n#include "imbrex/spec.h"\n', "belongs to attention"),
    ("check_arrows", "src/attention/spec.h", '// x\n#include "model/model.cpp"\n', "belongs to model"),
    ("check_arrows", "src/attention/spec.h", '// x\n#include "imbrex/model.h"\n', "belongs to model"),
    ("check_arrows", "src/attention/spec.h", '// x\n#include "cpu/params.h"\n', "belongs to cpu"),
    ("check_arrows", "src/attention/spec.h", "// x\n#include <immintrin.h>\n", "<immintrin.h>"),
    ("check_arrows", "src/model/model.cpp", '// x\n#include "cpu/params.h"\n', "belongs to cpu"),
    ("check_arrows", "src/cpu/host.cpp", '// x\n#include "model/model.cpp"\n', "belongs to model"),
    ("check_arrows", "src/serve/replay.cpp", '// x\n#include "cli/main.cpp"\n', "belongs to cli"),
    ("check_arrows", "src/serve/replay.cpp", "// x\n#include <CLI/CLI.hpp>\n", "<CLI/CLI.hpp>"),
    ("check_arrows", "src/cli/main.cpp", '// x\n#include "cpu/params.h"\n', "belongs to cpu"),
    ("check_arrows", "src/cli/main.cpp", "// x\n#include <cuda_runtime.h>\n", "<cuda_runtime.h>"),
    ("check_arrows", "src/cli/main.cpp", '// x\n#include "core/gone.h"\n', "is not a file"),
    ("check_arrows", "src/util/strings.h", "// x\n", "not a folder of the plan"),
    ("check_cuda_arrows", "src/cuda/driver/memory.h", '// x\n#include "cuda/ops/copy.h"\n', 'src/cuda/driver may not include "cuda/ops/copy.h"'),
    ("check_cuda_arrows", "src/cuda/kernels/words.cuh", '// x\n#include "copy.cu"\n', 'src/cuda/kernels may not include "copy.cu"'),
    ("check_cuda_arrows", "src/cuda/plan/plan.h", '// x\n#include "cuda/backend.h"\n', 'src/cuda/plan may not include "cuda/backend.h"'),
    ("check_cuda_arrows", "src/cuda/misc/plan.h", "// x\n", "not a folder of the plan"),
    ("check_public_headers", "include/imbrex/spec.h", '// x\n#include "core/tensor.cpp"\n', 'may not include "core/tensor.cpp"'),
    ("check_public_headers", "include/imbrex/spec.h", "// x\n#include <fmt/format.h>\n", "<fmt/format.h>"),
    ("check_public_headers", "include/imbrex/spec.h", "// x\n#include <unistd.h>\n", "<unistd.h>"),
    ("check_kernels", "src/cpu/kernels/avx2.cpp", "// x\n#include <algorithm>\n", "<algorithm>"),
    ("check_kernels", "src/cpu/kernels/tile.h", "// x\n#include <cmath>\n", "<cmath>"),
    ("check_kernels", "src/cpu/kernels/avx2.cpp", '// x\n#include "core/env.cpp"\n', '"core/env.cpp"'),
    ("check_kernels", "src/cpu/params.h", "// x\n#include <vector>\n", "src/cpu/params.h: kernel code may not include <vector>"),
    ("check_kernels", "include/imbrex/work.h", "// x\n#include <array>\n", "work.h: kernel code may not include <array>"),
    ("check_cuda_kernels", "src/cuda/kernels/words.cuh", "// x\n#include <cuda_bf16.h>\n", "may not include cuda_bf16.h"),
    ("check_cuda_kernels", "src/cuda/kernels/words.cuh", '// x\n#include "core/env.cpp"\n', "core/env.cpp"),
    ("check_cuda_kernels", "src/cuda/ops/copy.cu", '// x\n#include "../words.cuh"\n', "../words.cuh"),
    ("check_cuda_kernels", "src/cuda/plan/words.cuh", "// Words.\n", "another text of a CUDA kernel is named words.cuh"),
    ("check_cuda_kernels", "src/cuda/params.h", "// x\n#include <vector>\n", "params.h: a CUDA kernel may not include vector"),
    ("check_shape", "src/cuda/kernels/words.cuh", "int x;\n", "does not open with a sentence"),
    ("check_shape", "src/core/tensor.cpp", "// x\n" * 451, "451 lines"),
    ("check_shape", "src/core/tensor.cpp", "#include <vector>\n", "does not open with a sentence"),
    ("check_leftovers", "src/core/tensor.cpp", "// x\n// TO" "DO: later\n", "a note for later"),
    ("check_leftovers", "docs/a.md", "see /hom" "e/me/x\n", "somebody's machine"),
    ("check_leftovers", "docs/a.md", "written with Copi" "lot\n", "who typed it"),
    ("check_environment", "src/core/env.cpp", '// x\nchar* x = std::getenv("HOME");\n', "reads HOME"),
    (
        "check_driver_table",
        "src/cuda/driver/driver.h",
        "// x\n#define API(X) \\\n  X(cuInit, (unsigned)) \\\n  X(cuGraphUpload, ())\n",
        "cuGraphUpload is used nowhere",
    ),
    ("check_cuda_words", "src/cuda/kernels/words.cuh", "// x\nDEVICE int twice(int x) { return 2 * x; }\n", "no kernel uses twice"),
    ("check_environment", "src/cpu/host.cpp", '// x\nchar* x = getenv("IMBREX_X");\n', "2 files"),
]


def write_tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class Tree(unittest.TestCase):
    def test_clean_tree_passes(self):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            write_tree(root, CLEAN)
            for check in structure.TREE_CHECKS:
                self.assertEqual(check(root), [], check.__name__)

    def test_every_violation_is_found(self):
        for check, name, text, complaint in VIOLATIONS:
            with self.subTest(check=check, file=name, complaint=complaint), tempfile.TemporaryDirectory() as folder:
                root = Path(folder)
                write_tree(root, CLEAN | {name: text})
                problems = getattr(structure, check)(root)
                self.assertTrue(any(complaint in problem for problem in problems), problems)

    def test_every_check_has_a_violation(self):
        self.assertEqual({check.__name__ for check in structure.TREE_CHECKS}, {violation[0] for violation in VIOLATIONS})


class Objects(unittest.TestCase):
    def problems(self, *texts):
        with tempfile.TemporaryDirectory() as folder:
            objects = []
            for index, text in enumerate(texts):
                source = Path(folder) / f"kernel{index}.cpp"
                source.write_text(text)
                objects.append(source.with_suffix(".o"))
                subprocess.run([os.environ.get("CXX", "c++"), "-std=c++20", "-O0", "-c", source, "-o", objects[-1]], check=True)
            return "\n".join(structure.check_kernel_objects(objects))

    def test_clean(self):
        self.assertEqual(self.problems("namespace imbrex { namespace { int two() { return 2; } } int run() { return two(); } }"), "")

    def test_weak_inline_function(self):
        text = "inline int two() { return 2; } namespace imbrex { int run() { return two(); } }"
        self.assertIn("two() is weak", self.problems(text))

    def test_weak_template(self):
        text = "namespace imbrex { template <int n> int f() { return n; } int run() { return f<3>(); } }"
        self.assertIn("f<3>() is weak", self.problems(text))

    def test_inline_variable(self):
        text = "namespace imbrex { inline int table = 3; int run() { return table; } }"
        self.assertIn("table is weak", self.problems(text))

    def test_exported_outside_namespace(self):
        self.assertIn("outside namespace imbrex", self.problems("int helper() { return 2; }"))

    def test_same_name_twice(self):
        text = "namespace imbrex { int run() { return 2; } }"
        self.assertIn("kernel1.o: imbrex::run() is exported by kernel0.o too", self.problems(text, text))

    def test_library_call(self):
        text = "#include <new>\nnamespace imbrex { void* run() { return operator new(8); } }"
        self.assertIn("may not call the C++ library", self.problems(text))


if __name__ == "__main__":
    unittest.main()
