#!/usr/bin/env bash
# The second call on a GPU: how fast is it? At most 400 s; DEVICE=cpu runs all of it small.
#
#   RERUN="words of test names"   what failed in the first call and was mended, run first
#
# See docs/gpu.md.
set -uo pipefail
cd "$(dirname "$0")/../.."
limit=${LIMIT_S:-375}
source scripts/gpu/env.sh
texts=(--device cuda --dtype bfloat16 --num-prompts 12)
split=(--budget-s 45 --policies eagle2)
if [ "$device" = cpu ]; then
  texts=(--num-prompts 1 --max-new-tokens 8)
  split=(--policies ar)
fi
if [ -n "${RERUN:-}" ]; then
  step "tests again" 60 "$python" scripts/gpu/cuda_tests.py --seconds 55 --only "$RERUN" "${small[@]}"
fi
step "headline" 140 "$python" scripts/gpu/headline.py --budget-s 115 --out "$work/parts" "${small[@]}"
step "kernels beside torch" 75 "$python" scripts/gpu/kernel_times.py --seconds 65 --out "$work/parts" "${small[@]}"
step "cost table" 110 "$python" benchmarks/bench_cuda_profile.py --out "$work" "${small[@]}"
step "texts beside transformers" 60 "$python" benchmarks/bench_decode.py --out "$work/parts" "${texts[@]}"
step "split of a round" 60 "$python" benchmarks/bench_cuda_decode.py --out "$work/parts" "${split[@]}" "${small[@]}"
step "a thousand launches" 60 "$python" scripts/gpu/cuda_tests.py --seconds 55 --only thousand "${small[@]}"
finish
