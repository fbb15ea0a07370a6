#!/usr/bin/env bash
# Your own pair: which draft setting is fastest for your models, your prompts and this machine?
#
#   examples/own_pair.sh                             the packaged pair and prompts, about a minute
#   examples/own_pair.sh TARGET DRAFTER PROMPTS      folders or hub ids, and a file of prompts
#
# The packaged pair is a fixture: what it shows is how the commands work, not what large models do.
# For figures that mean something set NUM_PROMPTS=200 or more, and NUM_TOKENS to what you serve.
set -euo pipefail

target=${1:-embedded} drafter=${2:-embedded} prompts=${3:-embedded}
num_prompts=${NUM_PROMPTS:-32} num_tokens=${NUM_TOKENS:-32}
out=${OUT:-$(mktemp -d)}
pair=(--target "$target" --drafter "$drafter")

echo "== 1. Log once: at every position of every text, the tree that the drafter would grow there"
specctl collect "$prompts" "${pair[@]}" -o "$out/traces" --dense --depth 6 --children 4 \
  --limit "$num_prompts" --max-new-tokens "$num_tokens" --batch-size 4

echo "== 2. Measure what drafting and verifying cost here (leave --quick and the sizes out for all)"
specctl profile "${pair[@]}" -o "$out/cost_model.json" --quick --batch-sizes 1 \
  --contexts 64 --verified-tokens 1,8,32 --widths 1,4 --policy confidence

echo "== 3. Tune: replay every setting on the log, keep the fastest, judge it on held-out prompts"
specctl tune "$out/traces" --cost-model "$out/cost_model.json" --held-out 0.5 \
  --family confidence -o "$out/tuned"

echo "== 4. Decode: plain, the default tree, and the winner. Texts must be the same"
# A quick look. Some of these prompts may be among those tuned on: quote what tune held out.
specctl run "$prompts" "${pair[@]}" --compare "ar,eagle2,$out/tuned/policy" -o "$out/results" \
  --limit "$((num_prompts / 4))" --limit-seed 1 --max-new-tokens "$num_tokens"

echo
echo "The winner is $out/tuned/policy. Next:"
echo "  specctl run PROMPTS --policy $out/tuned/policy    decode with it"
echo "  specctl export $out/tuned/tune.json --to vllm -o serve    flags for your engine"
