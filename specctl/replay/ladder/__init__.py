"""The ladder: every policy between plain decoding and the best that is possible, on one log."""

from specctl.replay.config import LadderConfig
from specctl.replay.ladder.build import build_ladder
from specctl.replay.ladder.tally import LoadClock

__all__ = ["LadderConfig", "LoadClock", "build_ladder"]
