"""A call under way.

Imports only the errors. The work goes on in the native client's threads, also when no
call waits here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from backstay.errors import BackstayError

T = TypeVar("T")


class Pending(Generic[T]):
    """The result of an asynchronous call, to be waited for with :meth:`result`.

    It behaves like a read-only ``concurrent.futures.Future``: ``result`` may be called any
    number of times, from any thread, and gives the same answer each time.
    """

    def __init__(self, is_done: Callable[[], bool], finish: Callable[[], T]) -> None:
        self._is_done = is_done
        self._finish = finish
        self._lock = threading.Lock()
        self._finished = False
        self._value: T | None = None
        self._error: BackstayError | None = None

    def done(self) -> bool:
        """Return whether :meth:`result` would answer without waiting for the network."""
        return self._finished or self._is_done()

    def result(self) -> T:
        """Wait for the call, at most until the client's deadline, and return what it returned.

        Raises:
            BackstayError: The call failed; see the method that began it.
        """
        with self._lock:
            if not self._finished:
                try:
                    self._value = self._finish()
                except BackstayError as error:
                    self._error = error
                self._finished = True
        if self._error is not None:
            raise self._error
        return cast(T, self._value)
