"""Which workers should run, when they end, are killed, hang, and are scaled."""

import signal

import pytest

from backstay.errors import ConfigError, InvalidRequest
from backstay.job_engine.launch import ExitReason, WorkerExit
from backstay.job_engine.worker_set import WorkerPolicy, WorkerSet

POLICY = WorkerPolicy(initial=2, least=1, most=5, max_relaunches=2, backoff_s=1.0, steady_s=60.0)


def exited(workers: WorkerSet, worker: str, code: int, now_s: float) -> None:
    workers.exited(WorkerExit(worker, ExitReason.of_code(code), code), now_s)


def test_ids_are_given_once() -> None:
    workers = WorkerSet(POLICY)
    assert workers.wanted(0.0) == workers.wanted(0.0) == ("w-0", "w-1")
    exited(workers, "w-0", -signal.SIGKILL, 0.0)
    assert workers.wanted(0.0) == ("w-1", "w-2")
    exited(workers, "w-0", -signal.SIGKILL, 0.0)  # told again
    assert workers.wanted(0.0) == ("w-1", "w-2")


@pytest.mark.parametrize("code", [137, 143, -9, -15])
def test_a_worker_that_is_killed_is_always_replaced(code: int) -> None:
    workers = WorkerSet(POLICY)
    now_s = 0.0
    pauses = []
    for number in range(1, 30):
        workers.wanted(now_s)
        exited(workers, f"w-{number}", code, now_s)
        due_s = workers.next_change_s()
        assert due_s is not None
        pauses.append(due_s - now_s)
        now_s = due_s
    assert not workers.failed
    assert pauses[:4] == [0.0, 1.0, 2.0, 4.0]
    assert max(pauses) == POLICY.backoff_max_s


@pytest.mark.parametrize("code", [0, 1, -11, 134])
def test_a_worker_that_fails_is_replaced_so_many_times(code: int) -> None:
    workers = WorkerSet(WorkerPolicy(max_relaunches=2, backoff_s=1.0))
    now_s = 0.0
    for number, pause_s in enumerate((1.0, 2.0)):
        assert workers.wanted(now_s) == (f"w-{number}",)
        exited(workers, f"w-{number}", code, now_s)
        assert workers.wanted(now_s + 0.9 * pause_s) == ()
        assert not workers.failed
        now_s += pause_s
    workers.wanted(now_s)
    exited(workers, "w-2", code, now_s)
    assert workers.wanted(now_s + 1e6) == ()
    assert workers.next_change_s() is None
    assert "only 0 of at least 1 workers can be kept: w-2 ended with" in workers.failed
    workers.scale(1)
    assert workers.wanted(now_s) == ("w-3",)
    assert not workers.failed


def test_the_job_goes_on_while_enough_workers_can_be_kept() -> None:
    workers = WorkerSet(WorkerPolicy(initial=2, least=1, most=2, max_relaunches=0))
    workers.wanted(0.0)
    exited(workers, "w-1", 1, 0.0)
    assert not workers.failed
    exited(workers, "w-0", 1, 0.0)
    assert workers.failed


def test_with_no_least_number_the_last_worker_counts() -> None:
    workers = WorkerSet(WorkerPolicy(initial=1, least=0, most=2, max_relaunches=0))
    workers.wanted(0.0)
    exited(workers, "w-0", 1, 0.0)
    assert "at least 1" in workers.failed


def test_counts_begin_anew_after_a_steady_time() -> None:
    workers = WorkerSet(WorkerPolicy(max_relaunches=1, steady_s=60.0, backoff_s=1.0))
    now_s = 0.0
    for number in range(5):
        workers.wanted(now_s)
        workers.running([f"w-{number}"], now_s)
        exited(workers, f"w-{number}", 1, now_s + 61.0)
        now_s += 100.0
    assert not workers.failed
    workers.wanted(now_s)
    exited(workers, "w-5", 1, now_s)
    assert workers.failed


def test_who_is_missing_in_a_launchers_list_is_lost_once_it_was_there() -> None:
    workers = WorkerSet(POLICY)
    workers.wanted(0.0)
    assert workers.running([], 0.0) == []  # not started yet
    assert workers.running(["w-0", "w-1"], 1.0) == []
    lost = workers.running(["w-1"], 2.0)
    assert lost == [WorkerExit("w-0", ExitReason.NODE_LOST)]
    workers.exited(lost[0], 2.0)
    assert workers.running(["w-1"], 2.0) == []
    assert workers.wanted(2.0) == ("w-1", "w-2")


@pytest.mark.parametrize(
    ("reason", "is_a_failure"),
    [
        (ExitReason.FINISHED, True),
        (ExitReason.FAILED, True),
        (ExitReason.OUT_OF_MEMORY, True),
        (ExitReason.CANNOT_START, True),
        (ExitReason.PREEMPTED, False),
        (ExitReason.EVICTED, False),
        (ExitReason.NODE_LOST, False),
        (ExitReason.NO_IMAGE, False),
        (ExitReason.NOT_ALLOWED, False),
    ],
)
def test_the_reason_says_whether_an_end_counts(reason: ExitReason, is_a_failure: bool) -> None:
    workers = WorkerSet(WorkerPolicy(max_relaunches=0))
    workers.wanted(0.0)
    workers.exited(WorkerExit("w-0", reason), 0.0)
    assert workers.wanted(0.0) == (() if is_a_failure else ("w-1",))
    assert bool(workers.failed) == is_a_failure


def test_a_worker_that_hangs_is_replaced() -> None:
    workers = WorkerSet(POLICY)
    workers.wanted(0.0)
    assert workers.replace("w-0", 0.0)
    assert not workers.replace("w-0", 0.0)
    assert workers.wanted(1.0) == ("w-1", "w-2")


def test_the_newest_are_stopped_first() -> None:
    workers = WorkerSet(POLICY)
    workers.scale(4)
    assert workers.wanted(0.0) == ("w-0", "w-1", "w-2", "w-3")
    exited(workers, "w-1", 9, 0.0)
    workers.scale(3)
    assert workers.wanted(0.5) == ("w-0", "w-2", "w-3"), "a place that waits goes first"
    workers.scale(1)
    assert workers.wanted(10.0) == ("w-0",)
    exited(workers, "w-3", 0, 10.0)
    workers.scale(2)
    assert workers.wanted(10.0) == ("w-0", "w-4")
    assert workers.desired == 2


@pytest.mark.parametrize("count", [0, 6])
def test_scaling_has_bounds(count: int) -> None:
    workers = WorkerSet(POLICY)
    with pytest.raises(InvalidRequest, match=f"{count} workers: the job has 1 to 5"):
        workers.scale(count)
    assert workers.desired == 2


def test_nobody_is_wanted_at_the_end() -> None:
    workers = WorkerSet(POLICY)
    workers.wanted(0.0)
    exited(workers, "w-0", 1, 0.0)
    workers.finish()
    assert workers.wanted(100.0) == ()
    assert workers.next_change_s() is None
    assert workers.desired == 0


def test_a_new_master_knows_ids_places_and_counts() -> None:
    workers = WorkerSet(POLICY)
    workers.scale(3)
    workers.wanted(0.0)
    for number in (1, 3, 4):
        exited(workers, f"w-{number}", 1, 100.0 * number)
        workers.wanted(100.0 * number + 50)
    text = workers.to_json()
    again = WorkerSet.from_json(POLICY, text)
    assert again.to_json() == text
    assert again.wanted(0.0) == ("w-0", "w-2")
    again.scale(3)
    assert again.wanted(0.0) == ("w-0", "w-2", "w-5")
    fewer = WorkerSet.from_json(WorkerPolicy(initial=1, most=1), text)
    assert fewer.wanted(0.0) == ("w-0",)


def test_every_change_is_in_the_record() -> None:
    workers = WorkerSet(POLICY)
    texts = [workers.to_json()]
    for change in (
        lambda: workers.wanted(0.0),
        lambda: exited(workers, "w-0", 1, 0.0),
        lambda: workers.wanted(100.0),
        lambda: workers.exited(WorkerExit("w-1", ExitReason.NODE_LOST), 100.0),
        lambda: workers.scale(3),
        lambda: workers.wanted(100.0),
        lambda: workers.replace("w-2", 100.0),
        workers.finish,
    ):
        change()
        texts.append(workers.to_json())
    assert len(set(texts)) == len(texts)


def test_ten_thousand_workers_fit_into_a_record() -> None:
    workers = WorkerSet(WorkerPolicy(initial=10_000, most=10_000))
    assert len(workers.wanted(0.0)) == 10_000
    # The record is written anew with every few tasks that are done.
    assert len(workers.to_json()) < 100
    for number in range(0, 10_000, 100):
        exited(workers, f"w-{number}", -9, 0.0)
    workers.wanted(1.0)
    assert len(workers.to_json()) < 10_000
    assert WorkerSet.from_json(WorkerPolicy(most=10_000), workers.to_json()).wanted(
        1.0
    ) == workers.wanted(1.0)
    for number in range(10_000):
        exited(workers, f"w-{number}", 1, 0.0)
    assert (
        len(WorkerSet.from_json(WorkerPolicy(most=10_000), workers.to_json()).to_json()) < 1 << 20
    )


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"next_id":1,"desired":1,"finished":false,"untroubled":[[1,1]],"troubled":[]}',
        '{"next_id":3,"desired":1,"finished":false,"untroubled":[[1,1],[1,1]],"troubled":[]}',
        '{"next_id":3,"desired":1,"finished":false,"untroubled":[1,1],"troubled":[]}',
        '{"next_id":3,"desired":1,"finished":false,"untroubled":[[1]],"troubled":[]}',
        '{"next_id":3,"desired":1,"finished":false,"untroubled":[[-1,1000001]],"troubled":[]}',
        '{"next_id":3,"desired":1,"finished":false,"untroubled":[],"troubled":[[1,1,1,0]]}',
        '{"next_id":3,"desired":1,"finished":false,"untroubled":[[-2,1]],"troubled":[]}',
    ],
)
def test_a_damaged_record_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="worker set"):
        WorkerSet.from_json(POLICY, text)


def test_policies_are_checked() -> None:
    with pytest.raises(ConfigError, match="initial = 3 must be within 1 to 2"):
        WorkerPolicy(initial=3, most=2)
    with pytest.raises(ConfigError, match="max_relaunches"):
        WorkerPolicy(max_relaunches=-1)


@pytest.mark.parametrize(
    ("reason", "is_counted"),
    [(ExitReason.NODE_LOST, False), (ExitReason.PREEMPTED, True), (ExitReason.FAILED, True)],
)
def test_a_worker_that_hung_on_a_lost_node_has_not_failed(
    reason: ExitReason, is_counted: bool
) -> None:
    workers = WorkerSet(WorkerPolicy(max_relaunches=0))
    workers.wanted(0.0)
    assert workers.replace("w-0", 0.0)
    # Whether its node is lost is known only later; meanwhile nothing ends the job.
    assert not workers.failed
    assert workers.wanted(0.0) == ("w-1",)
    for _ in range(2):
        workers.exited(WorkerExit("w-0", reason), 20.0)
    assert bool(workers.failed) == is_counted
    # Its successor goes as well if no replacement was allowed.
    assert workers.wanted(100.0) == (() if is_counted else ("w-1",))
    assert workers.has_place("w-1") is not is_counted


def test_workers_that_hang_again_and_again_count_each_once() -> None:
    workers = WorkerSet(WorkerPolicy(max_relaunches=2))
    now_s = 0.0
    for number in range(3):
        assert not workers.failed
        now_s = next_wanted_s(workers, now_s)
        assert workers.wanted(now_s) == (f"w-{number}",)
        assert workers.replace(f"w-{number}", now_s)
        for _ in range(2):
            workers.exited(WorkerExit(f"w-{number}", ExitReason.PREEMPTED), now_s + 5.0)
        now_s += 5.0
    assert "w-2 hung, after 3 failures in a row" in workers.failed


def test_a_worker_that_hung_where_fewer_are_wanted_now_counts_for_no_other() -> None:
    workers = WorkerSet(WorkerPolicy(2, 1, 2, max_relaunches=0))
    workers.wanted(0.0)
    assert workers.replace("w-1", 0.0)
    assert workers.wanted(0.0) == ("w-0", "w-2")
    workers.scale(1)
    workers.exited(WorkerExit("w-1", ExitReason.PREEMPTED), 5.0)
    assert workers.wanted(5.0) == ("w-0",)
    assert not workers.failed


def next_wanted_s(workers: WorkerSet, now_s: float) -> float:
    """When the next worker may come."""
    change_s = workers.next_change_s()
    return now_s if change_s is None or change_s < now_s else change_s


def test_workers_that_lent_their_room_are_remembered_until_someone_says_a_number() -> None:
    workers = WorkerSet(POLICY)
    workers.scale(4)
    workers.scale(2, lent=2)
    assert (workers.desired, workers.lent) == (2, 2)
    next_master = WorkerSet.from_json(POLICY, workers.to_json())
    assert (next_master.desired, next_master.lent) == (2, 2)
    next_master.scale(3)
    assert (next_master.desired, next_master.lent) == (3, 0)
    with pytest.raises(InvalidRequest):
        workers.scale(0, lent=4)
    assert (workers.desired, workers.lent) == (2, 2)


def test_workers_that_wait_for_room_are_stopped_before_those_that_run() -> None:
    workers = WorkerSet(WorkerPolicy(initial=4, least=1, most=5))
    assert workers.wanted(0.0) == ("w-0", "w-1", "w-2", "w-3")
    workers.note_waiting(["w-0", "w-2"])
    workers.scale(2)
    assert workers.wanted(0.0) == ("w-1", "w-3")
    workers.scale(1)
    assert workers.wanted(0.0) == ("w-1",)
