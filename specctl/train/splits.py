"""Train and held-out prompts of a fit; the law is `specctl.splits`, which replay shares."""

from specctl.splits import Split, split_prompts

__all__ = ["Split", "split_prompts"]
