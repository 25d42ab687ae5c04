"""Who is waited for: times are arguments, so every moment can be met exactly."""

from __future__ import annotations

from backstay.pserver.controller import Absences, living
from tests.unit.controller_cluster import cluster, member, members

GRACE = 10.0
ROUTING = cluster(3).routing
ALL = members(member(0), member(1), member(2))
WITHOUT_1 = members(member(0), member(2))


def test_whoever_is_missing_is_waited_for_until_the_time_is_over() -> None:
    absences = Absences(GRACE)
    assert absences.note(5.0, ROUTING, WITHOUT_1, ()) == {101}
    assert absences.next_end(6.0) == 9.0
    assert absences.note(14.9, ROUTING, WITHOUT_1, ()) == {101}
    assert absences.note(15.0, ROUTING, WITHOUT_1, ()) == frozenset()
    assert absences.next_end(15.0) is None


def test_whoever_comes_back_gets_the_whole_time_again() -> None:
    absences = Absences(GRACE)
    absences.note(0.0, ROUTING, WITHOUT_1, ())
    assert absences.note(9.0, ROUTING, ALL, ()) == frozenset()
    assert absences.note(20.0, ROUTING, WITHOUT_1, ()) == {101}
    assert absences.next_end(20.0) == GRACE


def test_the_dead_are_not_waited_for() -> None:
    absences = Absences(GRACE)
    assert absences.note(0.0, ROUTING, WITHOUT_1, {101}) == frozenset()
    assert absences.next_end(0.0) is None


def test_nobody_is_missing_before_the_first_routing() -> None:
    assert Absences(GRACE).note(0.0, None, WITHOUT_1, ()) == frozenset()


def test_a_record_of_a_process_that_is_gone_counts_for_nothing() -> None:
    assert living(ALL, {101}) == WITHOUT_1
