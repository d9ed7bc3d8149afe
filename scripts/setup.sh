#!/usr/bin/env bash
# Installs the Debian packages that imbrex is built with, where they are missing. Used by the Makefile (build tools and
# libraries) and, with the argument `ci`, by .ci/run (clang and its tools too). Says nothing when there is nothing to do.
set -euo pipefail

packages=(g++ cmake ninja-build libcli11-dev nlohmann-json3-dev libfmt-dev libgtest-dev python3)
if [ "${1:-}" = ci ]; then
  packages+=(binutils clang clang-format clang-tidy libclang-rt-dev)
fi

# Without dpkg only the programs can be looked for; a missing library is then reported by CMake.
if ! command -v dpkg-query >/dev/null; then
  for program in c++ cmake ninja python3; do
    command -v "$program" >/dev/null || { echo "setup: $program is missing; this system has no apt, please install it" >&2; exit 1; }
  done
  exit 0
fi

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$status" = installed ] || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -ne 0 ]; then
  echo "setup: these packages are missing; install them as root and try again:" >&2
  echo "  apt-get install -y ${missing[*]}" >&2
  exit 1
fi

echo "setup: installing ${missing[*]}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >"$log" 2>&1 </dev/null || { cat "$log" >&2; exit 1; }
apt-get install -y -qq --no-install-recommends "${missing[@]}" >"$log" 2>&1 </dev/null || { cat "$log" >&2; exit 1; }
