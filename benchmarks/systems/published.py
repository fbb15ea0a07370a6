"""What the papers print, by table: the figures that the page sets beside ours.

Each entry is one target model's pair of numbers, baseline first.
"""

from __future__ import annotations

Pairs = dict[str, tuple[float, float]]

HETERO_CALLS: Pairs = {
    "Vicuna 13B": (3228, 3015),
    "LLaMA-3.1 8B": (4368, 4175),
    "LLaMA-3.3 70B": (4882, 4731),
    "DeepSeek-R1-Distill 8B": (6666, 6469),
}
"""HeteroSpec (arXiv:2505.13254), Table 1, column Mean, Calls: EAGLE-3, HeteroSpec."""
HETERO_TOKENS: Pairs = {
    "Vicuna 13B": (166296, 139308),
    "LLaMA-3.1 8B": (269418, 242401),
    "LLaMA-3.3 70B": (239841, 211268),
    "DeepSeek-R1-Distill 8B": (408481, 377221),
}
"""The same table, Tokens."""
C2T_TOKENS: Pairs = {
    "LLaMA-2 7B": (2.6, 2.0),
    "LLaMA-2 13B": (2.6, 1.9),
    "LLaMA-2 70B": (2.5, 2.0),
    "Vicuna 7B": (1.5, 1.3),
    "Vicuna 13B": (1.4, 1.2),
    "Vicuna 33B": (2.0, 2.0),
}
"""C2T (arXiv:2502.13652), Table 2, millions of verified tokens at about equal accept length:
EAGLE-2, C2T as trained on LLaMA-2 7B."""
C2T_QUOTE = "75% to 80% of the tokens while maintaining the acceptance length"
"""Its conclusion's words."""
ECHO_MAT: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "Vicuna-13B": ((8.49, 6.82, 6.41, 6.49, 6.83), (9.35, 6.53, 6.34, 6.24, 6.33)),
    "LLaMA3.1-8B": ((7.18, 6.50, 5.46, 7.06, 6.43), (7.22, 6.28, 5.24, 6.81, 6.23)),
    "LLaMA3.3-70B": ((7.12, 6.53, 5.19, 6.95, 5.92), (7.07, 6.41, 5.10, 6.84, 5.94)),
    "Qwen3-8B": ((3.91, 3.94, 3.28, 3.46, 3.71), (3.82, 3.88, 3.20, 3.36, 3.63)),
    "Qwen3-32B": ((2.99, 3.32, 2.55, 2.83, 3.04), (2.95, 3.29, 2.48, 2.74, 2.95)),
    "Qwen3-235B": ((2.41, 2.73, 2.02, 2.35, 2.54), (2.32, 2.59, 2.08, 2.24, 2.37)),
}
"""ECHO (arXiv:2604.09603), Table 1, mean accepted tokens at batch 1 on HumanEval, GSM8K, CNN/DM,
Alpaca and MT-Bench: EAGLE-3, ECHO."""
ECHO_SPEED: Pairs = {
    "Vicuna-13B": (3.92, 4.14),
    "LLaMA3.1-8B": (3.72, 3.94),
    "LLaMA3.3-70B": (4.43, 4.70),
    "Qwen3-8B": (2.20, 2.57),
    "Qwen3-32B": (2.00, 2.32),
    "Qwen3-235B": (1.69, 2.02),
}
"""The same table, speed-up over plain decoding, column Avg."""
ECHO_HIGH_LOAD: Pairs = {"LLaMA-3.1-8B": (10703, 11551), "Qwen3-235B": (2803, 3207)}
"""ECHO, section 5.2, tokens/s at batch 256: EAGLE-3, ECHO."""
MARS_TAU: Pairs = {
    "Vicuna 13B": (5.64, 7.20),
    "LLaMA-3.1 8B": (4.82, 6.61),
    "LLaMA-3.3 70B": (5.66, 6.39),
    "Qwen3 8B": (4.41, 5.22),
    "Qwen3 32B": (4.21, 5.23),
    "Qwen3 235B": (4.14, 5.14),
}
"""MARS (arXiv:2601.15498), Table 1, temperature 1, acceptance length, Mean: EAGLE-3, MARS."""
ADASD_GEN: Pairs = {
    "GSM8K, Llama 70B, 8B": (1.0, 1.169),
    "GSM8K, Llama 70B, 1B": (1.0, 1.286),
    "GSM8K, Qwen 72B, 7B": (1.0, 1.241),
    "HumanEval, Llama 70B, 8B": (1.0, 1.258),
    "HumanEval, Llama 70B, 1B": (1.0, 1.422),
    "HumanEval, Qwen 72B, 7B": (1.0, 1.227),
}
"""AdaSD (arXiv:2512.11280), Tables 3 and 4, speed-up of Gen-Only over a fixed chain of 5."""
ADASD_BOTH: Pairs = {
    "GSM8K, Llama 70B, 8B": (1.0, 1.260),
    "GSM8K, Llama 70B, 1B": (1.0, 1.412),
    "GSM8K, Qwen 72B, 7B": (1.0, 1.278),
    "HumanEval, Llama 70B, 8B": (1.0, 1.316),
    "HumanEval, Llama 70B, 1B": (1.0, 1.491),
    "HumanEval, Qwen 72B, 7B": (1.0, 1.229),
}
"""The same tables, AdaSD."""
ADASD_ASSISTED: Pairs = {
    "GSM8K, Llama 70B, 8B": (1.156, 1.260),
    "GSM8K, Llama 70B, 1B": (1.210, 1.412),
    "GSM8K, Qwen 72B, 7B": (1.287, 1.278),
    "HumanEval, Llama 70B, 8B": (1.267, 1.316),
    "HumanEval, Llama 70B, 1B": (1.332, 1.491),
    "HumanEval, Qwen 72B, 7B": (1.282, 1.229),
}
"""The same tables: AssistedGen, AdaSD."""


def changes(pairs: Pairs) -> list[float]:
    """Of each model, ours over baseline less 1."""
    return [ours / baseline - 1 for baseline, ours in pairs.values()]


def mean_pairs(by_task: dict[str, tuple[tuple[float, ...], tuple[float, ...]]]) -> Pairs:
    """Means over the tasks."""
    return {
        model: (sum(one) / len(one), sum(other) / len(other))
        for model, (one, other) in by_task.items()
    }
