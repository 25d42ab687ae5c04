"""Waiting, with a limit, for what a test can only look at: a file, a process, an answer.

What can wake the test is waited for by its own event or condition, not here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["LIMIT_S", "wait_until"]

# Of no effect on a test that passes: it ends one that would wait for ever.
LIMIT_S = 120.0
PAUSE_S = 0.01

T = TypeVar("T")


def wait_until(
    look: Callable[[], T | None],
    what: str | Callable[[], object] = "",
    *,
    limit_s: float = LIMIT_S,
    pause_s: float = PAUSE_S,
) -> T:
    """Look until what is found is true, and return it.

    Args:
        look: Finds out how it is now.
        what: What is waited for, or what tells why it has not come; the failure names it.
        limit_s: How long to look. The test fails after that.
        pause_s: How long to pause between two looks.
    """
    deadline_s = time.monotonic() + limit_s
    while not (found := look()):
        if time.monotonic() >= deadline_s:
            missing = what() if callable(what) else what or "what this test waits for"
            raise AssertionError(f"not true within {limit_s:g} s: {missing}")
        time.sleep(pause_s)
    return found
