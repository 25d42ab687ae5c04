"""Calls that are repeated until a process answers.

Imports ``backstay.errors``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from backstay.errors import NotMaster, Stopping, TransportError

__all__ = ["PASSING", "until_answered"]

# Neither the task nor the user's code is at fault: another attempt will do.
PASSING = (TransportError, Stopping, NotMaster)
# A master may be moved to another machine meanwhile.
PATIENCE_S = 600.0

T = TypeVar("T")

_LOG = logging.getLogger(__name__)


def until_answered(call: Callable[[], T], stop: threading.Event, pause_s: float) -> T:
    """Make a call to the master or the servers, again and again while there is none.

    Args:
        call: May be repeated.
        stop: Set: the next failure is the last.
        pause_s: Between two tries.

    Raises:
        ServerUnavailable: There was none for ten minutes, or ``stop`` was set.
    """
    until_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except PASSING as error:
            if time.monotonic() > until_s or stop.is_set():
                raise
            _LOG.warning("no answer: %s", error)
            stop.wait(pause_s)
