#!/usr/bin/env bash
# Both GPU calls one after the other, as ../shared/gpu/rehearse.sh runs them small on the CPU:
#
#   DEVICE=cpu OUT=DIR scripts/gpu_check.sh
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-/tmp/out} status=0
for call in call1 call2; do OUT=$out/$call bash scripts/gpu/$call.sh || status=1; done
exit $status
