#!/usr/bin/env bash
# Builds imbrex._core with AddressSanitizer and gives the Python surfaces wrong arguments: scripts/python_fuzz.sh PREBUILT [ARGUMENTS]
#   PREBUILT   a build folder of the preset `asan` or `fuzz`, with its libimbrex.a
#   ARGUMENTS  of python/tests/fuzz_surfaces.py: `--case 17`, `--of torch`
# PYTHON is the interpreter, with NumPy and nanobind (PyTorch too for `--of torch`); without it one is made.
set -euo pipefail
cd "$(dirname "$0")/.."
prebuilt=$(cd "$1" && pwd)
shift
if [ -z "${PYTHON:-}" ]; then
  PYTHON=$PWD/build/python/fuzz/venv/bin/python
  [ -x "$PYTHON" ] || python3 -m venv build/python/fuzz/venv
  "$PYTHON" -m pip install --quiet --disable-pip-version-check 'nanobind>=2.4' numpy
fi
build=build/python/fuzz/build
log=build/python/fuzz/build.log
# The sanitizer's library is loaded before Python, which knows nothing of it.
flags='-O0 -g1 -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined -fno-omit-frame-pointer -shared-libsan'
flags+=" -fsanitize-ignorelist=$PWD/cmake/ubsan_ignorelist.txt"
{
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_COMPILER=clang++ "-DCMAKE_CXX_FLAGS=$flags" -DIMBREX_BUILD_PYTHON=ON \
    "-DIMBREX_PREBUILT=$prebuilt" "-DPython_EXECUTABLE=$PYTHON" -Wno-dev
  cmake --build "$build" --target imbrex_python
} >"$log" 2>&1 || { tail -n 100 "$log"; exit 1; }
package=build/python/fuzz/package
rm -rf "$package"
mkdir -p "$package"
cp -r python/imbrex "$package"
rm -f "$package"/imbrex/_core*.so
cp "$build"/python/_core*.so "$package/imbrex"

# Memory of Python's own allocator would not end where an array ends. What Python and NumPy never free is no leak of ours.
LD_PRELOAD=$(clang++ -print-file-name=libclang_rt.asan-x86_64.so) PYTHONMALLOC=malloc PYTHONPATH=$PWD/$package \
  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=1024 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 \
  "$PYTHON" python/tests/fuzz_surfaces.py "$@"
