"""vLLM as far as the plugin reads and replaces it, made up: for where no vLLM is installed.

`serve()` runs eight steps of two requests through the plugin, as SPECCTL_VLLM sets it.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specctl.embedded import embedded_path
from specctl.engines import register
from specctl.engines.vllm_tracing import PLAIN

K, VOCAB_SIZE = 2, 16
OF_VLLM = (
    "torch", "transformers", "tokenizers", "huggingface_hub", "safetensors", "numpy", "pydantic",
)  # fmt: skip
"""vLLM's own requirements, of which the plugin needs these too (`test_vllm_wheel.py`)."""


def request(**more: Any) -> SimpleNamespace:
    """As vLLM's runner holds one: two tokens of prompt, greedy."""
    plain = {**PLAIN, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "max_tokens": 8}
    params = SimpleNamespace(**{**plain, "eos_token_id": 9, "stop_token_ids": None, **more})
    return SimpleNamespace(sampling_params=params, lora_request=None, prompt_embeds=None)


class Runner:
    """What the plugin reads of vLLM's model runner, for some requests that decode together."""

    device = torch.device("cpu")
    max_model_len = 64
    scheduler_config = SimpleNamespace(max_num_seqs=4)
    vllm_config = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=K))

    def __init__(self, **requests: SimpleNamespace) -> None:
        size = len(requests)
        self.requests = requests
        self.discard_request_mask = SimpleNamespace(np=np.zeros(4, bool))
        self.input_batch = SimpleNamespace(
            req_ids=list(requests),
            num_reqs=size,
            num_tokens_no_spec=np.full(size, 2),
            num_prompt_tokens=np.full(size, 2),
            num_computed_tokens_cpu=np.zeros(size, int),
            token_ids_cpu=np.full((size, 64), 5),
        )


def models() -> SimpleNamespace:
    """vLLM's configuration of the embedded pair."""
    target, head = str(embedded_path("target")), str(embedded_path("eagle3"))
    model = SimpleNamespace(model=target, revision=None, dtype=torch.float32)
    model.tokenizer, model.tokenizer_revision = target, None
    draft = SimpleNamespace(model=head, revision=None, hf_config=SimpleNamespace())
    drafts = SimpleNamespace(method="eagle3", num_speculative_tokens=K, draft_model_config=draft)
    return SimpleNamespace(
        model_config=model,
        speculative_config=drafts,
        load_config=SimpleNamespace(download_dir=None),
        parallel_config=SimpleNamespace(world_size=1, data_parallel_size=1),
    )


class Config:
    use_v2_model_runner = False

    def __post_init__(self) -> None: ...


class Proposer:
    def __init__(self, size: int) -> None:
        self.model = SimpleNamespace(compute_logits=lambda: torch.rand(size, VOCAB_SIZE))

    def propose(self, *, next_token_ids: Tensor, num_speculative_tokens: int) -> Tensor:
        levels = [self._sample_draft_tokens()[0] for _ in range(num_speculative_tokens)]
        return torch.stack(levels, 1)

    def _sample_draft_tokens(self) -> tuple[Tensor, None]:
        return self.model.compute_logits().argmax(1), None


class ServingRunner(Runner):
    """A runner whose target gives token 3 to each of two requests in every step."""

    use_async_scheduling = False
    model_config = SimpleNamespace(get_vocab_size=lambda: VOCAB_SIZE)

    def __init__(self) -> None:
        super().__init__(a=request(), b=request())
        self.vllm_config, self.drafter = models(), Proposer(2)

    def execute_model(self, scheduled: Any) -> None:
        self.counts = list(scheduled.num_scheduled_tokens.values())

    def _sample(self, logits: Tensor, metadata: Any) -> Any:
        return SimpleNamespace(sampled_token_ids=torch.tensor([[3] + K * [-1]] * 2))

    def sample_tokens(self) -> None:
        metadata = SimpleNamespace(num_draft_tokens=[one - 1 for one in self.counts])
        self._sample(torch.rand(sum(self.counts), VOCAB_SIZE), metadata)
        roots = torch.tensor([3, 3])
        self.drafts = self.drafter.propose(next_token_ids=roots, num_speculative_tokens=K)
        self.input_batch.num_tokens_no_spec += 1

    def take_draft_token_ids(self) -> Any:
        return SimpleNamespace(req_ids=["a", "b"], draft_token_ids=self.drafts.tolist())

    def shutdown(self) -> None: ...


def install() -> None:
    """Puts these in the place of vLLM's modules."""
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.33.0"},
        "vllm.config": {"VllmConfig": Config},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
        "vllm.v1": {},
        "vllm.v1.sample": {},
        "vllm.v1.spec_decode": {},
        "vllm.v1.worker": {},
        "vllm.v1.sample.rejection_sampler": {},
        "vllm.v1.spec_decode.llm_base_proposer": {"SpecDecodeBaseProposer": Proposer},
        "vllm.v1.worker.gpu_model_runner": {"GPUModelRunner": ServingRunner},
    }
    for name, members in modules.items():
        sys.modules[name] = module = ModuleType(name)
        vars(module).update(members)
        above, _, last = name.rpartition(".")
        if above:
            setattr(sys.modules[above], last, module)


def serve() -> Any:
    """The plugin's session after the last step."""
    install()
    register()
    runner: Any = ServingRunner()
    drafted = [0, 0]
    for _ in range(8):
        counts = dict(zip("ab", (1 + one for one in drafted), strict=True))
        step = {"finished_req_ids": set(), "num_scheduled_tokens": counts}
        runner.execute_model(SimpleNamespace(**step))
        runner.sample_tokens()
        drafted = [len(row) for row in runner.take_draft_token_ids().draft_token_ids]
    ended = {"finished_req_ids": {"a", "b"}, "num_scheduled_tokens": {}}
    runner.execute_model(SimpleNamespace(**ended))
    runner.shutdown()
    return runner._specctl
