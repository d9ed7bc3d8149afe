#!/usr/bin/env bash
# Format, structure and clang-tidy over the whole tree; changes nothing. Used by `make lint` and .ci/run.
# With an argument, only that step: format, structure or tidy.
set -euo pipefail
cd "$(dirname "$0")/.."
step=${1:-all}

if [ "$step" = all ] || [ "$step" = format ]; then
  folders=(include src tests examples python/src)
  [ ! -d bench ] || folders+=(bench)
  find "${folders[@]}" -regex '.*\.\(c\|cpp\|h\|hpp\|inl\|cu\|cuh\)' | sort | xargs clang-format --dry-run -Werror
  black --quiet --check python || { echo "lint: black python would change files" >&2; exit 1; }
  pyflakes3 python
fi
if [ "$step" = all ] || [ "$step" = structure ]; then
  python3 tests/structure/structure_test.py
fi
if [ "$step" = all ] || [ "$step" = tidy ]; then
  # All files of a library at once, since most of each is the headers of others. Kernel files are left out: thousands of intrinsics, and nothing in
  # them that clang-tidy knows better than the tests.
  cmake --preset clang -B build/tidy -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=0 -Wno-dev --log-level=WARNING >/dev/null
  run-clang-tidy -quiet -p build/tidy -j "$(nproc)" '/imbrex(_conformance|_serve|_cli)?\.dir/Unity/|/src/(core|attention|model|serve|cli|api|cpu|gpu|cuda(/[a-z_]+)?)/[^/]*\.cpp$' 2>&1 |
    sed -e '/^clang-tidy/d' -e '/warnings generated\.$/d' -e '/^Suppressed/d' -e '/^Use -header-filter/d' -e '/^$/d'
fi
