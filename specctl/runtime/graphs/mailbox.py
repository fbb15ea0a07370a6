"""The planned way from the device to the host: one small copy beside the work that goes on."""

from __future__ import annotations

import torch
from torch import Tensor

from specctl.runtime.graphs.capture import GraphCounters


class Mailbox:
    """Copies one small tensor to pinned memory on a stream of its own.

    Args:
        like: what will be posted, for its shape and dtype.
        counters: `planned_waits` counts the readings.
    """

    def __init__(self, like: Tensor, counters: GraphCounters) -> None:
        self.counters, self._on_cuda = counters, like.is_cuda
        self._host = torch.empty(like.shape, dtype=like.dtype, pin_memory=self._on_cuda)
        if self._on_cuda:
            self._stream, self._ready = torch.cuda.Stream(like.device), torch.cuda.Event()

    def post(self, values: Tensor) -> None:
        """Sends the values as the work launched so far leaves them; later work is not waited for.

        They must not be written again before `read`.
        """
        if not self._on_cuda:
            self._host.copy_(values)
            return
        self._stream.wait_stream(torch.cuda.current_stream(values.device))
        with torch.cuda.stream(self._stream):
            self._host.copy_(values, non_blocking=True)
            self._ready.record(self._stream)

    def read(self) -> Tensor:
        """Waits for the last post; its values on the host, overwritten by the next."""
        if self._on_cuda:
            self._ready.synchronize()
        self.counters.planned_waits += 1
        return self._host
