"""Worker Pods, whatever comes in whatever order: none is made twice, and in the end all is right.

The API is a stand-in that keeps Pods. What it tells arrives late, answers get lost, watches break,
and launchers are replaced.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backstay.job_engine.launch import ExitReason
from backstay.kubernetes.names import WORKER_ID
from backstay.kubernetes.pod_memory import MoreMemory, memory_limit, with_memory
from backstay.kubernetes.refusals import FORBIDDEN_MAX_S
from backstay.kubernetes.worker_pods import (
    CALLS_AT_ONCE,
    FAILED_KEPT,
    RETRY,
    Forbidden,
    PodPlan,
    WorkerPods,
)
from tests.examples import examples
from tests.unit.kubernetes.kubernetes_pods import (
    deleted,
    disrupted,
    on_silent_node,
    pending,
    running,
    terminated,
)

MIB = 1024 * 1024
MORE = MoreMemory(2.0, 1024 * MIB)
AWAY = "dial tcp 10.0.0.1:443: connect: connection refused"
Pod = dict[str, Any]


class WorkerPodsMachine(RuleBasedStateMachine):
    """A job master that wants workers, its launcher, and an API."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.next_id = 0
        self.wanted: list[str] = []
        # Ids whose ends the job master knows.
        self.ended: set[str] = set()
        # What the API has, and what it has not told yet: whether a Pod is gone, and the Pod.
        self.found: dict[str, Pod] = {}
        self.untold: deque[tuple[bool, Pod]] = deque()
        self.made: set[str] = set()
        # What a list has found that is not answered yet.
        self.listing: list[Pod] | None = None
        self.refuses = ""
        self.begin_anew()

    # The job master.

    @rule(count=st.integers(0, 6))
    def want(self, count: int) -> None:
        """The job master wants so many workers."""
        self.wanted = self.wanted[:count]
        while len(self.wanted) < count:
            self.wanted.append(f"w-{self.next_id}")
            self.next_id += 1
        self.pods.wish(self.wanted, self.now_s)

    @rule()
    def exchange(self) -> None:
        """The job master takes exits in, replaces these workers and repeats its wish."""
        exits = self.pods.report().exits
        ends = {one.worker_id for one in exits}
        assert len(ends) == len(exits)
        there = {one["metadata"]["labels"][WORKER_ID] for one in self.found.values()}
        # Here a Pod that is told to end is gone at once.
        assert not there & {one.worker_id for one in exits if one.reason is ExitReason.NODE_LOST}
        assert not ends & set(self.pods.report().running)
        self.ended |= ends
        count = len(self.wanted)
        self.wanted = [one for one in self.wanted if one not in ends]
        self.pods.acknowledge(sorted(ends))
        self.want(count)

    @rule()
    def begin_anew(self) -> None:
        """Another job master begins, with a launcher that knows nothing."""
        self.pods = WorkerPods("", MORE)
        self.relist()
        self.list_answers()

    # The launcher.

    @rule(lost=st.booleans())
    def act(self, lost: bool) -> None:
        """The launcher makes the calls that are due; the answer of the last one may be lost."""
        plan = self.pods.plan(self.now_s)
        assert len(plan.create) + len(plan.delete) <= CALLS_AT_ONCE
        for worker_id, name in plan.delete:
            self._delete(worker_id, name)
        for number, (worker_id, _) in enumerate(plan.create):
            assert worker_id in self.wanted
            if self.refuses:
                self._refuse()
                return
            self._create(worker_id, plan, lost=lost and number == len(plan.create) - 1)

    @rule()
    def relist(self) -> None:
        """A watch has broken: what it had not told is in the list."""
        self.pods.list_begins()
        self.untold.clear()
        self.listing = list(self.found.values())

    @rule()
    def list_answers(self) -> None:
        """The list is there, and the watch goes on from it."""
        if self.listing is not None:
            self.pods.listed(self.listing, self.now_s)
            self.listing = None

    @rule()
    def hear(self) -> None:
        """The watch tells one change."""
        if self.untold and self.listing is None:
            is_gone, pod = self.untold.popleft()
            if is_gone:
                self.pods.deleted(pod)
            else:
                self.pods.changed(pod, self.now_s)

    # The cluster.

    @precondition(lambda self: self.found)
    @rule(
        data=st.data(),
        what=st.sampled_from(["run", "pull", "fail", "finish", "oom", "gone", "silent"]),
    )
    def happen(self, data: st.DataObject, what: str) -> None:
        """Something happens to a Pod that has not ended."""
        name = data.draw(st.sampled_from(sorted(self.found)))
        before = self.found[name]
        if before["status"]["phase"] in ("Succeeded", "Failed"):
            return
        worker_id = before["metadata"]["labels"][WORKER_ID]
        if what == "gone":
            del self.found[name]
            pod = deleted(disrupted(before, "PreemptionByScheduler"))
            self.untold += [(False, pod), (True, pod)]
            return
        states = {
            "run": running(worker_id),
            "pull": pending(worker_id, "ErrImagePull", AWAY),
            "fail": terminated(worker_id, 1, "Error"),
            "finish": terminated(worker_id, 0, "Completed"),
            "oom": terminated(worker_id, 137, "OOMKilled"),
            "silent": on_silent_node(before),
        }
        self._change({**before, "status": states[what]["status"]})

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 40.0, 130.0, 700.0]))
    def wait(self, seconds: float) -> None:
        """Time passes, in which the job master repeats its wish."""
        self.now_s += seconds
        self.pods.wish(self.wanted, self.now_s)

    @rule(what=st.sampled_from(["", "quota", "right"]))
    def refuse(self, what: str) -> None:
        """From now on the API refuses new Pods, or takes them again."""
        self.refuses = what

    # What holds all the time.

    @invariant()
    def nothing_is_waited_for_in_the_past(self) -> None:
        """A time to wait for is ahead, so the thread of the calls does not spin."""
        self.pods.plan(self.now_s)
        next_s = self.pods.next_change_s()
        assert next_s is None or next_s > self.now_s

    @invariant()
    def memory_is_within_its_limit(self) -> None:
        """No Pod gets more than the job allows."""
        assert all(memory_limit(one) <= MORE.most for one in self.found.values())

    def teardown(self) -> None:
        """In a calm time all comes right: the wanted workers run, and no other Pod is left."""
        self.refuses = ""
        self.list_answers()
        for _ in range(40 + 4 * len(self.untold)):
            self.wait(RETRY.longest_s)
            while self.untold:
                self.hear()
            self.exchange()
            self.act(lost=False)
            for name, pod in list(self.found.items()):
                if pod["status"]["phase"] == "Pending" or on_silent_node(running("w"))["status"][
                    "conditions"
                ] == pod["status"].get("conditions"):
                    worker_id = pod["metadata"]["labels"][WORKER_ID]
                    self.found[name] = {**pod, "status": running(worker_id)["status"]}
                    self.untold.append((False, self.found[name]))
        assert sorted(self.pods.report().running) == sorted(self.wanted)
        left = {one["metadata"]["labels"][WORKER_ID] for one in self.found.values()}
        assert set(self.wanted) <= left
        assert len(left - set(self.wanted)) <= FAILED_KEPT
        assert self.pods.plan(self.now_s) == PodPlan(memory=self.pods.plan(self.now_s).memory)
        assert self.pods.trouble(self.now_s) == ""

    def _create(self, worker_id: str, plan: PodPlan, *, lost: bool) -> None:
        pod = pending(worker_id)
        pod["spec"]["containers"][0]["resources"] = {"limits": {"memory": "256Mi"}}
        pod = with_memory(pod, plan.memory)
        name = pod["metadata"]["name"]
        if name in self.found:
            # 409: an earlier call had made it.
            self.pods.created(worker_id, None, self.now_s)
            return
        # A Pod that was lost with its launcher may be made again; one whose end is known may not.
        assert worker_id not in self.ended
        self.made.add(worker_id)
        self.found[name] = pod
        self.untold.append((False, pod))
        if lost:
            self.pods.call_failed("Kubernetes does not answer", self.now_s)
        else:
            self.pods.created(worker_id, pod, self.now_s)

    def _delete(self, worker_id: str, name: str) -> None:
        pod = self.found.pop(name, None)
        if pod is not None:
            self.untold += [(False, deleted(pod)), (True, deleted(pod))]
        self.pods.told_to_end(worker_id)

    def _refuse(self) -> None:
        if self.refuses == "quota":
            self.pods.call_failed("exceeded quota", self.now_s)
        else:
            self.pods.forbidden(Forbidden.MAKE, "cannot create pods", self.now_s)

    def _change(self, pod: Pod) -> None:
        self.found[pod["metadata"]["name"]] = pod
        self.untold.append((False, pod))


TestWorkerPods = WorkerPodsMachine.TestCase
TestWorkerPods.settings = settings(max_examples=examples(60), stateful_step_count=40)
assert FORBIDDEN_MAX_S < 700.0
