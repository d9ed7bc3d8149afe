#!/usr/bin/env bash
# Everything that needs a GPU, on a machine that has one and no network: scripts/gpu_check.sh BUILD OUT [STEP...]
#   BUILD  a build folder with the programs `imbrex`, `tests/cuda_tests` and `tests/conformance_tests` (nothing is built here)
#   OUT    where summary.json, summary.txt and a log of each step go
#   STEP   of device, conformance, laws, sanitize, bench, zoo; default: all. With GPU_CHECK_FA3, _vllm_fa3_C.abi3.so of a wheel of vLLM, the
#          zoo has FlashAttention-3 beside it, and fails where that is faster
# Kernels are compiled by as many processes as there are cores, which needs NVRTC or a full IMBREX_CUDA_CACHE. Exit code 1 when a step failed.
set -uo pipefail
[ $# -ge 2 ] || { sed -n '2,7s/^# //p' "$0" >&2; exit 2; }
build=$(cd "$1" && pwd) || exit 2
mkdir -p "$2" && out=$(cd "$2" && pwd) || exit 2
shift 2
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(device conformance laws sanitize bench zoo)
for program in imbrex tests/cuda_tests tests/conformance_tests; do
  [ -x "$build/$program" ] || { echo "gpu_check: $build/$program is missing" >&2; exit 2; }
done

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export IMBREX_CUDA_CACHE=${IMBREX_CUDA_CACHE:-$scratch/kernels}
shards=${GPU_CHECK_SHARDS:-$(nproc)}
names=() verdicts=() passed=() failed=() skipped=() seconds=()

# Adds up what the logs of googletest say: tests that passed, failed and were skipped.
count() { grep -hoE "^\[  $1  ?\] [0-9]+ test" "${@:2}" 2>/dev/null | awk '{sum += $4} END {print sum + 0}'; }

# A row of the summary: name, exit code, when it began, logs.
row() {
  local name=$1 code=$2 began=$3 verdict=pass
  shift 3
  names+=("$name")
  passed+=("$(count PASSED "$@")") failed+=("$(count FAILED "$@")") skipped+=("$(count SKIPPED "$@")")
  [ "$code" -eq 0 ] || verdict=FAIL
  # A step in which nothing ran has shown nothing.
  [ "${passed[-1]:-0}" -gt 0 ] || verdict=FAIL
  verdicts+=("$verdict") seconds+=("$((SECONDS - began))")
}

# Tests by filter, spread over processes. Each writes a log of its own; they end up in one.
sharded() {
  local name=$1 program=$2 filter=$3 began=$SECONDS code=0 pids=() i
  for ((i = 0; i < shards; ++i)); do
    GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$i timeout 540 "$build/tests/$program" --gtest_filter="$filter" --gtest_brief=1 \
      >"$scratch/$name.$i.log" 2>&1 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || code=1; done
  row "$name" "$code" "$began" "$scratch/$name".*.log
  cat "$scratch/$name".*.log >"$out/$name.log"
}

run_device() {
  local began=$SECONDS code=0
  timeout 300 "$build/tests/cuda_tests" --gtest_filter='*Device*' >"$out/device.log" 2>&1 || code=1
  row device "$code" "$began" "$out/device.log"
  grep -h 'on the host$' "$out/device.log"
}

run_conformance() { sharded conformance conformance_tests 'All/*Conformance.*cuda*'; }

run_laws() { sharded laws conformance_tests 'All/*Laws.*cuda*'; }

# A few cases that between them take every kind of path, under each tool.
run_sanitize() {
  local sanitizer cases filter began code tool
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer /usr/local/cuda*/compute-sanitizer/compute-sanitizer \
    2>/dev/null | head -n 1)
  [ -n "$sanitizer" ] || { echo "sanitize: no compute-sanitizer here, left out"; return; }
  cases=(dtype_bf16_bf16_mixed dtype_bf16_fp8_e4m3_decode dtype_f32_f32_chunked page_b3_csr_lbhdt page_b16_dense_lbthd page_b0_dense_lbhtd
    mask_custom_tree_verify mask_window_chunk_chunked score_cap_sinks_g6_mixed score_relative_g1_prefill long_4097_q4_sinks shape_g71_d64
    prefill_d64_sinks prefill_d128_window dtype_e4m3_prefill_d128_heads dtype_e4m3_mixed
    dim_100_mixed drafts_5_width_4 width_8_history
    convolved_gdn_mixed convolved_kda_chunked convolved_mamba2_mixed dims_128_128_gdn dims_256_256_kda gaps_odd_mixed drafts_7)
  filter=$(printf 'All/*Conformance.*/%s__cuda*:' "${cases[@]}")
  "$build/tests/conformance_tests" --gtest_filter="$filter" >/dev/null 2>&1 # compiles them, which the tools would slow down
  for tool in memcheck racecheck initcheck synccheck; do
    began=$SECONDS code=0
    timeout 540 "$sanitizer" --tool "$tool" --error-exitcode 9 --launch-timeout 60 "$build/tests/conformance_tests" --gtest_filter="$filter" \
      >"$out/$tool.log" 2>&1 || code=1
    row "$tool" "$code" "$began" "$out/$tool.log"
  done
}

# Adds the row of a step that leaves NAME.json: bench_row NAME VERDICT BEGAN
bench_row() {
  names+=("$1") verdicts+=("$2") seconds+=("$((SECONDS - $3))")
  passed+=("$(grep -c '"status": "ok"' "$out/$1.json" 2>/dev/null || true)")
  failed+=("$(grep -cE '"status": "(wrong|failed)"' "$out/$1.json" 2>/dev/null || true)")
  skipped+=("$(grep -cE '"status": "(not run|refused)"' "$out/$1.json" 2>/dev/null || true)")
}

has_torch() { python3 -c 'import torch' 2>/dev/null || { echo "$1: python3 has no PyTorch here, left out"; return 1; }; }

# Every cell against PyTorch's kernels and the recorded peers; a floor that is not reached is shown, a wrong output fails.
run_bench() {
  local began=$SECONDS verdict=pass
  has_torch bench || return
  timeout "${GPU_CHECK_BENCH_SECONDS:-590}" python3 "$(dirname "$0")/gpu_bench.py" --object "$build/libimbrex_bench.so" --json "$out/bench.json" \
    >"$out/bench.log" 2>&1 || verdict=FAIL
  bench_row bench "$verdict" "$began"
  sed -n '/^group  /,$p' "$out/bench.log"
}

# The layers of published models: a cliff fails.
run_zoo() {
  local began=$SECONDS verdict=pass limit=${GPU_CHECK_ZOO_SECONDS:-590}
  has_torch zoo || return
  timeout "$limit" python3 "$(dirname "$0")/gpu_zoo.py" --object "$build/libimbrex_bench.so" --json "$out/zoo.json" --seconds "$((limit - 50))" \
    ${GPU_CHECK_FA3:+--fa3 "$GPU_CHECK_FA3"} >"$out/zoo.log" 2>&1 || verdict=FAIL
  bench_row zoo "$verdict" "$began"
  sed -n '/^worst ten/,$p' "$out/zoo.log"
}

"$build/imbrex" info >"$out/info.txt" 2>&1
gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
for step in "${steps[@]}"; do
  declare -F "run_$step" >/dev/null || { echo "gpu_check: no step $step" >&2; exit 2; }
  "run_$step"
done

worst=0
{
  echo "GPU: ${gpu:-unknown}"
  printf '%-14s %-6s %8s %8s %8s %8s\n' step result passed failed skipped seconds
  for i in "${!names[@]}"; do
    printf '%-14s %-6s %8s %8s %8s %8s\n' "${names[i]}" "${verdicts[i]}" "${passed[i]:-0}" "${failed[i]:-0}" "${skipped[i]:-0}" "${seconds[i]}"
    [ "${verdicts[i]}" = pass ] || worst=1
  done
} >"$out/summary.txt"
for verdict in "${verdicts[@]}"; do [ "$verdict" = pass ] || worst=1; done
{
  printf '{"gpu": "%s", "steps": [' "$gpu"
  for i in "${!names[@]}"; do
    printf '%s\n  {"step": "%s", "result": "%s", "passed": %d, "failed": %d, "skipped": %d, "seconds": %d}' "$([ "$i" -eq 0 ] || echo ,)" \
      "${names[i]}" "${verdicts[i]}" "${passed[i]:-0}" "${failed[i]:-0}" "${skipped[i]:-0}" "${seconds[i]}"
  done
  printf ']}\n'
} >"$out/summary.json"
grep -h -A4 'Failure$' "$out"/*.log 2>/dev/null | head -n 60
cat "$out/summary.txt"
exit "$worst"
