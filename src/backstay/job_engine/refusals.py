"""The log of refusals: every answer that says no to a worker, once, with its reason.

A worker that repeats its call is not logged again. When a round or a job ends, ten thousand workers
may be refused at once, so each level has a limit of lines in a minute. Imports ``backstay.errors``;
does no I/O.
"""

from __future__ import annotations

import logging
from collections import Counter

from backstay.errors import BackstayError, JobRefused

__all__ = ["LINES_PER_MINUTE_MAX", "REMEMBERED_MAX", "Refusals"]

# Of each level.
LINES_PER_MINUTE_MAX = 100
# The newest refusals, which are not logged again.
REMEMBERED_MAX = 4096
# Of what a worker may have sent.
WORKER_CHARACTERS_MAX = 128
REASON_CHARACTERS_MAX = 1000

log = logging.getLogger(__name__)


class Refusals:
    """Logs the refusals of one job."""

    def __init__(self) -> None:
        """Begin with none."""
        # In the order in which they were logged first.
        self._remembered: dict[tuple[str, str], None] = {}
        self._minute_s = float("-inf")
        self._lines: Counter[int] = Counter()
        self._left_out = 0

    def log(self, worker: str, reason: str, now_s: float, level: int = logging.INFO) -> None:
        """Log a refusal, unless it was logged before or the minute has enough of them.

        Args:
            worker: Who is refused.
            reason: Why.
            now_s: Monotonic seconds.
            level: INFO for what happens in a job that goes well, such as a lease that has expired;
                WARNING for what a user should look at.
        """
        refusal = worker[:WORKER_CHARACTERS_MAX], reason[:REASON_CHARACTERS_MAX]
        if refusal in self._remembered:
            return
        self._remembered[refusal] = None
        if len(self._remembered) > REMEMBERED_MAX:
            del self._remembered[next(iter(self._remembered))]
        if now_s - self._minute_s >= 60.0:
            self._begin_minute(now_s)
        self._lines[level] += 1
        if self._lines[level] <= LINES_PER_MINUTE_MAX:
            log.log(level, "worker %s is refused: %s", *refusal)
            return
        if not self._left_out:
            log.log(level, "more refusals of workers are not logged in this minute")
        self._left_out += 1

    def _begin_minute(self, now_s: float) -> None:
        if self._left_out:
            log.info("%d refusals of workers were not logged", self._left_out)
        self._minute_s, self._left_out = now_s, 0
        self._lines.clear()

    def log_error(self, worker: str, error: BackstayError, now_s: float) -> None:
        """Log an error that is the answer to a worker."""
        # Workers that come when the job is over are usual.
        level = logging.INFO if isinstance(error, JobRefused) else logging.WARNING
        self.log(worker, str(error), now_s, level)
