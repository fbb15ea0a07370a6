"""The cost model: from counts to time, measured on a machine or stated in a linear form."""

from specctl.replay.cost.files import load_cost_model, save_cost_model
from specctl.replay.cost.model import CostModel, Steps, TableCost
from specctl.replay.cost.rates import EngineCost, LinearCost

__all__ = [
    "CostModel",
    "EngineCost",
    "LinearCost",
    "Steps",
    "TableCost",
    "load_cost_model",
    "save_cost_model",
]
