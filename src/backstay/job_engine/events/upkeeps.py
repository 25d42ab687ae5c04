"""What is done to the rows at the end of a pass: decay and expiry, as the tables' lifetimes say.

``cluster.upkeep`` asks the servers, and its callers tell the engine here. If a job master dies in
between, the next one asks again: a slot decays once for each period, and expires by its policy. May
import ``job_engine``; does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable

from backstay.job_engine.core import JobCore
from backstay.job_engine.values import PassUpkeep

__all__ = ["UpkeepEvents"]


class UpkeepEvents(JobCore):
    """The events of the upkeep of rows."""

    def keep_rows(self, unix_s: Callable[[], float]) -> None:
        """Have ``upkeep_due`` tell what is to be done; rounds, checkpoints and the end wait for it.

        Args:
            unix_s: Unix time.
        """
        self.unix_s = unix_s
        self.note_pass_ends()

    def note_upkeep(self, done: PassUpkeep, *, expired: int, changed: bool) -> None:
        """Take note that the end of a pass was seen to; nothing, if the job went back meanwhile.

        Args:
            done: What ``upkeep_due`` was.
            expired: Rows that went.
            changed: Whether rows went or shows and clicks were decayed.
        """
        if done != self.upkeep_due:
            return
        self.figures["upkept_passes"] = done.pass_number
        self.figures["upkeeps"] += changed
        self.figures["rows_expired"] += expired
        self.note_trouble("lifetime", "")
        self.stage_state()
        self.notify()
