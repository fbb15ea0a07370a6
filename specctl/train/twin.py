"""The twin of a scorer, held against the rule on nodes that the fit never saw."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from specctl.artifacts.onnx_twin import twin_log_odds
from specctl.policy.scorers import Scorer
from specctl.policy.scoring import build_log_odds
from specctl.train.publish import refuse_other_decisions

TOLERANCE = 1e-5
"""Of log-odds, absolute and relative: two orders of adding up float32 numbers differ by less,
another leaf or another weight by more."""


def check_scorer_twin(scorer: Scorer, features: NDArray[np.float32], model: bytes) -> None:
    """Raises `ArtifactError` (E_TWIN) where the twin says otherwise than the rule.

    Args:
        features: `[n, F]` float32, held-out nodes. model: the twin's bytes.
    """
    wanted = build_log_odds(scorer)(torch.from_numpy(features)).numpy()
    found = twin_log_odds(model, features)
    refuse_other_decisions(~np.isclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE), features)
