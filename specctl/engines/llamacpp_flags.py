"""llama.cpp: flags of `llama-server`, the same as a file for `xllamacpp`, and GGUF files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from specctl.engines.engine import (
    Engine,
    Export,
    GgufWeights,
    MeanRound,
    Serving,
    fixed_shape,
    is_chain,
    made,
    parsed,
    refused,
)
from specctl.errors import EngineError
from specctl.policy import (
    Chain,
    ChainSchedule,
    Policy,
    RootOnly,
    Shape,
    SignalStop,
    TopProbability,
    as_chain,
    at_batch_size,
    build_shape,
)
from specctl.policy.family import Depth, Length
from specctl.records import PositiveInt, Probability, Record, require
from specctl.runtime.checkpoints import Kind

FILE, GGUF = "llama-server.json", ".gguf"
CHECKED_BUILD = 11549
TYPES: dict[Kind, str] = {
    "eagle3": "draft-eagle3",
    "dflash": "draft-dflash",
    "dspark": "draft-dspark",
    "mtp": "draft-mtp",
    "draft_model": "draft-simple",
}
"""`--spec-type` by the kind of the drafter; without `draft-` before May 2026 (#22964)."""


class LlamaServer(Record):
    """Flags of `llama-server`, underscores for hyphens; of build 11549."""

    # path of the target's GGUF file, if it is known
    model: Annotated[str, Field(min_length=1)] | None = None
    # None decodes plainly.
    spec_type: (
        Literal["draft-eagle3", "draft-simple", "draft-dflash", "draft-dspark", "draft-mtp"] | None
    ) = None
    spec_draft_model: Annotated[str, Field(min_length=1)] | None = None  # path of a GGUF file
    spec_draft_n_max: Depth | None = None
    spec_draft_n_min: Length = 0
    spec_draft_p_min: Probability = 0.0
    # Several requests at once: sampling in the backend loses most drafts of EAGLE-3.
    spec_draft_backend_sampling: bool | None = None
    # Accepted rates by position in place of the drafter's own; the text is then no answer.
    spec_synth_rates: tuple[Probability, ...] | None = None
    parallel: PositiveInt | None = None  # slots

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        most, rates = self.spec_draft_n_max or 0, self.spec_synth_rates
        drafts: list[str | int | None] = [self.spec_type, self.spec_draft_n_max]
        if self.spec_type != "draft-mtp":  # which may be layers of the target
            drafts.append(self.spec_draft_model)
        whole = len({one is None for one in drafts}) == 1
        require(whole, "spec_type, spec_draft_model and spec_draft_n_max go together")
        require(self.spec_draft_n_min <= most, f"spec_draft_n_min must not exceed {most}")
        require(most > 0 or not self.spec_draft_p_min, "spec_draft_p_min needs spec_type")
        if rates is not None:
            require(len(rates) == most, f"spec_synth_rates needs {most} rates, found {len(rates)}")
            falls = all(low <= high for high, low in pairwise(rates))
            require(falls, "spec_synth_rates must not rise")
        return self

    @property
    def flags(self) -> tuple[str, ...]:
        """Words of the command line behind `--model`; defaults are left out."""
        words: list[str] = []
        for name, value in self.model_dump(exclude_defaults=True, exclude={"model"}).items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            elif isinstance(value, tuple):
                words += [f"--{flag}", ",".join(f"{one:.6f}" for one in value)]
            else:
                words += [f"--{flag}", str(value)]
        return tuple(words)

    @property
    def shape(self) -> Shape:
        """The drafts of these flags."""
        if self.spec_draft_n_max is None:
            return RootOnly()
        if self.spec_draft_p_min == 0 and self.spec_draft_n_min <= 1:
            return Chain(num_draft_tokens=self.spec_draft_n_max)
        return TopProbability(
            threshold=self.spec_draft_p_min,
            window=self.spec_draft_n_max,
            min_draft_tokens=self.spec_draft_n_min,
        )


def loss(shape: Shape) -> str | None:
    if isinstance(shape, RootOnly | TopProbability) or is_chain(shape):
        return None
    if isinstance(shape, ChainSchedule):
        return "lengths by batch size: llama.cpp has one length"
    if isinstance(shape, SignalStop) and shape.top_k == 1 and shape.signal == "confidence":
        return (
            "its stop on a token's probability among all tokens: llama.cpp takes it among the ten "
            "likeliest and leaves the uncertain token out"
        )
    return (
        f"the choice of {shape.kind} in every round: llama.cpp drafts chains of one length, or up "
        "to its own stop"
    )


def nearest(shape: Shape, mean: MeanRound | None) -> Shape | None:
    if isinstance(shape, ChainSchedule):
        return at_batch_size(shape, 1)
    chain = as_chain(Policy(shape=shape)).shape
    if isinstance(chain, SignalStop) and chain.signal == "confidence":
        return TopProbability(threshold=chain.threshold, window=chain.window)
    return fixed_shape(chain, mean)


def write(policy: Policy, serving: Serving) -> Export:
    """Flags, the same as a file, and the GGUF files of a pair that has none."""
    shape, target = policy.shape, serving.target
    fields: dict[str, Any] = {"parallel": serving.max_batch_size}
    files: dict[str, Callable[[Path], None]] = {}
    notes, model = list[str](), ""
    if isinstance(shape, RootOnly):
        notes.append("llama.cpp decodes plainly without --spec-type.")
    else:
        drafter = serving.drafter_for("llama.cpp", TYPES)
        model, is_head = drafter.model, drafter.method == "eagle3"
        if not model.endswith(GGUF):
            if drafter.method not in ("eagle3", "draft_model"):
                raise EngineError(
                    f"the drafter {model} is of kind {drafter.method}, whose GGUF file is not "
                    "written here",
                    hint="convert it with llama.cpp's convert_hf_to_gguf.py, and give the file",
                )
            if target is None:
                raise EngineError(
                    "a drafter's GGUF file has the target's tokenizer, and the target is not named",
                    hint="give --target, a folder or a GGUF file",
                )
            files["drafter.gguf"] = partial(_write, model, serving.weights, target)
            model = serving.path("drafter.gguf")
        if not isinstance(shape, TopProbability):
            shape = TopProbability(window=build_shape(shape).max_depth)
        fields |= {
            "spec_type": TYPES[drafter.method],
            "spec_draft_model": None if model == target else model,
            "spec_draft_n_max": shape.window,
            "spec_draft_n_min": shape.min_draft_tokens,
            "spec_draft_p_min": shape.threshold,
            "spec_synth_rates": serving.synthetic_rates,
        }
        if is_head and serving.max_batch_size != 1:
            fields["spec_draft_backend_sampling"] = False
            notes.append(
                "With --spec-draft-backend-sampling, its default, build 11549 drafts wrongly for "
                "several requests at once: an EAGLE-3 head lost half of its accepted tokens."
            )
    if target is not None and not target.endswith(GGUF):
        files["target.gguf"] = partial(_write, target, serving.weights, None)
        target = serving.path("target.gguf")
    elif target is not None and os.path.isfile(target):
        from specctl.engines.gguf_files import check_pair

        check_pair(Path(target), Path(model) if os.path.isfile(model) else None)
    if files and serving.folder is None:
        notes.append(f"specctl export --out DIR writes {' and '.join(files)}.")
    if serving.synthetic_rates is not None:
        notes.append("Acceptances are made up: time them, and do not read the answers.")
    settings = made(LlamaServer, fields | {"model": target}, "flags of llama-server")
    given = settings.model_dump(mode="json", exclude_defaults=True)  # as flags
    content = {FILE: json.dumps(given, indent=2) + "\n"}
    return Export(settings.flags, files=content, notes=tuple(notes), made=files, target=target)


def _write(model: str, weights: GgufWeights, target: str | None, path: Path) -> None:
    """Writes a model's GGUF file; `target` of a drafter."""
    from specctl.engines.gguf_files import write_model
    from specctl.runtime.identity import model_folder

    folder = partial(model_folder, embedded_default="target")
    write_model(folder(model), path, weights, target=None if target is None else folder(target))


def read(files: Mapping[str, str]) -> Policy:
    settings = read_file(files[FILE])
    if settings.spec_synth_rates is not None:
        raise refused(FILE, "spec_synth_rates makes acceptances up")
    return Policy(shape=settings.shape)


def read_file(text: str) -> LlamaServer:
    """The flags of a file."""
    return parsed(LlamaServer, text, FILE)


LLAMACPP = Engine(
    name="llamacpp",
    title="llama.cpp",
    command="llama-server --model TARGET",
    checked=f"build {CHECKED_BUILD} (xllamacpp 2026.10.{CHECKED_BUILD}): its counts are replay's "
    "(tests/engines/test_llamacpp.py)",
    files=(FILE,),
    budgets=("per_request",),
    loss=loss,
    draws=lambda shape: "sampled drafts: replay and checks are of greedy ones",
    nearest=nearest,
    write=write,
    read=read,
    batching="llamacpp",
    has_synthetic=True,
)
