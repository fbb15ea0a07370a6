"""EAGLE-3 checkpoints as their makers publish them.

| maker | the layer's names | beside it |
|---|---|---|
| SafeAILab (`eagle/model/cnets.py`) | `midlayer.*` | a pickle; its 13B states 40 layers |
| SpecForge (`modeling/draft/llama3_eagle.py`) | `midlayer.*` | |
| AngelSlim (`models/draft/llama_eagle3.py`) | `midlayer.*` | no `t2d` |
| ModelOpt (`export/plugins/hf_spec_export.py`) | `layers.0.*` | no `t2d`; scales, if quantised |
| NeMo Automodel (`speculative/eagle/draft_llama.py`) | `model.layers.0.*` | |
| speculators (`models/eagle3/core.py`) | `layers.0.*` | parts of the target in training |

Sources as of August 2026. Tensors tell what `config.json` leaves out or states otherwise: the
number of layers, of fused states and of draft tokens.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from specctl.errors import CheckpointKeyError, CheckpointShapeError
from specctl.runtime.eagle3_config import AGAIN, HeadFacts, Reading
from specctl.runtime.eagle3_head import Eagle3Config, Eagle3Head
from specctl.runtime.identity import first_line, weight_files

log = logging.getLogger("specctl.models")
NORMS = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
Shape = tuple[int, ...]
_UNUSED = re.compile(r"(^|\.)rotary_emb\.inv_freq$|^verifier_(norm|lm_head)\.weight$")
"""Constants that old files carry, and parts of the target that speculators trains with."""
_OTHERS = (
    (r"(scale\w*|zeros|zero_point|qweight|_packed|absmax|SCB)$", "{quantised}"),
    (r"lora_[AB]\.", "LoRA adapters"),
    (r"(^|\.)parallel_draft_heads\.", "parallel draft heads"),
    (r"(^|\.)(fc_norm|aux_norm_\w+)\.", "a norm of each fused state"),
    (r"(^|\.)input_norm\.", "a norm before fc"),
    (r"self_attn\.[qk]_norm\.", "norms of queries and keys"),
    (r"self_attn\.(kv_a|kv_b|q_a|q_b)_", "latent attention"),
    (r"mlp\.(experts|gate|shared_expert\w*)\.", "experts"),
    (r"\.bias$", "biases"),
)
"""Tensors of another arithmetic, and its words."""


@dataclass(frozen=True)
class LoadedHead:
    """A head, the ways to read it, and what was read.

    Attributes:
        head: by the first reading; another one has the same weights.
        notes: what was read and what was assumed, for `specctl doctor`.
    """

    head: Eagle3Head
    readings: tuple[Reading, ...]
    notes: list[str]


def load_eagle3(
    folder: Path,
    *,
    target_embedding: Tensor,
    target_config: Any,
    target_lm_head: Tensor | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LoadedHead:
    """Loads a head and checks the name and shape of every tensor.

    Args:
        folder: with `config.json`, and weights as safetensors or torch's own.
        target_embedding: `[V, Ht]`, used unless the file has its own.
        target_config: for the target's widths, layers and context.
        target_lm_head: `[V, H]`, used by a head of the whole vocabulary without its own; None if it
            is not at hand.

    Raises:
        ModelConfigError: another target, or arithmetic that is not supported.
        CheckpointKeyError, CheckpointShapeError: tensors that are missing, unknown, or of other
            shapes than config.json says.
    """
    facts = HeadFacts(folder, target_config)
    file = _HeadFile.of(facts)
    file.check_arithmetic()
    facts.check()
    vocabulary = file.vocabulary()
    readings = facts.readings(file.num_fused(), len(vocabulary))
    config = readings[0].config
    state = file.state(config, target_lm_head)
    embedding = file.tensors.get("embed_tokens.weight", target_embedding).detach()
    file.check_shape("embed_tokens.weight", embedding, (config.vocab_size, config.hidden_size))
    stated, context = config.max_position_embeddings, target_config.max_position_embeddings
    if stated < context:
        log.warning(
            "EAGLE-3 head %s was made for %d positions, its target for %d: drafts at later "
            "positions may be accepted less often",
            folder, stated, context,
        )  # fmt: skip
    head = Eagle3Head(config, embedding, max(stated, context))
    head.load_state_dict(state | {"embedding": embedding, "d2t": vocabulary})
    head = head.to(device=device, dtype=dtype).eval()
    if "lm_head.weight" not in file.tensors and target_lm_head is not None:  # shared, not copied
        head.lm_head.weight = nn.Parameter(target_lm_head.to(device, dtype), requires_grad=False)
        facts.notes.append("the target's lm_head, as the file has none")
    head.set_vocabulary(vocabulary)
    facts.notes.append(f"{config.draft_vocab_size} draft tokens of {config.vocab_size}")
    return LoadedHead(head, readings, facts.notes)


def parameter_parts(config: Eagle3Config) -> dict[str, dict[str, Shape]]:
    """Names and shapes of the checkpoint's tensors, by the parameter of the head that stacks them.

    The layer's tensors are named `layer.*`. Vocabulary maps are not listed.
    """
    width, dim, inner = config.hidden_size, config.head_dim, config.intermediate_size
    q_size, kv_size = config.num_attention_heads * dim, config.num_key_value_heads * dim
    heads = {"q": q_size, "k": kv_size, "v": kv_size}
    fused = len(config.aux_layers) * config.target_hidden_size
    return {
        "fc.weight": {"fc.weight": (width, fused)},
        "norm": {"norm.weight": (width,)},
        "lm_head.weight": {"lm_head.weight": (config.draft_vocab_size, width)},
        "qkv.weight": {
            f"layer.self_attn.{name}_proj.weight": (size, 2 * width) for name, size in heads.items()
        },
        "o_proj.weight": {"layer.self_attn.o_proj.weight": (width, q_size)},
        "gate_up.weight": {
            f"layer.mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")
        },
        "down_proj.weight": {"layer.mlp.down_proj.weight": (width, inner)},
        **{norm: {f"layer.{norm}.weight": (width,)} for norm in NORMS},
    }


@dataclass(frozen=True)
class _HeadFile:
    """The tensors of a head, with the layer named `layer.*` and wrappers' prefixes left out."""

    facts: HeadFacts
    tensors: dict[str, Tensor]
    own_names: dict[str, str]  # in the file
    layers: tuple[str, ...]  # prefixes of decoder layers in the file

    @classmethod
    def of(cls, facts: HeadFacts) -> _HeadFile:
        found: dict[str, Tensor] = {}
        for path in weight_files(facts.folder):
            tensors = _load(path)
            if twice := found.keys() & tensors.keys():
                problem = f"has {min(twice)} in {path.name} and in a file before it"
                raise facts.refuse(problem, "keep the files of one copy", CheckpointKeyError)
            found |= tensors
        if not found:
            problem = "has no weights, model.safetensors or pytorch_model.bin"
            raise facts.refuse(problem, AGAIN, CheckpointKeyError)
        places = [
            re.match(r"([\w.]*?)(fc\.weight$|midlayer\.|layers\.\d+\.)", one) for one in found
        ]
        prefix = min((place[1] for place in places if place), key=len, default="")
        # `module.model.fc.weight` stands beside `module.lm_head.weight`.
        wrappers = [prefix[: dot.end()] for dot in re.finditer(r"\.", prefix)][::-1]
        layers: dict[str, None] = {}
        tensors, own_names = {}, dict[str, str]()
        for own, tensor in found.items():
            name = own.removeprefix(next((one for one in wrappers if own.startswith(one)), ""))
            if layer := re.match(r"midlayer|layers\.\d+", name):
                layers[layer[0]] = None
                name = "layer" + name.removeprefix(layer[0]) if len(layers) == 1 else name
            if not _UNUSED.search(name):
                tensors[name], own_names[name] = tensor, own
        return cls(facts, tensors, own_names, tuple(layers))

    def check_arithmetic(self) -> None:
        """Rejects tensors of another arithmetic by their words, and more layers than one."""
        method = self.facts.raw.get("quantization_config") or {}
        quantised = f"{method.get('quant_algo') or 'quantised'} weights with scales"
        quantised += f" (quantization_config {method.get('quant_method', 'absent')})"
        for mark, words in _OTHERS:
            for name, own in self.own_names.items():
                if re.search(mark, name):
                    what = words.format(quantised=quantised)
                    raise self.facts.refuse(f"has {what}, not supported here: {own}")
        if len(self.layers) > 1:
            raise self.facts.refuse(
                f"holds {len(self.layers)} layers ({', '.join(self.layers)}), and one is supported"
            )

    def num_fused(self) -> int:
        """Target states that `fc` takes."""
        width = self.facts.target_width
        if "fc.weight" not in self.tensors:
            raise self.facts.refuse(
                "lacks fc.weight: a head that fuses no states of its target is not supported",
                "download the head again, if its config.json lists layers",
                CheckpointKeyError,
            )
        columns = self.tensors["fc.weight"].shape[-1]
        if columns % width:
            raise CheckpointShapeError(
                f"EAGLE-3 tensor {self.own_names['fc.weight']} has {columns} columns, no multiple "
                f"of the target's width {width}",
                hint="check that config.json belongs to these weights",
            )
        return int(columns // width)

    def vocabulary(self) -> Tensor:
        """`d2t` after its checks; zeros for equal vocabularies."""
        facts, tensors, whole = self.facts, self.tensors, self.facts.size("vocab_size")
        d2t, member = tensors.get("d2t"), tensors.get("t2d")
        rows = len(tensors["lm_head.weight"]) if "lm_head.weight" in tensors else None
        stated = facts.flat.get("draft_vocab_size")
        size = stated or rows or whole
        if not stated and size != whole:
            facts.notes.append(f"draft_vocab_size {size} from lm_head, as config.json states none")
        if d2t is None and size == whole:
            return torch.zeros(whole, dtype=torch.int64)
        some = f"drafts {size} of {whole} tokens"
        if rows is None:
            raise facts.refuse(
                f"{some} and has no lm_head.weight; only a head of all tokens can share its "
                "target's",
                "download or export the head again",
                CheckpointKeyError,
            )
        if d2t is None:
            if member is None:
                raise facts.refuse(
                    f"{some}, and has neither d2t nor t2d to say which; engines would take the "
                    "first ones",
                    "export the head again with its map of the vocabulary",
                    CheckpointKeyError,
                )
            ids = member.nonzero()[:, 0]
            facts.notes.append("draft tokens by t2d, as the file has no d2t")
            d2t = ids - torch.arange(len(ids))
        self.check_shape("d2t", d2t, (size,))
        ids = d2t.long() + torch.arange(len(d2t))
        is_sound = bool(((ids >= 0) & (ids < whole)).all()) and len(ids.unique()) == len(ids)
        if is_sound and member is not None:  # some heads are published without it
            self.check_shape("t2d", member, (whole,))
            is_sound = torch.equal(ids.sort().values, member.nonzero()[:, 0])
        if not is_sound:
            raise CheckpointShapeError(
                "EAGLE-3 vocabulary maps: d2t and t2d do not name the same distinct ids below "
                f"{whole} (d2t leads to {int(ids.min())} to {int(ids.max())})",
                hint="rebuild d2t, target id less draft id, and t2d from the same token list",
            )
        return d2t.long()

    def state(self, config: Eagle3Config, target_lm_head: Tensor | None) -> dict[str, Tensor]:
        """The head's parameters, after checks of names and shapes."""
        parts, tensors = parameter_parts(config), dict(self.tensors)
        if "lm_head.weight" not in tensors:
            if target_lm_head is None:
                raise self.facts.refuse(
                    "shares its target's output layer, which is not supported here",
                    "save the target's lm_head.weight beside the head's tensors",
                    CheckpointKeyError,
                )
            tensors["lm_head.weight"] = target_lm_head
        shapes = {name: shape for part in parts.values() for name, shape in part.items()}
        maps = {"embed_tokens.weight", "d2t", "t2d"}
        wrong = {
            "lacks": shapes.keys() - tensors.keys(),
            "has unknown": tensors.keys() - shapes.keys() - maps,
        }
        found = [
            f"{verb} {', '.join(sorted(map(self._own, names))[:4])}{', ...' * (len(names) > 4)}"
            for verb, names in wrong.items()
            if names
        ]
        if found:
            raise self.facts.refuse(
                " and ".join(found),
                "download the head again; a head of another architecture cannot run here",
                CheckpointKeyError,
            )
        for name, shape in shapes.items():
            self.check_shape(name, tensors[name], shape)
            if tensors[name].dtype not in (torch.bfloat16, torch.float16, torch.float32):
                kind = str(tensors[name].dtype).removeprefix("torch.")
                raise self.facts.refuse(
                    f"has {kind} weights, which are not supported: {self._own(name)}",
                    "use its bfloat16 weights",
                )
        return {name: torch.cat([tensors[one] for one in part]) for name, part in parts.items()}

    def check_shape(self, name: str, tensor: Tensor, shape: Shape) -> None:
        if tuple(tensor.shape) != shape:
            raise CheckpointShapeError(
                f"EAGLE-3 tensor {self._own(name)} has shape {tuple(tensor.shape)}, and "
                f"config.json asks for {shape}",
                hint="check that config.json belongs to these weights and to this target",
            )

    def _own(self, name: str) -> str:
        """A tensor's name as the file has it, or would have it."""
        layer = (self.layers or ("midlayer",))[0]
        return self.own_names.get(name, re.sub("^layer(?=\\.)", layer, name))


def _load(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # torch rejects pickles of anything but plain tensors.
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # readers of damaged files raise anything
        raise CheckpointKeyError(
            f"EAGLE-3 checkpoint {path} is not a readable file of plain tensors: "
            f"{first_line(error)}",
            hint="download or convert it again",
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(v, Tensor) for v in loaded.values()):
        raise CheckpointKeyError(
            f"EAGLE-3 checkpoint {path} is a {type(loaded).__name__}, not a dictionary of tensors",
            hint="save the head's state_dict",
        )
    return loaded
