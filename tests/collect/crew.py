"""Workers that publish each prompt at once, so that whoever is killed has finished some."""

from __future__ import annotations

import functools
from typing import Any

from specctl.collect import live, ray_workers
from specctl.collect.dense import collection


class EagerWorker(ray_workers.Worker):
    """See the module."""

    def open(self, *given: Any) -> tuple[str, int]:
        collection.FLUSH_S = 0.0
        live.RecorderConfig = functools.partial(live.RecorderConfig, flush_s=0.0)  # type: ignore[misc,assignment]
        return super().open(*given)
