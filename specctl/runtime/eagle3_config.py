"""`config.json` of an EAGLE-3 head as its makers write it, with their defaults.

Two layouts exist: flat, with Llama's keys at the top (SafeAILab, SpecForge, AngelSlim, NeMo
Automodel, ModelOpt), and that of speculators, with Llama's keys under `transformer_layer_config`.
Two of their facts are read in two ways, and `HeadFacts.readings` then has both:

- *The fused layers.* Without a list all take the inputs of layers 2, n // 2 and n - 3. SpecForge
  (`algorithms/model_providers.py`) and ModelOpt (`plugins/hf_eagle.py`) list layers whose *output*
  is fused; so does SGLang 0.5.23 read `eagle_config` (`models/llama.py`), the only place that it
  knows. speculators lists *inputs*; so does vLLM (0.32 and 0.33) read the list at the top, and its
  first model runner alone (`v1/worker/gpu_model_runner.py`) that under `eagle_config`: the second
  (`v1/worker/gpu/spec_decode/eagle/eagle3_utils.py`) then takes the layers of a head without one.
- *norm_before_residual* in speculators' layout: if it is absent, vLLM takes true
  (`configs/speculators/algos.py`), and speculators itself false (`models/eagle3/config.py`). In
  the flat layout an absent key is false everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from specctl.errors import ModelConfigError, ModelError
from specctl.runtime.eagle3_head import Eagle3Config, default_layers
from specctl.runtime.identity import read_config

log = logging.getLogger("specctl.models")
LIST = "eagle_aux_hidden_state_layer_ids"
AGAIN = "download the head again"
INSTEAD = "use a bfloat16 head of one Llama layer here, or serve this one: export knows it"
Layers = tuple[int, ...]
_FLAGS = ("norm_before_fc", "fc_norm", "use_aux_norm", "norm_output")
"""Switches of EAGLE-3.1, which change the arithmetic."""
_BIASES = ("bias", "attention_bias", "mlp_bias")
_ROPE: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "llama3": (
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
        set(),
    ),
    "yarn": (
        {"factor"},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
}
"""Rotations that do not depend on the length: keys that they need, and others that they know."""
_ROPE_OF_ALL = {"rope_type", "rope_theta", "original_max_position_embeddings"}
_ASSUMED = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000}
"""Defaults of LlamaConfig, which makers and engines share."""


@dataclass(frozen=True)
class Reading:
    """One way to read a head."""

    config: Eagle3Config
    words: str = ""  # of the choice, and of those who read so; empty where all read alike
    fix: str = ""  # the keys with which all read the head so


class HeadFacts:
    """The facts of a head's `config.json`, for its target.

    Attributes:
        notes: what was read and what was assumed, for `specctl doctor`.
    """

    def __init__(self, folder: Path, target: Any) -> None:
        self.folder, self.target, self.raw = folder, target, read_config(folder / "config.json")
        nested, self.flat = self._part(self.raw, "transformer_layer_config"), self.raw
        self.is_nested, self.flat = bool(nested), {**self.raw, **nested}
        self.eagle = self._part(self.raw, "eagle_config")
        layout = "speculators'" if nested else "the flat"
        self.notes = [f"an EAGLE-3 head in {layout} layout"]

    def readings(self, num_fused: int, draft_vocab_size: int) -> tuple[Reading, ...]:
        """The ways to read the head; the first is that of its makers.

        Args:
            num_fused: target states that `fc` takes.

        Raises:
            ModelConfigError: a fact that is missing, contradicts itself, or is not supported.
        """
        sizes = self._sizes(draft_vocab_size)
        found, norms = list[Reading](), self._norms()
        for layers, of_layers in self._layers(num_fused):
            top, inner = list(layers), [one - 1 for one in layers]
            lists = (
                f'"{LIST}": {top} at the top, for vLLM, and {inner} under eagle_config, for SGLang'
            )
            for norm, of_norm in norms:
                config = Eagle3Config(**sizes, aux_layers=layers, norm_before_residual=norm)
                key = f'"norm_before_residual": {str(norm).lower()}'
                found.append(Reading(config, of_norm or of_layers, key if of_norm else lists))
        return tuple(found)

    def refuse(
        self, problem: str, hint: str = INSTEAD, error: type[ModelError] = ModelConfigError
    ) -> ModelError:
        return error(f"EAGLE-3 head {self.folder} {problem}", hint=hint)

    def check(self) -> None:
        """Rejects another target, and heads of another arithmetic by the words of `config.json`.

        The file has one layer and no biases.
        """
        for problem in self._other_arithmetic():
            raise self.refuse(f"{problem}, which is not supported")
        for name, size in (
            ("hidden_size", self.target_width),
            ("vocab_size", self.size("vocab_size")),
        ):
            if size != (theirs := getattr(self.target, name)):
                raise ModelConfigError(
                    f"the EAGLE-3 head was trained for a target of {name} {size}, but this one "
                    f"has {theirs}",
                    hint="pair the head with its own target",
                )
        if stated := [name for name in _BIASES if self.flat.get(name)]:
            self._warn(
                f"{words(stated)} true, and the file has no biases: read without",
                "vLLM and SGLang would add some that nothing sets: make it false before you serve "
                "the head",
            )
        if (number := self.flat.get("num_hidden_layers")) not in (None, 1):
            self._warn(
                f"num_hidden_layers {number}, and the file has one layer: read as one",
                "vLLM and SGLang build as many layers as it states: make it 1 before you serve the "
                "head",
            )

    def _other_arithmetic(self) -> Iterator[str]:
        flat, parts = self.flat, (self.flat, self.eagle)
        if any(part.get("use_aux_hidden_state") is False for part in parts):
            yield "has use_aux_hidden_state false: it reads the last hidden state alone"
        for name in _FLAGS:
            if any(part.get(name) for part in parts):
                yield f"has {name} true, a norm of EAGLE-3.1"
        if (activation := flat.get("hidden_act") or "silu") not in ("silu", "swish"):
            yield f"has hidden_act {activation}"
        kinds, window = flat.get("layer_types"), flat.get("sliding_window")
        context = self.target.max_position_embeddings
        slides = kinds[0] == "sliding_attention" if kinds else flat.get("use_sliding_window")
        if slides and window and window < context:
            yield f"attends to the last {window} positions alone (sliding_window) of {context}"

    @property
    def target_width(self) -> int:
        """Width of one fused state."""
        return self.size("target_hidden_size", self.flat.get("hidden_size"))

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer; without a default it must be stated."""
        value = self.flat.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.refuse(
                f"has {name} {value!r} in its config.json, not a positive integer", AGAIN
            )
        return value

    def _part(self, of: dict[str, Any], name: str) -> dict[str, Any]:
        """An object under a key; empty if it is absent."""
        if not isinstance(found := of.get(name) or {}, dict):
            raise self.refuse(f"has {name} {found!r} in its config.json, no object", AGAIN)
        return found

    def _assumed(self, name: str) -> Any:
        """The value under a key of `_ASSUMED`, or its default."""
        if (value := self.flat.get(name)) is not None:
            return value
        self.notes.append(f"{name} {_ASSUMED[name]} assumed, as config.json states none")
        return _ASSUMED[name]

    def _warn(self, found: str, advice: str) -> None:
        self.notes.append(f"config.json has {found}")
        log.warning("EAGLE-3 head %s: config.json has %s; %s", self.folder, found, advice)

    def _sizes(self, draft_vocab_size: int) -> dict[str, Any]:
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        return {
            "hidden_size": hidden,
            "target_hidden_size": self.target_width,
            "num_attention_heads": heads,
            "num_key_value_heads": self.size("num_key_value_heads", heads),
            "head_dim": self.size("head_dim", hidden // heads),
            "intermediate_size": self.size("intermediate_size"),
            "vocab_size": self.size("vocab_size"),
            "draft_vocab_size": draft_vocab_size,
            "max_position_embeddings": self._assumed("max_position_embeddings"),
            "rms_norm_eps": float(self._assumed("rms_norm_eps")),
            "rope_parameters": self._rope(),
        }

    def _rotation(self) -> dict[str, Any]:
        """The rotation as it is stated for the head's kind of attention."""
        given, older = (self._part(self.flat, one) for one in ("rope_parameters", "rope_scaling"))
        if given and older and given != older:
            raise self.refuse(
                f"has rope_parameters {given} and rope_scaling {older}",
                "keep the one that it was trained with",
            )
        given = given or older
        entries = {kind: of for kind, of in given.items() if isinstance(of, dict)}
        if not entries:
            return given
        first, *others = entries.values()
        own = (self.flat.get("layer_types") or [None])[0]
        if own not in entries and any(of != first for of in others):
            raise self.refuse(
                f"has rope_parameters by kind of attention ({words(sorted(entries))}), and "
                "config.json does not say of which kind its layer is",
                "write the entry that it was trained with flat under rope_parameters",
            )
        return entries.get(own, first)

    def _rope(self) -> dict[str, Any]:
        """The rotation in transformers' present form."""
        given = self._rotation()
        of_images = ("mrope_section", "mrope_interleaved")
        given = {k: v for k, v in given.items() if v is not None and k not in of_images}
        factor = given.pop("partial_rotary_factor", self.flat.get("partial_rotary_factor"))
        if factor not in (None, 1):
            raise self.refuse(f"rotates a part of each head alone (partial_rotary_factor {factor})")
        kind = given.setdefault("rope_type", given.pop("type", "default"))
        if kind == "mrope":  # for text all components of a position are the same
            kind = given["rope_type"] = "default"
        if kind not in _ROPE:
            raise self.refuse(f"has rope_type {kind!r}, and only {words(_ROPE)} are supported")
        needed, more = _ROPE[kind]
        if missing := needed - given.keys():
            raise self.refuse(f"has rope_type {kind!r} without {words(sorted(missing))}")
        if unknown := given.keys() - needed - more - _ROPE_OF_ALL:
            raise self.refuse(
                f"has {words(sorted(unknown))} for rope_type {kind!r}, which is not known"
            )
        theta = self.flat.get("rope_theta")
        if "rope_theta" in given and theta not in (None, given["rope_theta"]):
            raise self.refuse(
                f"has rope_theta {theta} and, beside its rotation, {given['rope_theta']}",
                "make the two the same in config.json, as the head was trained",
            )
        given["rope_theta"] = float(given.get("rope_theta") or self._assumed("rope_theta"))
        self.notes.append(f"rotations {kind}, rope_theta {given['rope_theta']:g}")
        return given

    def _norms(self) -> list[tuple[bool, str]]:
        given = self.flat.get("norm_before_residual")
        if given is None and self.is_nested:
            absent = "absent norm_before_residual as"
            return [
                (True, f"{absent} true (vLLM)"),
                (False, f"{absent} false (speculators' own default)"),
            ]
        if given:
            self.notes.append("norm_before_residual true")
        return [(bool(given), "")]

    def _layers(self, num_fused: int) -> list[tuple[Layers, str]]:
        """The fused layers, by their inputs, in every way in which the list is read."""
        top, inner = (self._listed(part) for part in (self.flat, self.eagle))
        outputs = tuple(one + 1 for one in inner)
        if top and inner and top not in (inner, outputs):
            raise self.refuse(
                f"has {LIST} {list(top)} at the top and {list(inner)} under eagle_config",
                "make them the same in config.json",
            )
        own, ids = default_layers(self.target.num_hidden_layers), top or inner
        if len(ids or own) != num_fused:
            stated = f"lists layers {list(ids)}" if ids else "lists no layers"
            raise self.refuse(
                f"fuses {num_fused} target states by the columns of its fc.weight, and its "
                f"config.json {stated}",
                f"list the {num_fused} layers under {LIST}" if num_fused > 1 else INSTEAD,
            )
        if self.is_nested or ids in ((), own) or top == outputs:
            self._check_order(ids or own)
            why = ", as config.json lists them" if ids else " assumed, as config.json lists none"
            self.notes.append(f"inputs of layers {words(ids or own)}{why}")
            return [(ids or own, "")]
        as_outputs = f"layers {words(ids)} as outputs (SpecForge, ModelOpt, SGLang)"
        ways = [
            (tuple(one + 1 for one in ids), as_outputs),
            (ids, f"layers {words(ids)} as inputs (vLLM's first runner)"),
        ]
        sound = [one for one in ways if self._are_in_order(one[0])]
        if not sound:
            self._check_order(ids)
        if len(sound) == 1:
            [(other, _)] = [one for one in ways if one not in sound]
            self._warn(
                f"{sound[0][1]}: read so",
                f"the other reading, inputs of {words(other)}, is not supported here",
            )
            return [(sound[0][0], "")]
        # Nobody fuses the embedding, so that a first 1 is an output.
        return ways if ids[0] == 1 else ways[::-1]

    def _listed(self, part: dict[str, Any]) -> Layers:
        """The layers that a part of `config.json` lists; empty if it lists none."""
        for name in (one for one in part if one != LIST and one.endswith("layer_ids")):
            self._warn(f"{name}, which is not read", f"list the layers under {LIST}")
        found = part.get(LIST) or []
        if not isinstance(found, list) or any(type(one) is not int for one in found):
            raise self.refuse(f"has {LIST} {found!r}, no list of layer numbers")
        return tuple(found)

    def _are_in_order(self, ids: Layers) -> bool:
        bounds = (-1, *ids, self.target.num_hidden_layers)
        return all(low < high for low, high in pairwise(bounds))

    def _check_order(self, ids: Layers) -> None:
        number = self.target.num_hidden_layers
        listing = f"lists layers {list(ids)}, and its target has {number}"
        if max(ids) == number:
            raise self.refuse(
                f"{listing}: {number} is the output of the last layer, which is not supported"
            )
        if not self._are_in_order(ids):
            raise self.refuse(
                f"{listing}: they are not rising ones below {number}",
                "pair the head with its own target",
            )


def words(names: Iterable[object]) -> str:
    return ", ".join(map(str, names))
