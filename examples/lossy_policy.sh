#!/usr/bin/env bash
# A lossy policy with a certificate: more tokens a call, at a loss of right answers that is bounded.
#
#   examples/lossy_policy.sh                             the packaged pair and problems, a minute
#   examples/lossy_policy.sh TARGET DRAFTER PROMPTS      PROMPTS with answers, e.g. GSM8K's file
#
# MARS accepts the target's second choice where the target hardly prefers its first. The text is then
# not the target's own, so nothing of it runs without consent. What is certified: on prompts like
# these, the share of prompts whose right answer is lost is at most MAX_LOSS, at confidence 0.9.
# Twelve prompts can certify 0.3 and no less; a loss of 0.02 takes hundreds.
set -euo pipefail

target=${1:-embedded} drafter=${2:-embedded} prompts=${3:-embedded}
num_prompts=${NUM_PROMPTS:-12} max_loss=${MAX_LOSS:-0.3}
out=${OUT:-$(mktemp -d)}
load=(--target "$target" --drafter "$drafter" --batch-size 8 --max-new-tokens 48)

echo "== 1. Answer every prompt strictly and at each threshold, from the strictest on; certify"
specctl fit mars "$prompts" "${load[@]}" --limit "$num_prompts" --shape chain \
  --thetas 0.95,0.9 --max-loss "$max_loss" --confidence 0.9 -o "$out/mars"

echo "== 2. The certificate travels with the artifact"
specctl show "$out/mars"

echo "== 3. Without consent it does not run"
if specctl run "$prompts" "${load[@]}" --policy "$out/mars" --limit 2; then
  echo "a lossy policy ran without consent" >&2
  exit 1
fi

echo "== 4. With consent it does; the last line says how many texts changed"
specctl run "$prompts" "${load[@]}" --compare "ar,chain,$out/mars" --allow-lossy \
  --limit 6 -o "$out/results"

echo
echo "Files are in $out; $out/mars/README.md is the card to read before anyone serves this."
