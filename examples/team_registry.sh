#!/usr/bin/env bash
# A registry in a team: Alice publishes signed policies, Bob finds the one for his pair and runs it,
# a move of the alias is taken back.
#
#   examples/team_registry.sh                        in a new folder, under a minute
#   REGISTRY=s3://bucket/prefix examples/team_registry.sh    in a bucket (AWS_* as usual)
set -euo pipefail

out=${OUT:-$(mktemp -d)}
registry=${REGISTRY:-$out/registry}
name=embedded+eagle3@cpu:demo    # target+drafter@hardware:workload

# Two people on one machine: each has settings, trusted keys and a cache of their own.
as() {
  local home=$out/home-$1
  shift
  XDG_CONFIG_HOME=$home/config XDG_CACHE_HOME=$home/cache XDG_STATE_HOME=$home/state \
    SPECCTL_REGISTRY=$registry specctl "$@"
}

echo "== Alice has two policies: one fitted to traces of her prompts, one with its tokens capped"
as alice collect embedded --limit 16 --max-new-tokens 24 --batch-size 4 -o "$out/traces"
as alice fit cart "$out/traces" -o "$out/first" > /dev/null
as alice fit cart "$out/traces" --cap-tokens -o "$out/second" > /dev/null

echo "== A key: Alice signs what she pushes and promotes; both trust no other key for these names"
as alice registry keygen "$out/alice"
for person in alice bob; do    # Bob got alice.pub from Alice, not from the registry
  as $person registry trust add "$out/alice.pub" --name "embedded*"
done

echo "== Publish both; prod means the first, then the second"
as alice registry init
as alice registry push "$out/first" "$name" --key "$out/alice"
as alice registry push "$out/second" "$name" --key "$out/alice"
as alice registry promote "$name" prod v1 --key "$out/alice" --reason "the first"
as alice registry promote "$name" prod v2 --key "$out/alice" --reason "fewer tokens"

echo "== Bob looks for his pair, and runs what prod means now"
as bob registry list embedded eagle3
as bob registry pull "$name@prod" -o "$out/pulled"
as bob run embedded --limit 1 --max-new-tokens 16 --policy "$registry/$name@prod"

echo "== It is slow at his load: prod goes back, with a reason; servers that follow it follow"
as alice registry rollback "$name" prod --key "$out/alice" --reason "slow at batch 32"
as bob registry log "$name"
as bob registry verify "$name@prod"

echo "== Mallory can write to the folder, yet has no key: for Bob her push and her move do not count"
as mallory registry push "$out/first" "$name" --alias prod
as mallory registry promote "$name" prod v2
as bob registry pull "$name@prod" -o "$out/unmoved"
cmp "$out/first/config.json" "$out/unmoved/config.json"
