"""Where a worker's tasks come from: the job master gives the next ones while this one is trained.

May import the link, the pace and the feeds. A task's records are read from the moment it is leased.
Decides nothing about a task.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

from backstay.job.messages import Ended, Task, Wait
from backstay.trainer.worker.leased_work import LeasedWork
from backstay.trainer.worker.master_link import MasterLink
from backstay.trainer.worker.pace import Pace
from backstay.trainer.worker.scoring import Scorer
from backstay.trainer.worker.task_feed import ReadyBatch, TaskFeeds

__all__ = ["Answer", "TaskSource"]

# Tasks that are asked for before their turn. With small ones a single one would not be read in
# time.
AHEAD_MAX = 2

# A task itself is one that another worker leads.
Answer: TypeAlias = LeasedWork | Task | Ended | Wait


class TaskSource:
    """Asks for tasks, a few of them ahead; used by one thread.

    Args:
        link: Joined.
        feeds: Makes the batches of a task.
        pace: Of the job's mode.
        told: Makes a call until it is answered.
        scorer: Of progressive metrics; None: the job has none.
    """

    def __init__(
        self,
        link: MasterLink,
        feeds: TaskFeeds,
        pace: Pace,
        told: Callable[[Callable[[], Task | Wait | Ended]], Task | Wait | Ended],
        scorer: Scorer | None = None,
    ) -> None:
        self._link = link
        self._feeds = feeds
        self._pace = pace
        self._told = told
        self._scorer = scorer
        self._thread = ThreadPoolExecutor(1, "backstay-ask")
        self._asked: deque[Future[Answer]] = deque()

    def next(self, incarnation: tuple[int, int]) -> Answer:
        """Return what was asked for ahead, or ask now.

        Args:
            incarnation: Those of the connection; see ``Connection``.
        """
        while self._asked:
            answer = self._asked.popleft().result()
            # An answer "wait" that was asked for during the last task is old news.
            if not isinstance(answer, Wait):
                return answer
        return self._ask(incarnation)

    def ask_ahead(self, incarnation: tuple[int, int]) -> None:
        """Have another task asked for, where the mode allows it.

        Only once all batches of the earlier ones are made: with large tasks one
        is enough.
        """
        if not self._pace.overlaps_tasks or len(self._asked) >= AHEAD_MAX:
            return
        if self._asked:
            last = _work_of(self._asked[-1])
            if last is None or last.feed is None or not last.feed.all_made:
                return
        self._asked.append(self._thread.submit(self._ask, incarnation))

    def first_ready(self) -> ReadyBatch | None:
        """Return the first batch of the training task that comes next, if it is ready."""
        work = _work_of(self._asked[0]) if self._asked else None
        if work is None or work.task.kind != "training" or work.feed is None:
            return None
        return work.feed.first_ready()

    def shutdown(self) -> list[LeasedWork]:
        """End the thread; return the tasks that were asked for ahead, to be given back."""
        self._thread.shutdown()
        works = [_work_of(asked) for asked in self._asked]
        self._asked.clear()
        return [work for work in works if work is not None]

    def _ask(self, incarnation: tuple[int, int]) -> Answer:
        answer = self._told(lambda: self._link.get_task(incarnation))
        if not isinstance(answer, Task) or answer.leader:
            return answer
        scores = None
        if self._scorer is not None and answer.kind == "training":
            scores = self._scorer.begin(answer.first_batch, answer.scored_values)
        work = LeasedWork(answer, self._pace.batches_per_push, incarnation, scores)
        self._link.lease(answer, work, work.told)
        if answer.kind != "train_end":
            work.feed = self._feeds.of(answer)
        return work


def _work_of(asked: Future[Answer]) -> LeasedWork | None:
    """Return the task of an answer that is there."""
    if not asked.done() or asked.exception() is not None:
        return None
    answer = asked.result()
    return answer if isinstance(answer, LeasedWork) else None
