#!/usr/bin/env bash
# The ladder of README.md: dense traces of all packaged prompts, a cost model of this machine, a
# fitted policy, every baseline. About ten minutes on 2 quiet cores.
#
#   scripts/ladder.sh OUT
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?an output folder}
specctl=${SPECCTL:-.venv/bin/specctl}
export OMP_NUM_THREADS=1
mkdir -p "$out"
[ -d "$out/traces" ] || "$specctl" collect embedded -o "$out/traces" --dense \
  --max-new-tokens 64 --batch-size 8 --threads 1
"$specctl" profile -o "$out/cost_model.json" --threads 1
[ -d "$out/hetero" ] || "$specctl" fit cart "$out/traces" -o "$out/hetero" \
  --held-out 0.5 # the split of the ladder: one seed and share give one split everywhere
policies=(eagle2 chain eagle2:depth=9 "$out/hetero" confidence:window=9 svip:window=9 opt_tree ddd)
"$specctl" ladder "$out/traces" --cost-model "$out/cost_model.json" "${policies[@]/#/--policy=}" \
  -o "$out"
