"""What is done to the rows at the end of a pass: decay and expiry, as the tables' lifetimes say.

``cluster.upkeep`` asks the servers, and its callers tell the engine here. If a job master dies in
between, the next one asks again: a slot decays once for each period, and expires by its policy. May
import ``job_engine``; does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable

from backstay.job_engine.standing import Basis, Standing
from backstay.job_engine.values import PassUpkeep

__all__ = ["PASS_ENDS_KEPT", "Upkeeps"]

# A job that goes back further decays under new periods.
PASS_ENDS_KEPT = 16


class Upkeeps:
    """The upkeep of one job's rows."""

    def __init__(self, basis: Basis, job: Standing) -> None:
        """Begin; nothing is due before ``keep_rows``."""
        self._basis = basis
        self._job = job
        self._unix_s: Callable[[], float] | None = None
        # Passes whose end was noted by this job master, since the job went back last.
        self._ended_here: set[int] = set()

    def keep_rows(self, unix_s: Callable[[], float]) -> None:
        """Have ``due`` tell what is to be done; rounds, checkpoints and the end wait for it.

        Args:
            unix_s: Unix time.
        """
        self._unix_s = unix_s
        self.note_pass_ends()

    @property
    def are_seen_to(self) -> bool:
        """Whether something is done to the rows at the end of each pass."""
        return self._unix_s is not None and self._basis.spec.lifetime.every == "pass"

    @property
    def due(self) -> PassUpkeep | None:
        """What is to be done to the rows, as the oldest pass whose end was not seen to asks for it.

        It is the same until it was noted, or until the job goes back. None: nothing.
        """
        job = self._job
        pass_number = job.figures["upkept_passes"] + 1
        if not self.are_seen_to or pass_number > job.schedule.passes_over:
            return None
        lifetime = self._basis.spec.lifetime
        began = job.state.pass_starts.get(str(pass_number - lifetime.unseen_passes + 1))
        return PassUpkeep(
            pass_number,
            job.state.starts,
            job.state.pass_ends[str(pass_number)],
            began if lifetime.unseen_passes else None,
            pass_number in self._ended_here,
        )

    def note_upkeep(self, done: PassUpkeep, *, expired: int, changed: bool) -> None:
        """Take note that the end of a pass was seen to; nothing, if the job went back meanwhile.

        Args:
            done: What ``due`` was.
            expired: Rows that went.
            changed: Whether rows went or shows and clicks were decayed.
        """
        if done != self.due:
            return
        job = self._job
        job.figures["upkept_passes"] = done.pass_number
        job.figures["upkeeps"] += changed
        job.figures["rows_expired"] += expired
        job.note_trouble("lifetime", "")
        job.stage()
        self._basis.notify()

    def pass_is_over(self) -> None:
        """Take note that a training pass has ended."""
        if not self.are_seen_to:
            self._job.figures["upkept_passes"] = self._job.schedule.passes_over
        self.note_pass_ends()

    def went_back(self) -> None:
        """Take note that the job went back to a checkpoint."""
        self._ended_here.clear()
        self.note_pass_ends()

    def note_pass_ends(self) -> None:
        """Take note of the time of each end of a pass that ``due`` will ask about.

        One that was noted before the job went back stays: slots that have its decay skip it.
        """
        if not self.are_seen_to or self._unix_s is None:
            return
        job = self._job
        ends = dict(job.state.pass_ends)
        for number in range(job.figures["upkept_passes"] + 1, job.schedule.passes_over + 1):
            if str(number) in ends:
                continue
            # What was noted of later passes is below the time of this one.
            ends = {name: end for name, end in ends.items() if int(name) < number}
            before = max([self._basis.identity.created_ms, *ends.values()])
            ends[str(number)] = max(int(self._unix_s() * 1000), before + 1)
            self._ended_here.add(number)
        if ends != job.state.pass_ends:
            newest = sorted(ends, key=int)[-PASS_ENDS_KEPT:]
            job.change(pass_ends={name: ends[name] for name in newest})
            job.stage()

    def pass_starts(self, begun: int) -> dict[str, int]:
        """Return when the newest passes began, with one that begins now."""
        kept = self._basis.spec.lifetime.unseen_passes
        if self._unix_s is None or not kept:
            return {}
        starts = {**self._job.state.pass_starts, str(begun): int(self._unix_s())}
        return {name: at for name, at in starts.items() if begun - kept < int(name) <= begun}
