"""The ladder: every policy between plain decoding and what is possible, on one log."""

from specctl.replay.ladder.build import Ladder, build_ladder
from specctl.replay.ladder.clock import LoadClock
from specctl.replay.ladder.config import LadderConfig
from specctl.replay.ladder.rungs import Rung, Split

__all__ = ["Ladder", "LadderConfig", "LoadClock", "Rung", "Split", "build_ladder"]
