"""Draft lengths by load as an engine's own settings, for a server whose drafter stays as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from specctl.engines.sglang_flags import ADAPTIVE_FILE, slots_of
from specctl.engines.vllm_flags import triples_of
from specctl.formatting import count

Schedule = Sequence[tuple[int, int]]
"""First batch size and draft tokens of each stretch of loads; 0 is plain decoding."""


_OFF = {
    "vllm": "--speculative-config",
    "sglang": "--speculative-algorithm",
    "llamacpp": "--spec-type",
}


def length_lines(
    engine: str, schedule: Schedule, most: int, stop: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Changes to the command of a server that drafts already, one sentence a line.

    Args:
        engine: `vllm`, `sglang` or `llamacpp`. schedule: of at least one stretch.
        most: the largest load that was judged.
        stop: of llama.cpp, `p_min`, `n_min` and `backend_sampling` as its log states them, and
            `early stop`.
    """
    starts, lengths = ([stretch[at] for stretch in schedule] for at in (0, 1))
    starts[0] = 1  # engines have a length from one request on
    longest, varies = max(lengths), len(lengths) > 1
    if not longest:
        return [f"Set: start the server without {_OFF[engine]}."]
    if engine == "vllm":
        keys: dict[str, object] = {"num_speculative_tokens": longest}
        if varies:
            triples = triples_of(starts, lengths, most)
            keys["num_speculative_tokens_per_batch_size"] = triples
        since = " (vLLM 0.24 or newer)" * varies
        return [f"Set in --speculative-config: {json.dumps(keys)[1:-1]}{since}."]
    if engine == "sglang":
        flags = f"--speculative-num-steps {longest} --speculative-eagle-topk 1 "
        flags += f"--speculative-num-draft-tokens {longest + 1}"
        counted = "(the root counts as a draft token)"
        if not varies:
            return [f"Set: {flags} {counted}."]
        flags += f" --speculative-adaptive --speculative-adaptive-config {ADAPTIVE_FILE}"
        slots = json.dumps(slots_of(starts, lengths))
        return [f"Set: {flags} {counted}, with {slots} in that file (EAGLE)."]
    more = "".join(
        f" --spec-draft-{name.replace('_', '-')} {stop[name]}"
        for name in ("p_min", "n_min")
        if stop.get(name, "not stated") not in ("not stated", "0")
    )
    if stop.get("p_min", "not stated") == "not stated" and stop.get("early stop") == "on":
        more = " and the --spec-draft-p-min that the server has" + more
    more += " --no-spec-draft-backend-sampling" * (stop.get("backend_sampling") == "0")
    settings = [
        f"--spec-draft-n-max {length}{more}" if length else "no --spec-type" for length in lengths
    ]
    if not varies:
        return [f"Set: {settings[0]}."]
    parts = [
        f"{flag} from {count(start, 'request')} on"
        for flag, start in zip(settings, starts, strict=True)
    ]
    return [f"Set, as llama.cpp has one length for all loads: {'; '.join(parts)}."]
