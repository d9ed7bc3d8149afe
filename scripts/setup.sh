#!/usr/bin/env bash
# Installs the Debian packages that imbrex is built with, where they are missing. Used by the Makefile (build tools and
# libraries) and, with the argument `ci`, by .ci/run (clang and its tools too, a compiler for aarch64 and an emulator, and NVIDIA's
# compiler as a library, with which the kernels for GPUs are tested). Says nothing when there is nothing to do.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(g++ cmake ninja-build libcli11-dev nlohmann-json3-dev libfmt-dev libgtest-dev python3)
[ "${1:-}" != ci ] || packages+=(binutils black clang clang-format clang-tidy g++-aarch64-linux-gnu libclang-rt-dev lld pyflakes3 python3-dev python3-pip python3-venv qemu-user)

install_packages() {
  # Without dpkg only the programs can be looked for; a missing library is then reported by CMake.
  if ! command -v dpkg-query >/dev/null; then
    for program in c++ cmake ninja python3; do
      command -v "$program" >/dev/null || { echo "setup: $program is missing; this system has no apt, please install it" >&2; exit 1; }
    done
    return
  fi

  missing=()
  for package in "${packages[@]}"; do
    status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$status" = installed ] || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0

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
}

# NVRTC and the CUDA headers, from their Python packages into build/cuda, unless the machine has a toolkit.
install_nvrtc() {
  ! compgen -G "${CUDA_HOME:-/usr/local/cuda}/lib*/libnvrtc.so*" >/dev/null || return 0
  [ ! -e build/cuda/nvidia/cu13/lib/libnvrtc.so.13 ] || return 0
  echo "setup: installing NVRTC into build/cuda"
  python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps --upgrade --target build/cuda \
    'nvidia-cuda-nvrtc==13.0.*' 'nvidia-cuda-runtime==13.0.*' </dev/null
}

install_packages
[ "${1:-}" != ci ] || install_nvrtc
