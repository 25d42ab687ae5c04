"""Where a worker's tasks come from: asked of the master, the next one while this one is trained.

May import the link, the pace and the feeds. A task's records are read from the moment it is held.
Decides nothing about a task.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

from backstay.errors import BackstayError
from backstay.trainer.worker.held_work import HeldWork
from backstay.trainer.worker.master_link import Ended, MasterLink, Task, Wait
from backstay.trainer.worker.pace import Pace
from backstay.trainer.worker.task_feed import Fed, TaskFeeds

__all__ = ["Answer", "TaskSource"]

# A task itself is one that another worker leads.
Answer: TypeAlias = HeldWork | Task | Ended | Wait


class TaskSource:
    """Asks for tasks, at most one ahead; used by one thread.

    Args:
        link: Joined.
        feeds: Makes the batches of a task.
        pace: Of the job's mode.
        told: Makes a call until it is answered.
    """

    def __init__(
        self,
        link: MasterLink,
        feeds: TaskFeeds,
        pace: Pace,
        told: Callable[[Callable[[], Task | Wait | Ended]], Task | Wait | Ended],
    ) -> None:
        self._link = link
        self._feeds = feeds
        self._pace = pace
        self._told = told
        self._thread = ThreadPoolExecutor(1, "backstay-ask")
        self._asked: Future[Answer] | None = None

    def next(self, rows: tuple[int, int]) -> Answer:
        """Return what was asked for ahead, or ask now.

        Args:
            rows: Those of the connection; see ``Engine``.
        """
        asked, self._asked = self._asked, None
        # An answer "wait" that was asked for during the last task is old news.
        if asked is not None and not isinstance(answer := asked.result(), Wait):
            return answer
        return self._ask(rows)

    def ask_ahead(self, rows: tuple[int, int]) -> None:
        """Have the next task asked for, where the mode allows it and it was not yet."""
        if self._pace.overlaps_tasks and self._asked is None:
            self._asked = self._thread.submit(self._ask, rows)

    def first_ready(self) -> Fed | None:
        """Return the first batch of the training task that was asked for ahead, if it is ready."""
        asked = self._asked
        if asked is None or not asked.done() or asked.exception() is not None:
            return None
        work = asked.result()
        if not isinstance(work, HeldWork) or work.task.kind != "training" or work.feed is None:
            return None
        return work.feed.first_ready()

    def shutdown(self) -> HeldWork | None:
        """End the thread; return the task that was asked for ahead, for the caller to give back."""
        asked, self._asked = self._asked, None
        self._thread.shutdown()
        if asked is not None:
            with contextlib.suppress(BackstayError):
                answer = asked.result()
                if isinstance(answer, HeldWork):
                    return answer
        return None

    def _ask(self, rows: tuple[int, int]) -> Answer:
        answer = self._told(lambda: self._link.get_task(rows))
        if not isinstance(answer, Task) or answer.leader:
            return answer
        work = HeldWork(answer, self._pace.batches_per_push, rows)
        self._link.hold(answer, work)
        if answer.kind != "train_end":
            work.feed = self._feeds.of(answer)
        return work
