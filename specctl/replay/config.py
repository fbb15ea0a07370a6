"""Options of `specctl profile`, `replay`, `ladder` and `tune`."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field

from specctl.errors import UsageError
from specctl.records import HELD_OUT, MAX_POSITIONS, TypedModel, increasing, option, require

Engine = Literal["specctl", "vllm", "llamacpp"]
"""The engine whose batching is simulated; both read a prompt whole.

- `specctl`: `DecodeLoop.step`, and SGLang 0.5.23 without overlap scheduling. Requests join as slots
  become free. Their prompts are read one after another while the others wait; then all active
  requests decode one round. A length by batch size counts the decoding requests.
- `vllm` (0.32 and 0.33, synchronous scheduling): prompts share the forward of the other requests'
  rounds, and their requests decode from the next step on. A length by batch size counts the
  requests *scheduled* one step earlier, prompts included, when the drafts were made.
- `llamacpp` (build 11549): as vLLM, but drafts are made in the step that verifies them. Its rules
  at the end of a text hold for single requests too: `replay.llamacpp`.
"""

ALL_PROMPTS: bool = option(
    False,
    "Take prompts that a policy was fitted on, too; it is then marked and cannot win",
    name="--all-prompts",
    group="advanced",
)
FORCE: bool = option(
    False, "Give verdicts on a clock that failed its own check", name="--force", group="advanced"
)
ARRIVAL_RATE: float | None = option(
    None,
    "Requests per second, Poisson",
    name="--arrival-rate",
    default="a closed loop, always full",
)


class ReplayConfig(TypedModel):
    """Policies, a load and the way of scoring."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policies: tuple[str, ...]  # names with settings, or artifact folders; several with commas
    cost_model: Path | None = option(
        None,
        "cost_model.json or a named clock: adds times",
        default="counts only",
        group="common",
    )
    baseline: int = option(
        1, "Which --policy the others are compared with, from 1", ge=1, group="common"
    )
    by_category: bool = option(False, "Also a table for each category", group="common")
    batch_size: int = option(
        1, "Prompts decoded together at most; above 1 the batch is simulated", ge=1, group="common"
    )
    engine: Engine = option(
        "specctl", "Whose batching is simulated: specctl, vllm or llamacpp", group="common"
    )
    in_order: bool = option(
        False,
        "Simulate the log once in its own order: totals of one run, to compare with a real one",
        name="--in-order",
    )
    arrival_rate_per_s: float | None = ARRIVAL_RATE
    tpot_limit_ms: float | None = option(
        None, "Goodput of a simulated batch: time per output token, ms", default="none"
    )
    allow_mismatch: bool = option(False, "Accept lossless artifacts of another pair")
    all_prompts: bool = ALL_PROMPTS
    force: bool = FORCE
    max_positions: int = MAX_POSITIONS
    seed: int = option(0, "Seed of the bootstrap, of the load and of the sample", ge=0)

    @property
    def specs(self) -> list[str]:
        """The policies, one an entry."""
        return [word.strip() for entry in self.policies for word in entry.split(",")]

    @property
    def has_load(self) -> bool:
        """Whether batches are simulated."""
        return self.batch_size > 1 or self.arrival_rate_per_s is not None or self.in_order

    def check(self) -> None:
        """Raises `UsageError` of a baseline that is no policy, or an option without effect."""
        if not 1 <= self.baseline <= len(self.specs):
            raise UsageError(
                f"--baseline {self.baseline} is not from 1 to {len(self.specs)}",
                hint="count the --policy options from 1",
            )
        if self.has_load:
            refuse_ignored({"--by-category": self.by_category}, "a load mixes the categories")
        else:
            refuse_ignored(
                {
                    "--engine": self.engine == "vllm",
                    "--tpot-limit-ms": self.tpot_limit_ms is not None,
                },
                "requests are replayed one at a time without --batch-size, --arrival-rate or "
                "--in-order",
            )
        if self.in_order:
            refuse_ignored(
                {
                    "--arrival-rate": self.arrival_rate_per_s is not None,
                    "--tpot-limit-ms": self.tpot_limit_ms is not None,
                },
                "--in-order keeps the log's own order",
            )


def refuse_ignored(given: dict[str, bool], reason: str) -> None:
    """Raises `UsageError` of the first given option."""
    for flag, is_given in given.items():
        if is_given:
            raise UsageError(f"{flag} would be ignored: {reason}", hint=f"leave {flag} out")


def _increasing(values: tuple[int, ...]) -> tuple[int, ...]:
    require(increasing((0, *values)), "increasing whole numbers from 1 on")
    return values


MAX_AXIS_VALUE = 1 << 20
"""More than any context, batch or tree; larger numbers are typing errors."""
Increasing = Annotated[
    tuple[Annotated[int, Field(le=MAX_AXIS_VALUE)], ...], AfterValidator(_increasing)
]
Axis = Annotated[Increasing, Field(min_length=1)]


class ProfileGrid(TypedModel):
    """The points that `specctl profile` times; sizes count per request."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_sizes: Axis = option(
        (1, 2, 4, 8),
        "Requests decoded together, 1 first, comma-separated",
        default="1,2,4,8, with --quick 1,4",
    )
    context_tokens: Axis = option(
        (64, 256), "Text before the root, tokens, comma-separated", name="--contexts"
    )
    tokens: Axis = option(
        (1, 2, 5, 8, 16, 32, 64),
        "Tokens verified per request, 1 first, comma-separated",
        name="--verified-tokens",
        default="1,2,5,8,16,32,64, of graphs 1,2,4,8,16,24,32,48,64",
    )
    widths: Axis = option((1, 4, 10), "Nodes a drafted level per request, 1 first, comma-separated")
    capture_limit_tokens: int = option(
        0,
        "Tokens of a batch up to which another engine pads to the next of --verified-tokens "
        "(captured graphs); 0: as this runtime, to its tiers with graphs, else not",
        name="--capture-limit",
        ge=0,
    )
    rounds: Literal["auto", "graphs", "ordinary"] = option(
        "auto",
        "What is timed: graphs, ordinary, or auto: graphs where this runtime decodes in them, "
        "which is on CUDA",
    )
    quick: bool = option(
        False,
        "A first look: one pass instead of five, batches of 1 and 4",
        name="--quick",
        group="common",
    )
    read: tuple[int, ...] = (1, 2, 5)  # tokens that the drafter reads after a round
    prompt_tokens: tuple[int, ...] = (16, 64, 256)  # lengths of prompts
    # passes over the grid, of few rounds each: drift then affects all points alike, and a burst of
    # other work only some samples of each
    num_passes: int = 5
    num_rounds: int = 2  # timed at a point in one pass
    loop_tokens: int = 16  # emitted in each run of the loop

    def held(self, axis: str) -> tuple[int, ...]:
        """Held-out points of an axis: whole midpoints of every second gap, from the top."""
        gaps = list(pairwise(getattr(self, axis)))[::-1][::2]
        return tuple(sorted((low + high) // 2 for low, high in gaps if high - low > 1))

    @property
    def num_steps(self) -> int:
        """Measurements, one step of the progress bar each."""
        points = len(self.batch_sizes) * (len(self.context_tokens) + 1)
        return self.num_passes * (points + len(self.prompt_tokens + self.held("prompt_tokens")))


class LadderConfig(TypedModel):
    """Settings of a ladder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    held_out_frac: float = HELD_OUT
    seed: int = option(
        0, "Seed of the split by prompt, the fits and the bootstrap", ge=0, group="common"
    )
    max_positions: int = MAX_POSITIONS
    all_prompts: bool = ALL_PROMPTS
    force: bool = FORCE
    num_kept: int = Field(63, ge=1)  # most draft nodes of a limit's tree
    num_folds: int = Field(4, ge=2)  # of the oracle's cross-fitting


class TuneConfig(TypedModel):
    """Settings of a search; `tuning.prepare` checks the words."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    families: tuple[str, ...] = option(
        (),
        "Policy whose settings are searched, e.g. svip, ddd:top_k=8, eagle2+survival, or an "
        "artifact folder; repeat for more",
        name="--family",
        default="static settings alone",
        repeats=True,
        group="common",
    )
    grids: tuple[str, ...] = option(
        (),
        "Values of a setting, field=v1,v2, in place of the stated ones; repeat for more",
        name="--grid",
        default="the stated grids",
        repeats=True,
    )
    for_engine: Literal["vllm", "sglang", "transformers", "llamacpp"] | None = option(
        None,
        "Search only what an engine runs: vllm, sglang, transformers, llamacpp",
        name="--for",
        default="all that specctl runs",
        group="common",
    )
    batch_size: int = option(1, "Prompts decoded together at most: slots", ge=1, group="common")
    arrival_rate_per_s: float | None = ARRIVAL_RATE
    objective: Literal["latency", "throughput", "goodput"] = option(
        "latency", "latency, throughput or goodput (with --tpot-limit-ms)", group="common"
    )
    tpot_limit_ms: float | None = option(
        None, "Time per output token of a good request, ms", default="none"
    )
    packing: Literal["ragged", "padded"] = option(
        "ragged", "Verification of unequal trees: ragged (back to back) or padded"
    )
    held_out_frac: float = HELD_OUT
    all_prompts: bool = ALL_PROMPTS
    force: bool = FORCE
    max_positions: int = MAX_POSITIONS
    seed: int = option(0, "Seed of the split by prompt and of all that draws", ge=0)
    factor: int = option(3, "Halving: prompts grow and settings shrink by it", ge=2)
    drops_unsupported: bool = False  # leaves out a family without a supported setting

    @property
    def has_load(self) -> bool:
        """Whether batches are simulated."""
        return self.batch_size > 1 or self.arrival_rate_per_s is not None
