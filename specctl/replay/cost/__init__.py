"""The cost model: from counts to time, measured on a machine or stated in a linear form."""

from specctl.replay.cost.files import load_cost_model, save_cost_model
from specctl.replay.cost.model import CostModel, LinearCost, Steps, TableCost

__all__ = [
    "CostModel",
    "LinearCost",
    "Steps",
    "TableCost",
    "load_cost_model",
    "save_cost_model",
]
