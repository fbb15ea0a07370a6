"""Greedy text of 200 prompts under a policy: what the equality modules share."""

from __future__ import annotations

from collections.abc import Sequence

from specctl.collect.prompts import load_prompts
from specctl.policy import Chain, EntropyBins, Policy, RootOnly, StaticTree
from specctl.runtime.api import Decoder
from specctl.runtime.conversations import Conversation, DecodeSettings, next_request
from specctl.runtime.load import Pair
from specctl.runtime.metrics import pooled
from specctl.runtime.observe import Request
from tests.policy.scorers import SCORED

NUM_PROMPTS, NEW_TOKENS = 200, 24
Texts = dict[str, tuple[int, ...]]
BASE = StaticTree(depth=5, top_k=6, num_tokens=24)
POLICIES = {
    "chain": Policy(shape=Chain(num_draft_tokens=4)),
    "eagle2": Policy(shape=BASE),
    # Edges inside the range of Φ at depth 5, so that several bins occur.
    "hetero": Policy(shape=EntropyBins(base=BASE, edges=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0))),
    "c2t": Policy(shape=SCORED["c2t joint"]),
}
PLAIN = Policy(shape=RootOnly())


def requests_of(pair: Pair) -> list[Request]:
    prompts = load_prompts("embedded", limit=NUM_PROMPTS)
    assert len(prompts) == NUM_PROMPTS
    settings, tokenizer = DecodeSettings(NEW_TOKENS), pair.target.tokenizer
    return [next_request(tokenizer, Conversation(prompt), settings) for prompt in prompts]


def texts_of(pair: Pair, policy: Policy, requests: Sequence[Request], batch_size: int) -> Texts:
    decoder = Decoder(pair, policy, batch_size=batch_size)
    done = list(decoder.loop(requests).run(requests))
    metrics = pooled(completion.metrics for completion in done)
    if policy.shape.kind != "ar":
        assert metrics.num_accepted > 0, "nothing was ever accepted: equality would prove nothing"
    return {completion.request.request_id: completion.token_ids for completion in done}
