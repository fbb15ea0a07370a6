#!/usr/bin/env bash
# The first call on a GPU: is it right? Every op and texts of ten policies, the first rows of the
# headline, the CUDA tests. At most 290 s; DEVICE=cpu runs all of it small. See docs/gpu.md.
set -uo pipefail
cd "$(dirname "$0")/../.."
limit=${LIMIT_S:-265}
source scripts/gpu/env.sh
if [ "$device" = cuda ]; then
  nvidia-smi --query-gpu=name,memory.total,driver_version,clocks.sm,clocks.mem --format=csv,noheader
  "$python" -c '
import sys, torch, triton, transformers
print(sys.version.split()[0], *(f"{m.__name__} {m.__version__}" for m in (torch, triton, transformers)))
print(torch.cuda.get_device_name())' \
    || { echo "error: no CUDA device, or a library that cannot be imported"; failed=5; finish; }
fi
step "smoke" 90 "$python" scripts/gpu/smoke.py --seconds 80 "${small[@]}"
step "headline, first rows" 75 "$python" scripts/gpu/headline.py --budget-s 50 --out "$work/parts" "${small[@]}"
step "CUDA tests" 150 "$python" scripts/gpu/cuda_tests.py --seconds 140 --skip thousand "${small[@]}"
finish
