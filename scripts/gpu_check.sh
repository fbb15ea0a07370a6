#!/usr/bin/env bash
# Every CUDA test and every GPU benchmark in one call, for a machine with a GPU and the
# runtime's dependencies: JSON and tables under $OUT (default benchmarks/results).
#
#   scripts/gpu_check.sh              on CUDA
#   DEVICE=cpu scripts/gpu_check.sh   the same calls in a small mode, to try the script itself
set -uo pipefail
cd "$(dirname "$0")/.."
device=${DEVICE:-cuda}
out=${OUT:-benchmarks/results}
python=${PYTHON:-python3}
mkdir -p "$out"
failed=0
small=()
repeats=()
tiny=()
if [ "$device" = cpu ]; then
  small=(--num-prompts 2 --max-new-tokens 8); repeats=(--repeats 5); tiny=(--small)
fi

run() {
  echo "== $*"
  PYTHONPATH="$PWD:${PYTHONPATH:-}" "$@" || { echo "FAILED: $*"; failed=1; }
}

if [ "$device" = cuda ]; then
  "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' \
    || { echo "error: no CUDA device; use DEVICE=cpu to try the script"; exit 5; }
  run "$python" -m pytest -q -m cuda tests
fi
for bench in benchmarks/kernels/bench_*.py; do
  run "$python" "$bench" --device "$device" --out "$out/kernels" "${tiny[@]}"
done
for dtype in float32 bfloat16; do
  run "$python" benchmarks/bench_forward.py --device "$device" --dtype "$dtype" --out "$out/$dtype" "${repeats[@]}"
  run "$python" benchmarks/bench_decode.py --device "$device" --dtype "$dtype" --out "$out/$dtype" "${small[@]}"
done
run "$python" benchmarks/bench_collect.py --device "$device" --out "$out" "${small[@]}"
run "$python" benchmarks/bench_dense.py --device "$device" --out "$out" "${small[@]}"
run "$python" benchmarks/bench_predict.py --device "$device" --out "$out" "${small[@]}"
run "$python" benchmarks/bench_ragged.py --device "$device" --out "$out" "${repeats[@]}"
run "$python" benchmarks/bench_policy.py --device "$device" --out "$out" "${small[@]}"
exit "$failed"
