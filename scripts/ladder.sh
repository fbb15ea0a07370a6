#!/usr/bin/env bash
# The ladder of README.md: dense traces of all packaged prompts, a cost model of this machine, a
# fitted policy, every baseline. About ten minutes on 2 quiet cores. Half of the prompts are held out.
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
[ -d "$out/hetero" ] || "$specctl" fit cart "$out/traces" -o "$out/hetero" --held-out 0.5
policies=(eagle2 chain eagle2:depth=9 "$out/hetero" confidence:window=9 svip:window=9 opt_tree ddd)
"$specctl" ladder "$out/traces" --cost-model "$out/cost_model.json" "${policies[@]/#/--policy=}" \
  --held-out 0.5 -o "$out"
settings=(ar chain eagle2 eagle2:depth=9)
for k in 1 2 3 4 5 6 7 8; do settings+=("chain:num_draft_tokens=$k"); done
for depth in 2 3 4 5 6 8; do
  for top_k in 2 4 8; do
    for tokens in 8 16 32 64; do
      [ "$tokens" -gt "$depth" ] && settings+=("eagle2:depth=$depth:top_k=$top_k:num_tokens=$tokens")
    done
  done
done
"$specctl" replay "$out/traces" --cost-model "$out/cost_model.json" \
  "${settings[@]/#/--policy=}" -o "$out"
