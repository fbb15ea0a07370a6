#!/usr/bin/env bash
# Every CUDA test and every GPU benchmark in one call, for a machine with a GPU and the runtime's
# dependencies alone (torch, triton, transformers, safetensors, numpy, pydantic), within LIMIT_S.
#
#   scripts/gpu_check.sh              on CUDA
#   DEVICE=cpu scripts/gpu_check.sh   the same calls in a small mode, to try the script itself
#
# Under $OUT (default benchmarks/results): gpu_check-$DEVICE.json with all figures, and the cost
# models. Steps stand in the order of their weight: what there is no time left for is named, and
# counts as a failure, like what does not end in time.
set -uo pipefail
cd "$(dirname "$0")/.."
device=${DEVICE:-cuda}
out=${OUT:-benchmarks/results}
python=${PYTHON:-python3}
limit=${LIMIT_S:-530}
export PYTHONPATH="$PWD:${PYTHONPATH:-}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
mkdir -p "$out"
parts=$(mktemp -d)
steps=$(mktemp)
trap 'rm -rf "$parts" "$steps"' EXIT
failed=0
small=() repeats=() tiny=()
if [ "$device" = cpu ]; then
  small=(--num-prompts 2 --max-new-tokens 8) repeats=(--repeats 5) tiny=(--small)
fi

note() {  # note NAME SECONDS OUTCOME
  printf '%s\t%s\t%s\n' "$@" >> "$steps"
  "$python" scripts/gpu_report.py "$steps" "$parts" "$out/gpu_check-$device.json"
}

run() {  # run NAME COMMAND..., at most $cap seconds of those that are left
  local name=$1 began=$SECONDS left=$((limit - SECONDS)) outcome=ok status
  shift
  [ "$left" -le "${cap:-$limit}" ] || left=$cap
  if [ "$left" -lt 10 ]; then
    note "$name" 0 "no time left"
    failed=1
    return
  fi
  echo "== $name"
  timeout --kill-after 5 "$left" "$@"
  status=$?
  [ "$status" -eq 0 ] || { failed=1; outcome="failed, status $status"; }
  [ "$status" -ne 124 ] || outcome="stopped after $left s"
  note "$name" $((SECONDS - began)) "$outcome"
}

bench() {  # bench FILE ARGUMENTS..., from benchmarks/
  local file=$1
  shift
  run "$file $*" "$python" "benchmarks/$file" --device "$device" --out "$parts" "$@"
}

has() {  # has LIBRARY NAME: whether it is there; else NAME is noted as left out
  "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)" && return
  note "$2" 0 "left out: no $1 here"
  return 1
}

if [ "$device" = cuda ]; then
  "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' \
    || { echo "error: no CUDA device; use DEVICE=cpu to try the script"; exit 5; }
  cap=200 run "cuda tests" "$python" scripts/cuda_tests.py
fi
for file in benchmarks/kernels/bench_*.py; do
  cap=40 run "${file#benchmarks/}" "$python" "$file" --device "$device" --out "$parts/kernels" "${tiny[@]}"
done
cap=180 bench bench_cuda_decode.py "${tiny[@]}"  # its own budget is 150
cap=120 bench bench_cuda_serving.py "${tiny[@]}"
cap=90 bench bench_cuda_profile.py "${tiny[@]}"  # graphs, which a loop on CUDA runs
cp "$parts"/cost_model-*.json "$out" 2> /dev/null
has pyarrow bench_dense.py && bench bench_dense.py "${small[@]}"  # its traces are Parquet
bench bench_collect.py "${small[@]}"
for dtype in bfloat16 float32; do
  run "bench_decode.py $dtype" "$python" benchmarks/bench_decode.py \
    --device "$device" --dtype "$dtype" --out "$parts/$dtype" "${small[@]}"
done
bench bench_ragged.py "${repeats[@]}"
bench bench_policy.py "${small[@]}"
bench bench_predict.py "${small[@]}"
bench bench_forward.py "${repeats[@]}"
[ "$device" = cpu ] || cap=90 bench bench_cuda_profile.py --rounds ordinary
cp "$parts"/cost_model-*.json "$out" 2> /dev/null
"$python" scripts/gpu_report.py "$steps" "$parts" "$out/gpu_check-$device.json" --show
exit "$failed"
