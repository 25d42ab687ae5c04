"""Waits with a limit, and what an experiment says that cannot be measured."""

from __future__ import annotations

import time
from collections.abc import Callable

from kubernetes.client import ApiException
from urllib3.exceptions import HTTPError

__all__ = ["LOOK_PAUSE_S", "Failed", "wait_until"]

LOOK_PAUSE_S = 0.25


class Failed(Exception):
    """An experiment cannot be measured; the message says why."""


def wait_until(what: str, holds: Callable[[], bool], limit_s: float) -> None:
    """Wait until something holds; the API may be away meanwhile.

    Raises:
        Failed: It did not hold in time.
    """
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            if holds():
                return
        except (ApiException, HTTPError, OSError):
            pass
        if time.monotonic() > deadline_s:
            raise Failed(f"{what}: not within {limit_s:.0f} s")
        time.sleep(LOOK_PAUSE_S)
