"""The cost model: from counts to time, measured on a machine or stated in a linear form."""

from specctl.replay.cost.files import load_cost_model, save_cost_model
from specctl.replay.cost.model import CostModel, Steps

__all__ = ["CostModel", "Steps", "load_cost_model", "save_cost_model"]
