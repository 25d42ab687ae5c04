"""The clock by which leases of nodes and of tasks are counted.

It goes on while the machine is suspended, where the system has such a clock (``CLOCK_BOOTTIME``
on Linux): what ran out meanwhile must be over when the machine resumes, for the rest of the
cluster has gone on. Elsewhere it is ``CLOCK_MONOTONIC``. The native module reads the same clock
(crates/backstay-net/src/clock.rs), so a moment of it means the same there.

Imports the standard library.
"""

from __future__ import annotations

import time

__all__ = ["clock_s"]

_ID = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def clock_s() -> float:
    """Return the seconds of this machine's clock now; only differences mean something."""
    return time.clock_gettime(_ID)
