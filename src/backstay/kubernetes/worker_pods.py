"""Which worker Pods to make and to delete, and which exits to report.

Level-triggered: the wish and the Pods that a list or a watch has shown go in, calls come out
(``plan``). A worker's Pod has a name that follows from its id, so to make it again is refused.
Time is an argument: when something began is when this process saw it, because the clock of the API
may be another. Imports ``job_engine.launch``, ``backstay.exits``, ``backstay.kubernetes.spec`` and
the modules beside it; does no I/O.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from backstay.backoff import Backoff
from backstay.exit_codes import ExitCode
from backstay.job_engine.launch import ExitReason, LauncherReport, WorkerExit
from backstay.kubernetes.pod_exit import PodSeen, Pull, end_of_deleted, seen
from backstay.kubernetes.pod_memory import MoreMemory, memory_quantity
from backstay.kubernetes.refusals import FORBIDDEN_MAX_S
from backstay.kubernetes.spec import high_share

__all__ = ["LAST_WORDS_MAX", "Forbidden", "PodPlan", "WorkerPods"]

# Calls of one plan; then what was seen meanwhile counts.
CALLS_AT_ONCE = 20
# After a call that failed; doubled each time, up to the last.
RETRY = Backoff(first_s=0.5, longest_s=30.0)
# Pods of workers that failed are kept for `kubectl logs`; older ones are deleted.
FAILED_KEPT = 5
# A Pod that was told to end so long ago is on a node that is lost: twice its grace.
TERMINATING_MAX_S = 60.0
# A node that prepares a container for so long may lack something; only its events say what.
STARTING_MAX_S = 20.0
# A node that did not get the image so far gets no more time. The next Pod begins anew.
PULLING_MAX_S = 120.0
# What held workers up is no news any more when none has been missing for so long: longer than the
# job master waits before it wants another one in the place of one that ended.
SETTLED_S = 60.0
# The job master repeats its wish several times a second. After a pause another process may be the
# job master, with other wishes.
WISH_VALID_S = 10.0
# As much as Kubernetes keeps.
LAST_WORDS_MAX = 4096
_KEPT_REASONS = (ExitReason.FAILED, ExitReason.OUT_OF_MEMORY)
_NEVER_STARTED = (ExitReason.CANNOT_START, ExitReason.NO_IMAGE, ExitReason.NOT_ALLOWED)


class Forbidden(enum.Enum):
    """What the API may forbid; without it no worker can be started."""

    SEE = "the Pods of this job cannot be seen"
    MAKE = "no Pod can be made"


class PodPlan(NamedTuple):
    """Calls to make now.

    Attributes:
        create: Worker id and PriorityClass of each Pod to make.
        delete: Worker id and name of each Pod to delete.
        memory: Bytes that the Pods to make may use; no more than the job says: as much as that.
    """

    create: tuple[tuple[str, str], ...] = ()
    delete: tuple[tuple[str, str], ...] = ()
    memory: int = 0


class _Worker:
    """What is known of one worker.

    Attributes:
        pod: Its Pod, as it was seen last; None: it was not seen yet, or it is gone.
        is_new: Its Pod was made since the last list began, which may not have it.
        is_deleting: Its Pod was told to end.
        terminating_since_s: Since when it was seen to be told to end, and has not ended.
        starting_since_s: Since when its node prepares its container.
        pulling_since_s: Since when its node tries in vain to get the image.
        pull: Why it does not get it, as it said last.
        end: How it ended, without the last words; None: it has not.
        exit: How it ended, until the job master knows it.
        failure: Its number among the failures whose Pods are there.
    """

    __slots__ = (
        "end",
        "exit",
        "failure",
        "is_deleting",
        "is_new",
        "pod",
        "pull",
        "pulling_since_s",
        "starting_since_s",
        "terminating_since_s",
    )

    def __init__(self) -> None:
        self.pod: PodSeen | None = None
        self.is_new = False
        self.is_deleting = False
        self.terminating_since_s: float | None = None
        self.starting_since_s: float | None = None
        self.pulling_since_s: float | None = None
        self.pull: Pull | None = None
        self.end: WorkerExit | None = None
        self.exit: WorkerExit | None = None
        self.failure: int | None = None

    @property
    def runs(self) -> bool:
        """Whether it has a Pod, seen or not, and has not ended."""
        return self.end is None


class WorkerPods:
    """The worker Pods of one job, as its launcher knows them."""

    def __init__(self, priority_class: str = "", more_memory: MoreMemory | None = None) -> None:
        """Know nothing yet: nothing is planned before the first list.

        Args:
            priority_class: Of the workers: a name, or the share that gets the class ``high``.
            more_memory: What workers get after one has run out of memory; None: as much as before.
        """
        self._priority_class = priority_class
        self._share = high_share(priority_class)
        self._more_memory = more_memory
        # The most that a Pod had, or is to have: not recorded, as the Pods themselves tell it.
        self._memory = 0
        # No more than this is asked for; None: nothing is known to be refused. And what is told.
        self._memory_allowed: int | None = None
        self._memory_trouble = ""
        self._wanted: dict[str, None] = {}
        # Before the first wish nothing tells which of the Pods that run are wanted.
        self._wished_s = float("-inf")
        # Each has a Pod, or had one.
        self._workers: dict[str, _Worker] = {}
        self._is_listed = False
        self._failures = 0
        self._retries = RETRY.begin()
        self._not_before_s = float("-inf")
        self._call_trouble = ""
        # What the API forbids: since when, and in which words.
        self._forbidden: dict[Forbidden, tuple[float, str]] = {}
        # Since when no worker is missing, and no Pod too many; None: one is, or nobody has looked.
        self._settled_since_s: float | None = None
        # Why the last one that could not be started could not; until one starts.
        self._start_trouble = ""

    # The wish, and the report.

    def wish(self, workers: Collection[str], now_s: float) -> None:
        """Want these workers, for ``WISH_VALID_S``.

        The exit of one that has ended is reported again.
        """
        self._wanted = dict.fromkeys(workers)
        self._wished_s = now_s
        for worker_id in workers:
            known = self._workers.get(worker_id)
            if known is not None and known.exit is None:
                known.exit = known.end
        self._forget_ended()

    def report(self) -> LauncherReport:
        """Return which workers have a Pod and have not ended, and the exits."""
        by_id = sorted(self._workers.items())
        running = [(worker_id, one) for worker_id, one in by_id if one.runs]
        return LauncherReport(
            tuple(worker_id for worker_id, _ in running),
            tuple(one.exit for _, one in by_id if one.exit is not None),
            tuple(one for one, each in running if each.pod is not None and each.pod.has_no_room),
        )

    def acknowledge(self, worker_ids: Collection[str]) -> None:
        """Forget these exits: the job master knows them."""
        for worker_id in worker_ids:
            if worker_id in self._workers:
                self._workers[worker_id].exit = None
        self._forget_ended()

    def trouble(self, now_s: float) -> str:
        """Return why not all workers run, for people; empty: nothing holds them up."""
        living = [one for one in self._workers.values() if one.pod is not None and one.runs]
        waits = Counter(one.pod.waits for one in living if one.pod is not None and one.pod.waits)
        texts = [
            f"{count} worker{'s wait' if count > 1 else ' waits'} for {text}"
            for text, count in sorted(waits.items())
        ]
        late = [
            one.pod.name
            for _, one in sorted(self._workers.items())
            if one.pod is not None
            and one.starting_since_s is not None
            and now_s >= one.starting_since_s + STARTING_MAX_S
        ]
        if late:
            texts.append(
                f"{len(late)} worker{'s wait' if len(late) > 1 else ' waits'} for volumes, network "
                f"or image: `kubectl describe pod {late[0]}` says for which"
            )
        limit = (
            f"if that lasts {FORBIDDEN_MAX_S / 60:.0f} minutes and no worker works, the job fails"
        )
        is_settled = self._is_settled(now_s)
        forbidden = [
            f"{what.value}: {why}; {limit}"
            for what, (_, why) in self._forbidden.items()
            if what is Forbidden.SEE or not is_settled
        ]
        troubles = [] if is_settled else [self._call_trouble, self._start_trouble]
        return "; ".join(filter(None, [*forbidden, *troubles, *texts, self._memory_trouble]))

    # What the API shows.

    def list_begins(self) -> None:
        """Note that a list was asked for: a Pod that is made from now on may not be in it."""
        for one in self._workers.values():
            one.is_new = False

    def listed(self, pods: Iterable[Mapping[str, Any]], now_s: float) -> None:
        """Take over the list of all worker Pods. A Pod that is missing was lost."""
        found = {one.worker_id: one for one in map(seen, pods) if one.worker_id}
        for worker_id, known in self._workers.items():
            has_pod = known.pod is not None or known.runs
            if has_pod and not known.is_new and worker_id not in found:
                self._gone(worker_id, WorkerExit(worker_id, ExitReason.NODE_LOST))
        for one in found.values():
            self._take(one, now_s)
        self._is_listed = True
        self._forbidden.pop(Forbidden.SEE, None)

    def changed(self, pod: Mapping[str, Any], now_s: float) -> None:
        """Take in a Pod that was made or has changed."""
        one = seen(pod)
        if one.worker_id:
            self._take(one, now_s)

    def deleted(self, pod: Mapping[str, Any]) -> None:
        """Take in that a Pod is gone, with its last status."""
        end = end_of_deleted(pod)
        if end.worker_id:
            self._gone(end.worker_id, self._learn_memory(seen(pod), end))

    # What to do, and what came of it.

    def plan(self, now_s: float) -> PodPlan:
        """Return the calls to make now."""
        self._look_whether_settled(now_s)
        self._expire(now_s)
        if now_s >= self._not_before_s:
            self._not_before_s = float("-inf")
        is_wished = now_s < self._wished_s + WISH_VALID_S
        if not (is_wished and self._is_listed) or now_s < self._not_before_s:
            return PodPlan()
        # Deletions make room for Pods that a quota holds back, so they come first.
        unneeded = self._unneeded()[:CALLS_AT_ONCE]
        missing = [one for one in self._wanted if one not in self._workers]
        create = []
        high = self._high_missing()
        for worker_id in missing[: max(1, CALLS_AT_ONCE - len(unneeded))]:
            create.append((worker_id, self._class_of_next(high)))
            high -= 1
        return PodPlan(tuple(create), tuple(unneeded), self._next_memory)

    def next_change_s(self) -> float | None:
        """Return when ``plan`` may say something else by itself; None: never."""
        times = [
            since_s + limit_s
            for one in self._workers.values()
            for since_s, limit_s in (
                (one.terminating_since_s, TERMINATING_MAX_S),
                (one.pulling_since_s, PULLING_MAX_S),
            )
            if since_s is not None
        ]
        times += [since_s + FORBIDDEN_MAX_S for since_s, _ in self._forbidden.values()]
        times.append(self._not_before_s)
        return min((one for one in times if one > float("-inf")), default=None)

    def is_deleting_all(self) -> bool:
        """Whether no worker is wanted any more, and Pods may be left that were not told to end."""
        if self._wanted or self._wished_s == float("-inf"):
            return False
        if not self._is_listed:
            return True
        return bool(self._unneeded())

    def created(self, worker_id: str, pod: Mapping[str, Any] | None, now_s: float) -> None:
        """Note that a worker's Pod is there.

        Args:
            worker_id: Of the worker.
            pod: As the API made it; None: an earlier call had made it.
            now_s: The time.
        """
        self._calls_succeed()
        self._forbidden.pop(Forbidden.MAKE, None)
        if worker_id in self._workers:
            # A watch was faster.
            return
        self._workers[worker_id] = _Worker()
        self._workers[worker_id].is_new = True
        if pod is not None:
            self._take(seen(pod), now_s)

    def refused(self, worker_id: str, why: str) -> None:
        """Note that the API takes no such Pod: to ask again would be in vain."""
        self._calls_succeed()
        self._forbidden.pop(Forbidden.MAKE, None)
        self._cannot_start(worker_id, ExitReason.CANNOT_START, why)

    def memory_refused(self, asked: int, given: int, allowed: int, why: str) -> None:
        """Note that the API refuses a Pod with more memory than the job file says.

        The next Pods get what it allows, or at last as much as the job file says.

        Args:
            asked: Bytes that the Pod would have been allowed to use.
            given: Bytes that the job file says.
            allowed: Bytes that the API would take; 0: it does not say.
            why: What it says.
        """
        self._memory_allowed = allowed if given < allowed < asked else 0
        self._memory_trouble = (
            f"workers get {memory_quantity(self._memory_allowed or given)} of memory where "
            f"kubernetes.more_memory gives {memory_quantity(self._memory)}: {why}"
        )

    def told_to_end(self, worker_id: str) -> None:
        """Note that the API has taken the deletion of a worker's Pod."""
        self._calls_succeed()
        known = self._workers.get(worker_id)
        if known is not None and known.pod is not None:
            known.is_deleting = True

    def call_failed(self, why: str, now_s: float) -> None:
        """Pause all calls, and say why: the API does not answer, or does not allow it now."""
        self._not_before_s = now_s + self._retries.next_s()
        self._call_trouble = why

    def forbidden(self, what: Forbidden, why: str, now_s: float) -> None:
        """Note that the API forbids something until somebody changes that.

        After ``FORBIDDEN_MAX_S`` workers without a Pod are not allowed to start.
        """
        since_s, _ = self._forbidden.get(what, (now_s, ""))
        self._forbidden[what] = (since_s, why)
        if what is Forbidden.MAKE:
            self.call_failed("", now_s)
        if since_s == float("-inf"):
            self._give_up_missing(why)

    def is_forbidden(self, what: Forbidden) -> bool:
        """Whether the API forbids something, as far as is known."""
        return what in self._forbidden

    def _give_up_missing(self, why: str) -> None:
        for worker_id in self._wanted.keys() - self._workers.keys():
            self._cannot_start(worker_id, ExitReason.NOT_ALLOWED, why)

    def _cannot_start(self, worker_id: str, reason: ExitReason, why: str) -> None:
        """Report a worker that has no Pod; another one would fare alike."""
        self._note(WorkerExit(worker_id, reason, ExitCode.WRONG_SETTING, why))

    def _calls_succeed(self) -> None:
        self._retries.reset()
        self._call_trouble = ""
        self._not_before_s = float("-inf")

    def _take(self, one: PodSeen, now_s: float) -> None:
        known = self._workers.setdefault(one.worker_id, _Worker())
        known.pod = one
        if self._more_memory is not None:
            # An earlier job master may have given it more.
            self._memory = max(self._memory, one.memory_limit)
        known.starting_since_s = _since(
            known.starting_since_s, now_s, holds=one.is_starting and known.runs
        )
        known.pulling_since_s = _since(
            known.pulling_since_s, now_s, holds=one.is_pulling and known.runs
        )
        known.pull = one.pull or (known.pull if one.is_pulling else None)
        if one.is_terminating:
            known.is_deleting = True
            if one.end is None and known.terminating_since_s is None:
                known.terminating_since_s = now_s
        if one.end is not None:
            self._note(self._learn_memory(one, one.end))
        elif one.has_begun:
            self._start_trouble = ""

    def _learn_memory(self, one: PodSeen, end: WorkerExit) -> WorkerExit:
        """Give the next workers more if this one had too little; return its end, with that told."""
        is_short = end.reason is ExitReason.OUT_OF_MEMORY and one.memory_limit > 0
        # The limit of an init container is another one.
        if self._more_memory is None or not (is_short and one.has_begun):
            return end
        after = self._more_memory.after(one.memory_limit)
        self._memory = max(self._memory, after)
        told = f"workers that begin from now on may use {memory_quantity(self._next_memory)}"
        if after <= one.memory_limit:
            told = "kubernetes.more_memory.max allows no more"
        elif self._next_memory <= one.memory_limit:
            told = "the cluster allows no more"
        return end._replace(last_words=f"{end.last_words}\n{told}".strip())

    @property
    def _next_memory(self) -> int:
        """What the next Pods may use; no more than the job says: as much as that."""
        if self._memory_allowed is None:
            return self._memory
        return min(self._memory, self._memory_allowed)

    def _gone(self, worker_id: str, end: WorkerExit) -> None:
        known = self._workers.setdefault(worker_id, _Worker())
        known.pod = known.failure = None
        known.is_deleting = False
        self._note(end)

    def _note(self, end: WorkerExit) -> None:
        """Report an exit, if it is the first of its worker."""
        known = self._workers.setdefault(end.worker_id, _Worker())
        known.terminating_since_s = known.starting_since_s = known.pulling_since_s = None
        if known.end is not None:
            return
        known.exit = end._replace(last_words=end.last_words[-LAST_WORDS_MAX:])
        known.end = end._replace(last_words="")
        if end.reason in _NEVER_STARTED:
            self._start_trouble = f"worker {end.worker_id} {end.how}: {known.exit.last_words}"
        if end.reason in _KEPT_REASONS and known.pod is not None:
            self._failures += 1
            known.failure = self._failures

    def _expire(self, now_s: float) -> None:
        """Give up Pods that do not end, or get no image, and workers that may have no Pod."""
        for worker_id, one in self._workers.items():
            if _is_over(one.terminating_since_s, TERMINATING_MAX_S, now_s):
                self._note(WorkerExit(worker_id, ExitReason.NODE_LOST))
            elif _is_over(one.pulling_since_s, PULLING_MAX_S, now_s):
                self._note(_end_without_image(worker_id, one))

        for what, (since_s, why) in self._forbidden.items():
            if since_s > float("-inf") and _is_over(since_s, FORBIDDEN_MAX_S, now_s):
                # From now on each further worker has one try.
                self._forbidden[what] = (float("-inf"), why)
                self._give_up_missing(why)

    def _forget_ended(self) -> None:
        """Forget workers that nothing asks for any more: no id is used again."""
        for worker_id, one in list(self._workers.items()):
            is_asked_for = worker_id in self._wanted or one.exit is not None
            if not (one.runs or is_asked_for or one.pod is not None):
                del self._workers[worker_id]

    def _is_settled(self, now_s: float) -> bool:
        """Whether no worker has been missing, and no Pod too many, for long."""
        return _is_over(self._settled_since_s, SETTLED_S, now_s)

    def _look_whether_settled(self, now_s: float) -> None:
        known = (self._workers.get(one) for one in self._wanted)
        begun = all(one is not None and one.pod is not None and one.pod.has_begun for one in known)
        was_settled = self._is_settled(now_s)
        self._settled_since_s = _since(
            self._settled_since_s, now_s, holds=begun and not self._unneeded()
        )
        if was_settled and self._settled_since_s is None:
            # What is forbidden now has all its time again.
            self._forbidden.pop(Forbidden.MAKE, None)
            self._call_trouble = self._start_trouble = ""

    def _unneeded(self) -> list[tuple[str, str]]:
        """Return worker id and name of each Pod that is to be deleted."""
        kept = self._kept_failures()
        return [
            (worker_id, one.pod.name)
            for worker_id, one in self._workers.items()
            if one.pod is not None
            and not one.is_deleting
            and self._is_unneeded(worker_id, one, kept)
        ]

    def _is_unneeded(self, worker_id: str, one: _Worker, kept: Collection[int]) -> bool:
        """Whether a Pod is to be deleted: its worker is not wanted, or the end of it is known."""
        if one.runs:
            return worker_id not in self._wanted
        if one.exit is not None and self._wanted:
            return False
        return one.failure not in kept

    def _kept_failures(self) -> list[int]:
        """Return the numbers of the failures whose Pods are kept: the newest."""
        numbers = (one.failure for one in self._workers.values() if one.failure is not None)
        return sorted(numbers)[-FAILED_KEPT:]

    def _high_missing(self) -> int:
        """Return how many workers must still get the class ``high``."""
        if self._share is None:
            return 0
        living = (self._workers[one].pod for one in self._wanted if one in self._workers)
        high = sum(one is not None and one.priority_class == "high" for one in living)
        return math.ceil(self._share * len(self._wanted)) - high

    def _class_of_next(self, high_missing: int) -> str:
        if self._share is None:
            return self._priority_class
        return "high" if high_missing > 0 else "low"


def _end_without_image(worker_id: str, one: _Worker) -> WorkerExit:
    """Return the end of a worker whose node got no image so far."""
    words = "" if one.pod is None else one.pod.waits
    if one.pull is Pull.AWAY:
        # The next Pod may be on a node that has the image, or reaches the registry.
        return WorkerExit(worker_id, ExitReason.NO_IMAGE, last_words=words)
    # Another Pod would not get it, either.
    code = ExitCode.WRONG_SETTING if one.pull is Pull.NOT_THERE else 0
    return WorkerExit(worker_id, ExitReason.CANNOT_START, code, words)


def _since(since_s: float | None, now_s: float, *, holds: bool) -> float | None:
    """Return since when something holds; None: it does not."""
    if not holds:
        return None
    return now_s if since_s is None else since_s


def _is_over(since_s: float | None, limit_s: float, now_s: float) -> bool:
    return since_s is not None and now_s >= since_s + limit_s
