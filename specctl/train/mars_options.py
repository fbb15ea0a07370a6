"""From the words of a command line to what `fit mars` runs and promises."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from pydantic import ValidationError

from specctl.errors import UsageError
from specctl.policy.mars import bound
from specctl.policy.parse import canonical_json, describe_violation
from specctl.runtime.conversations import DecodeSettings
from specctl.train.hazard import Hazard, Openings, hazards, keep_below
from specctl.train.mars import THETAS, MarsConfig
from specctl.train.paired import Plan, nothing_to_check
from specctl.train.runs import AskedPrompt

LOSSES = ("one-sided", "net")


def plan_of(
    prompts: Sequence[AskedPrompt], settings: DecodeSettings, num_seeds: int, batch_size: int
) -> Plan:
    """What every policy is asked.

    Raises:
        UsageError: several greedy answers to one prompt, which would be the same.
        EvidenceError: no prompt has an answer to check; better now than after decoding them.
    """
    if prompts and all(prompt.answer is None for prompt in prompts):
        raise nothing_to_check()
    if num_seeds > 1 and settings.sampling.greedy:
        raise UsageError(
            "--num-seeds",
            expected="1 without a temperature: greedy answers repeat",
            found=str(num_seeds),
            fix="give --temperature, or leave it out",
        )
    return Plan(prompts, settings, num_seeds, batch_size)


def mars_config(
    plan: Plan,
    *,
    mode: str,
    form: str,
    thetas: str | None,
    deny: str | None,
    special_ids: Collection[int],
    max_loss: float,
    confidence: float,
    loss: str,
) -> MarsConfig:
    """The configuration of `fit mars`.

    Args:
        thetas, deny: comma-separated.
        special_ids: of the tokenizer, always denied.

    Raises:
        UsageError: an option out of range, or a mode that the sampling gives nothing to do.
    """
    _check_mode(mode, greedy=plan.settings.sampling.greedy)
    fields: dict[str, Any] = {
        "mode": mode,
        "form": form,
        "thetas": _numbers(thetas, "--thetas", float) if thetas else THETAS.get(form, [0.0]),
        "deny_token_ids": sorted({*_numbers(deny or "", "--deny", int), *special_ids}),
        "contract": {
            "max_loss": max_loss,
            "confidence": confidence,
            "kind": loss_kind(loss, plan.num_seeds),
        },
    }
    try:
        return MarsConfig.model_validate_json(canonical_json(fields))
    except (ValidationError, ValueError) as error:
        found = describe_violation(error) if isinstance(error, ValidationError) else str(error)
        raise UsageError(
            "fit mars",
            expected="options within their ranges (see --help)",
            found=found,
            fix="correct that option",
        ) from error


def loss_kind(loss: str, num_seeds: int) -> str:
    """The kind of loss that `--loss` and the number of answers make."""
    if loss not in LOSSES:
        raise UsageError("--loss", expected=" or ".join(LOSSES), found=loss, fix="name one")
    if loss == "net":
        return "net"
    return "binary" if num_seeds == 1 else "bounded"


def screened(
    config: MarsConfig, found: Openings, max_diverging: float
) -> tuple[MarsConfig, tuple[Hazard, ...]]:
    """The thresholds that change few enough of a log's texts, and what the log says of each.

    Raises:
        UsageError: none does, or a share out of range.
    """
    if not 0 <= max_diverging <= 1:
        raise UsageError(
            "--max-diverging",
            expected="a share, 0 to 1",
            found=f"{max_diverging:g}",
            fix="change it",
        )
    told = hazards(found, [bound(config.acceptance(theta)) for theta in config.thetas])
    kept = keep_below(config.thetas, told, max_diverging)
    if not kept:
        raise UsageError(
            "--max-diverging",
            expected=f"at least {told[0].diverged.value:.3f}, the share of texts that theta "
            f"{config.thetas[0]:g} changes",
            found=f"{max_diverging:g}",
            fix="raise it, or give stricter --thetas",
        )
    return config.model_copy(update={"thetas": config.thetas[:kept]}), told[:kept]


def _check_mode(mode: str, *, greedy: bool) -> None:
    if mode == "alg1" and not greedy:
        raise UsageError(
            "--mode alg1",
            expected="greedy decoding, which is what the paper's Algorithm 1 states",
            found="a temperature",
            fix="use --mode sound, or leave --temperature out",
        )
    if mode == "code_v1" and greedy:
        raise UsageError(
            "--mode code_v1",
            expected="a temperature: as released, greedy decoding is strict",
            found="temperature 0",
            fix="use --mode sound, or give --temperature",
        )


def _numbers(text: str, option: str, kind: type[int] | type[float]) -> list[Any]:
    try:
        found = [kind(word) for word in text.split(",") if word.strip()]
        if not all(map(math.isfinite, found)):
            raise ValueError(text)
    except ValueError as error:
        raise UsageError(
            option, expected="comma-separated numbers", found=repr(text), fix="correct it"
        ) from error
    return found
