"""The parts of ``make demo-online`` that need no process: its world, its figures, its verdict."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("confluent_kafka")
pytest.importorskip("psutil")

from examples.online import world
from examples.online.demo import complaints
from examples.online.measures import delays
from examples.online.world import Visits, World


def days(seed: int, *times_s: float, count: int = 2000) -> list[Visits]:
    one = World(seed)
    return [one.visits(count, now_s) for now_s in times_s]


def test_a_seed_gives_the_same_visits_each_time() -> None:
    for first, again in zip(days(1, 0.0, 5.0, 50.0), days(1, 0.0, 5.0, 50.0), strict=True):
        for one, other in zip(first, again, strict=True):
            assert np.array_equal(one, other)
    assert not np.array_equal(days(1, 0.0)[0].click, days(2, 0.0)[0].click)


def test_users_and_ads_come_and_go() -> None:
    begin, soon, late = (
        {name: set(getattr(one, name).tolist()) for name in ("user", "ad")}
        for one in days(3, 0.0, 1.0, 10 * world.USER_LIFE_S, count=20_000)
    )
    # Nearly all ads are still there a second later, and hardly one at last.
    assert len(begin["ad"] & soon["ad"]) > 0.9 * len(begin["ad"])
    assert len(begin["ad"] & late["ad"]) < 0.1 * len(begin["ad"])
    assert not begin["user"] & late["user"]
    for one in (begin, soon, late):
        assert len(one["ad"]) <= world.ADS, "as many as there are at a time"
    assert not set.union(*(one["user"] for one in (begin, soon, late))) & late["ad"]


def test_many_users_come_once_and_a_few_come_often() -> None:
    (visits,) = days(4, 0.0, count=20_000)
    _, counts = np.unique(visits.user, return_counts=True)
    once = (counts == 1).sum() / len(visits.user)
    assert world.GUEST_SHARE - 0.02 < once < world.GUEST_SHARE + 0.05
    often = np.sort(counts)[-len(counts) // 100 :].sum() / len(visits.user)
    assert often > 0.1, "a hundredth of the users have a tenth of the visits"


def test_what_is_liked_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "USER_LIFE_S", 1e9)
    monkeypatch.setattr(world, "AD_LIFE_S", 1e9)

    def liking(visits: Visits) -> Any:
        shown = np.bincount(visits.ad, minlength=world.ADS)
        return np.bincount(visits.ad, visits.chance, world.ADS) / np.maximum(shown, 1)

    begin, soon, turned, again = (
        liking(one) for one in days(5, 0.0, 2.0, world.TURN_S / 2, world.TURN_S, count=50_000)
    )
    assert np.corrcoef(begin, soon)[0, 1] > 0.9
    assert np.corrcoef(begin, turned)[0, 1] < -0.5
    assert np.corrcoef(begin, again)[0, 1] > 0.9


def test_clicks_are_drawn_with_their_chances() -> None:
    (visits,) = days(6, 0.0, count=50_000)
    assert abs(visits.click.mean() - visits.chance.mean()) < 0.01
    high = visits.chance > 0.6
    assert abs(visits.click[high].mean() - visits.chance[high].mean()) < 0.02
    assert set(np.unique(visits.click)) == {0, 1}


def test_a_delay_counts_from_the_acknowledgement_to_the_first_lookup_that_has_it() -> None:
    told = [(1, 10.0), (2, 10.1), (3, 10.2), (4, 11.0), (5, 11.5), (6, 12.0)]
    # 1 was there before anybody looked; a lookup may come before its acknowledgement.
    seen = [(2, 10.6), (4, 11.2), (5, 11.4)]
    assert delays(told, seen) == pytest.approx([0.5, 1.0, 0.2, 0.0])
    assert len(delays(told, [])) == 0


GOOD = {
    "records_once": True,
    "records": 100,
    "written": 100,
    "auc_follower": 0.7,
    "auc_frozen": 0.6,
}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"records_once": False, "records": 99}, "not each of 100 clicks was counted once"),
        ({"auc_frozen": 0.69}, "is not above that of the frozen one, 0.69"),
        ({"auc_follower": None}, "the time was too short"),
    ],
)
def test_what_is_wrong_is_said(wrong: dict[str, Any], said: str) -> None:
    assert complaints(GOOD) == []
    (sentence,) = complaints(GOOD | wrong)
    assert said in sentence
