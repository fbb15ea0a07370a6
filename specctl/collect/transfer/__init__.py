"""How what a device computed reaches the host without anyone waiting for the device.

    decoding stream   round ── mark ── round ── mark ── ...        nobody waits here
                                └─► side stream   statistics ─ pack ─ copy ─ event
                                                                      │        │
    background thread                              a buffer of the pool ◄──────┘ read, given back

`lanes.py` holds all that differs between devices. On a CPU the same code runs, with plain memory
and events that are ready at once.
"""

from specctl.collect.transfer.lanes import Event, Lane, lane_for
from specctl.collect.transfer.shipping import Landed, Shipping

__all__ = ["Event", "Landed", "Lane", "Shipping", "lane_for"]
