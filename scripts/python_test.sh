#!/usr/bin/env bash
# Builds the Python package, installs it into a fresh virtual environment, and runs its tests there: scripts/python_test.sh [PREBUILT]
#   PREBUILT  a build folder with libimbrex.a and the program; without it everything is built, as `pip install .` does
set -euo pipefail
cd "$(dirname "$0")/.."
environment=build/python/venv
rm -rf "$environment"
python3 -m venv "$environment"
pip=("$environment/bin/pip" install --quiet --disable-pip-version-check)
options=()
[ $# -eq 0 ] || options=(-C "cmake.define.IMBREX_PREBUILT=$(cd "$1" && pwd)" -C "build-dir=build/python/prebuilt")
began=$SECONDS
"${pip[@]}" "${options[@]}" .
echo "pip install: $((SECONDS - began)) s"
"${pip[@]}" numpy pytest
! "$environment/bin/python" -c 'import torch' 2>/dev/null || { echo "python_test: the environment has torch" >&2; exit 1; }
"$environment/bin/python" -m pytest -q python/tests
