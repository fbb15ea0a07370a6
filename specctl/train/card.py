"""The artifact's README.md: what it is, for which pair, on what evidence, how to run it."""

from __future__ import annotations

from specctl.artifacts import PairFingerprint
from specctl.features import ENTROPY_TOP_K
from specctl.policy.records import StaticTree
from specctl.train.cart import CartFit
from specctl.train.report import LEGEND, TABLE_COLUMNS, CartReport, summary, table_rows


def write_card(fit: CartFit, pair: PairFingerprint, trace_digest: str) -> str:
    """Markdown; a pure function of its arguments."""
    return (
        "\n\n".join(
            (
                _head(pair),
                "## Evidence\n\n" + _evidence(fit.report, trace_digest),
                "## Bins\n\n" + _bins(fit.report),
                "## Use\n\n" + _use(pair),
                "## Limits\n\n" + _limits(fit.config.base),
            )
        )
        + "\n"
    )


def _head(pair: PairFingerprint) -> str:
    return f"""# HeteroSpec policy for {pair.target} with {pair.drafter}

Bins of Φ, the drafter's cumulative top-{ENTROPY_TOP_K} entropy along its best path, choose how
deep each draft tree grows and how many of its nodes the target verifies (arXiv:2505.13254).
Lossless: the emitted text follows the target's own law.

| part of the pair | name | digest |
|---|---|---|
| target | {_cell(pair.target)} | `{pair.target_digest}` |
| drafter | {_cell(pair.drafter)} | `{pair.drafter_digest}` |
| tokenizer | | `{pair.tokenizer_digest}` |"""


def _evidence(report: CartReport, trace_digest: str) -> str:
    lines = (f"traces `{trace_digest}`", *summary(report))
    return "\n".join(f"- {line}" for line in lines)


def _bins(report: CartReport) -> str:
    rows = (TABLE_COLUMNS, ("---",) * len(TABLE_COLUMNS), *table_rows(report))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"""{table}

{LEGEND}."""


def _use(pair: PairFingerprint) -> str:
    return f"""```
specctl show PATH
specctl run --policy PATH ...
```

specctl refuses to run it on another pair than {pair.target} with {pair.drafter}. Other runtimes
can evaluate `policy.onnx`: `phi` float32 `[n]` to `bin`, `depth`, `num_tokens`."""


def _limits(base: StaticTree) -> str:
    return f"""- The thresholds hold for this pair, for K = {ENTROPY_TOP_K} and for a base tree of
  {base.depth} levels. Φ is a sum over levels, so another K, depth or pair needs another fit.
- Figures are of the base tree's rounds, not of the policy's own. Compare it with `specctl run
  --compare` before you trust it.
- If the pair is specctl's embedded one, these figures are a fixture for people and tests; they
  say nothing about large models."""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
