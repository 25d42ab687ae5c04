"""How many workers and servers a job is to have: each rule by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstay.job_engine.scaling import (
    IN_VAIN_MS,
    Decision,
    ScalingNotes,
    ScalingPolicy,
    Seen,
    decide,
)
from backstay.job_spec import AutoscaleSpec, ServerCounts, WorkersSpec

FIXED = ScalingPolicy(workers_least=1, workers_most=8, servers_least=2, servers_most=6)
FILL = replace(FIXED, workers="fill")
THROUGHPUT = replace(FIXED, workers="throughput")
LOAD = replace(FIXED, servers="load")


class Look:
    """Looks at a job whose numbers follow what is decided."""

    def __init__(self, policy: ScalingPolicy, seen: Seen) -> None:
        self.policy, self.seen = policy, seen
        self.notes = ScalingNotes()

    def at(self, seconds: float, **changes: object) -> Decision | None:
        """Look at a time, after what is seen has changed."""
        self.seen = replace(self.seen, now_ms=round(seconds * 1000), **changes)  # type: ignore[arg-type]
        self.notes, decision = decide(self.policy, self.notes, self.seen)
        if decision is not None:
            self.seen = replace(self.seen, workers=decision.workers, lent=decision.lent)
        return decision


def numbers(decision: Decision | None) -> tuple[int, int, int] | None:
    return None if decision is None else decision[:3]


# Roles.


def test_a_worker_gives_its_room_to_a_server_and_comes_back() -> None:
    look = Look(FIXED, Seen(0, workers=4, placed=4, servers=3, serving=3))
    assert look.at(0) is None
    waits = {"servers_waiting": 1, "serving": 2}
    assert look.at(10, **waits) is None
    # Kubernetes gets time to place it.
    assert look.at(14) is None
    given = look.at(15)
    assert numbers(given) == (3, 1, 3)
    assert given is not None
    assert given.told(replace(look.seen, workers=4)) == (
        "3 workers wanted, 4 before: 1 server finds no room: a worker gives up its room"
    )
    # The worker still ends.
    assert look.at(30, ending=1, placed=3) is None
    assert look.at(31, ending=0, servers_waiting=0) is None
    back = look.at(36)
    assert numbers(back) == (4, 0, 3)
    assert back is not None
    assert back.reason == "all servers have room again: the worker comes back"
    assert look.at(1000, placed=4, serving=3) is None


def test_a_worker_that_waits_goes_before_it_takes_the_servers_room() -> None:
    seen = Seen(0, workers=6, placed=4, waiting=2, servers=3, servers_waiting=1)
    look = Look(FIXED, seen)
    look.at(0)
    assert numbers(look.at(5)) == (3, 3, 3)
    look.at(20, placed=3, waiting=0, servers_waiting=0)
    assert numbers(look.at(25)) == (6, 0, 3)


def test_workers_at_their_minimum_keep_their_room() -> None:
    policy = replace(FIXED, workers_least=3)
    look = Look(policy, Seen(0, workers=4, placed=4, servers=3, servers_waiting=1))
    look.at(0)
    assert numbers(look.at(5)) == (3, 1, 3)
    for second in range(6, 100, 2):
        assert look.at(second, placed=3) is None


def test_one_after_the_other_gives_its_room_and_in_vain_is_seen() -> None:
    look = Look(FIXED, Seen(0, workers=3, placed=3, servers=3, servers_waiting=1))
    look.at(0)
    assert numbers(look.at(5)) == (2, 1, 3)
    assert look.at(9, placed=2) is None
    assert numbers(look.at(10)) == (1, 2, 3)
    # The last one stays, or nobody would train.
    assert look.at(10 + (IN_VAIN_MS - 1) / 1000, placed=1) is None
    back = look.at(10 + IN_VAIN_MS / 1000)
    assert numbers(back) == (3, 0, 3)
    assert back is not None
    assert "1 server finds no room without these workers either" in back.reason
    assert look.at(10_000, placed=3) is None
    # It was placed; the next one that waits is another matter.
    look.at(10_010, servers_waiting=0)
    look.at(10_020, servers_waiting=1)
    assert numbers(look.at(10_030)) == (2, 1, 3)


def test_workers_of_which_nothing_is_known_yet_keep_their_room() -> None:
    # The job master began anew, and its launcher has not told which Pods there are.
    look = Look(FIXED, Seen(0, workers=6, servers=3, servers_waiting=1))
    for second in range(0, 20, 2):
        assert look.at(second) is None
    assert numbers(look.at(20, placed=6)) == (5, 1, 3)


def test_no_rule_adds_workers_while_a_server_finds_no_room() -> None:
    look = Look(FILL, Seen(0, workers=1, placed=1, servers=3, servers_waiting=1))
    for second in range(0, 100, 2):
        assert look.at(second) is None
    look.at(100, servers_waiting=0)
    assert look.seen.workers == 2


# fill.


def test_fill_grows_faster_and_faster_while_all_find_room() -> None:
    look = Look(replace(FILL, workers_most=20), Seen(0, workers=2, placed=2))
    grown = []
    for second in range(0, 40, 5):
        decision = look.at(second, placed=look.seen.workers)
        grown += [decision.workers] if decision is not None else []
    assert grown == [3, 5, 9, 17, 20]


def test_fill_keeps_one_worker_waiting_and_no_more() -> None:
    look = Look(FILL, Seen(0, workers=5, placed=2, waiting=3))
    assert look.at(0) is None
    assert look.at(59) is None
    assert numbers(look.at(60)) == (3, 0, 0)
    for second in range(70, 1000, 5):
        assert look.at(second, waiting=1) is None
    # A machine is free: it is placed at once, and more may have room.
    assert numbers(look.at(1001, placed=3, waiting=0)) == (4, 0, 0)


def test_workers_that_wait_for_a_moment_are_no_reason() -> None:
    look = Look(FILL, Seen(0, workers=8, placed=4, waiting=4))
    look.at(0)
    look.at(30, placed=8, waiting=0)
    look.at(50, placed=4, waiting=4)
    assert look.at(100) is None
    assert numbers(look.at(110)) == (5, 0, 0)


# throughput.


def rate(look: Look, second: float, examples_per_s: float) -> Decision | None:
    count = look.seen.workers
    return look.at(
        second, placed=count, working=count, examples_per_s=examples_per_s, is_training=True
    )


def test_throughput_grows_while_one_more_brings_enough() -> None:
    look = Look(THROUGHPUT, Seen(0, workers=2))
    assert rate(look, 0, 200.0) is None
    assert numbers(rate(look, 60, 200.0)) == (3, 0, 0)
    rate(look, 62, 290.0)
    # 90% of what one brought, then 10%.
    assert numbers(rate(look, 122, 290.0)) == (4, 0, 0)
    rate(look, 124, 300.0)
    back = rate(look, 184, 300.0)
    assert numbers(back) == (3, 0, 0)
    assert back is not None
    assert back.reason == (
        "the last worker brought 10% of what one brings on average, less than 50%"
    )
    for second in range(186, 3000, 2):
        assert rate(look, second, 290.0 + second % 7) is None
    # The servers are faster now: it is tried again.
    for second in range(3000, 3200, 2):
        if (again := rate(look, second, 450.0)) is not None:
            break
    assert numbers(again) == (4, 0, 0)


def test_throughput_takes_the_best_rate_and_looks_at_training_only() -> None:
    look = Look(THROUGHPUT, Seen(0, workers=2))
    rate(look, 0, 200.0)
    rate(look, 60, 200.0)
    rate(look, 62, 290.0)
    # A checkpoint at the end of the measurement.
    kept = rate(look, 122, 5.0)
    assert numbers(kept) == (4, 0, 0)
    for second in range(124, 1000, 2):
        assert look.at(second, is_training=False, placed=4, working=4, examples_per_s=0.0) is None


# Servers.


@pytest.mark.parametrize(
    ("servers", "memory", "cpu", "wanted"),
    [
        (3, 0.5, 0.5, None),
        (3, 0.81, None, 4),
        (3, None, 0.81, 4),
        (3, 0.1, 0.95, 4),
        # Both must be low.
        (3, 0.1, 0.5, None),
        # Two of them would use 41%.
        (3, 0.27, 0.2, None),
        (3, 0.26, 0.2, 2),
        (2, 0.01, 0.01, None),
        (6, 0.99, None, None),
        # CPU that nothing limits.
        (2, 0.1, 8.0, 4),
        (3, None, None, None),
    ],
)
def test_servers_follow_their_load(
    servers: int, memory: float | None, cpu: float | None, wanted: int | None
) -> None:
    look = Look(LOAD, Seen(0, workers=1, servers=servers, serving=servers))
    look.at(0, memory_share=memory, cpu_share=cpu)
    assert look.at(59) is None
    decision = look.at(60)
    assert (None if decision is None else decision.servers) == wanted


def test_a_load_that_comes_and_goes_changes_nothing() -> None:
    look = Look(LOAD, Seen(0, workers=1, servers=3, serving=3))
    for second in range(0, 2000, 30):
        assert look.at(second, memory_share=0.9 if second % 60 else 0.5) is None


@pytest.mark.parametrize(
    "busy", [{"is_planning": True}, {"serving": 2}, {"servers_waiting": 1, "serving": 2}]
)
def test_servers_that_change_already_are_left_alone(busy: dict[str, int]) -> None:
    look = Look(LOAD, Seen(0, workers=1, placed=1, servers=3, serving=3, memory_share=0.9))
    for second in range(0, 1000, 10):
        assert look.at(second, **busy) is None


def test_the_reason_says_what_is_used_and_the_bound() -> None:
    look = Look(LOAD, Seen(0, workers=1, servers=3, serving=3, memory_share=0.9))
    look.at(0)
    grown = look.at(60)
    assert grown is not None
    assert grown.told(look.seen) == (
        "4 servers wanted, 3 before: the rows take 90% of their memory, more than 80%"
    )


def test_without_the_section_both_numbers_are_fixed() -> None:
    workers, servers = WorkersSpec(initial=2, min=1, max=4), ServerCounts(3, 2, 5)
    fixed = ScalingPolicy.of(None, workers, servers)
    assert (fixed.workers, fixed.servers) == ("fixed", "fixed")
    told = ScalingPolicy.of(AutoscaleSpec(workers="fill", cool_down_s=5.0), workers, servers)
    assert told == ScalingPolicy(
        workers="fill",
        cool_down_ms=5000,
        workers_least=1,
        workers_most=4,
        servers_least=2,
        servers_most=5,
    )
