"""Windows, decay and alerts of progressive metrics, from scores to figures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from backstay.consensus.records.keys import JobKeys
from backstay.consensus.store import VALUE_BYTES_MAX
from backstay.errors import ConfigError, InvalidRequest
from backstay.job.score_counts import BUCKETS, GROUP_BUCKETS, OTHER, ScoreCounts, Scores
from backstay.job_engine import progressive
from backstay.job_engine.progressive import Progressive
from backstay.job_spec import AlertSpec, DataSpec, JobSpec, ProgressiveSpec

KEYS = JobKeys("job")
ROUND = "training-1"


class Kept:
    """Records as a store that is never away has them."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def stage(self, key: str, render: Callable[[], str | None]) -> None:
        text = render()
        if text is not None:
            self.texts[key.removeprefix(KEYS.all_progressive)] = text

    def stage_first(self, key: str, render: Callable[[], str | None]) -> None:
        self.stage(key, render)

    def stage_text(self, key: str, text: str) -> None:
        self.stage(key, lambda: text)

    def stage_removal(self, key: str) -> None:
        self.texts.pop(key.removeprefix(KEYS.all_progressive), None)


def spec_of(*alerts: AlertSpec, **fields: object) -> JobSpec:
    values: dict[str, object] = {"window_examples": 10, "half_life_examples": 0, **fields}
    return JobSpec(
        name="job",
        model="model.py",
        training=DataSpec(paths=("data.csv",)),
        progressive=ProgressiveSpec(**values),  # type: ignore[arg-type]
        alerts=alerts,
    )


def opened(spec: JobSpec, kept: Kept, *, now_s: float = 0.0) -> Progressive:
    return Progressive(spec, KEYS, kept, dict(kept.texts), lambda *_: True, now_s)


def scores(records: int, *, good: bool = True, by: Mapping[str, int] | None = None) -> Scores:
    """Scores of so many records, half of them positive, all ranked right or all wrong."""
    found = Scores()
    labels = np.arange(records) % 2
    chances = np.where(labels == good, 0.75, 0.25)
    found.all.add(chances, labels)
    for value, count in (by or {}).items():
        found.of(value).add(chances[:count], labels[:count])
    return found


def add(one: Progressive, task: int, found: Scores, *, now_s: float = 0.0) -> str:
    one.add(ROUND, task, found)
    return one.look(10 * task, now_s)


def test_a_window_ends_with_the_task_that_fills_it() -> None:
    one = opened(spec_of(), Kept())
    add(one, 0, scores(6))
    assert one.shown()["windows"] == []
    add(one, 1, scores(6, good=False))
    add(one, 2, scores(4))
    (ended,) = one.shown()["windows"]
    assert (ended["number"], ended["steps"], one.window) == (1, 10, 2)
    assert ended["window"]["examples"] == 12
    assert ended["window"]["auc"] == 0.5
    shown = one.shown()
    assert (shown["examples"], shown["skipped"]) == (16, 0)
    assert shown["decayed"]["examples"] == 16, "without decay: all since the beginning"


def test_records_that_cannot_be_counted_fill_a_window_too() -> None:
    one = opened(spec_of(), Kept())
    found = Scores()
    found.all.add(np.full(10, np.nan), np.zeros(10))
    add(one, 0, found)
    (ended,) = one.shown()["windows"]
    assert (ended["window"]["examples"], ended["window"]["skipped"]) == (0, 10)
    assert one.shown()["skipped"] == 10


def test_a_window_ends_when_its_time_is_over_even_if_it_is_empty() -> None:
    one = opened(spec_of(window_s=60.0), Kept())
    add(one, 0, scores(4), now_s=1.0)
    assert one.look(5, 59.9) == ""
    assert one.shown()["windows"] == []
    one.look(5, 60.0)
    one.look(5, 119.0)
    one.look(5, 120.0)
    assert [ended["window"]["examples"] for ended in one.shown()["windows"]] == [4, 0]
    assert one.shown()["windows"][-1]["window"]["auc"] is None


def test_old_records_weigh_half_after_a_half_life() -> None:
    one = opened(spec_of(half_life_examples=8), Kept())
    add(one, 0, scores(8, good=False))
    add(one, 1, scores(8))
    decayed = one.shown()["decayed"]
    assert decayed["examples"] == pytest.approx(12)
    wanted = ScoreCounts()
    wanted.merge(scores(8, good=False).all)
    wanted.decay(0.5)
    wanted.merge(scores(8).all)
    assert decayed == pytest.approx(wanted.figures())
    assert decayed["auc"] > 0.5


def test_values_beyond_the_limit_are_counted_together() -> None:
    one = opened(spec_of(by="country", by_values_max=2), Kept())
    add(one, 0, scores(12, by={"de": 4, "fr": 2}))
    add(one, 1, scores(6, by={"fr": 2, "it": 3, OTHER: 1}))
    assert list(one.values) == ["de", "fr"]
    by = one.shown()["by"]
    assert {value: figures["examples"] for value, figures in by.items()} == {
        "de": 4, "fr": 4, OTHER: 4,
    }  # fmt: skip
    (ended,) = one.shown()["windows"]
    assert ended["window_by"]["de"]["examples"] == 4
    # In the new window nothing was seen of it yet.
    add(one, 2, scores(10, by={"it": 2}))
    assert one.shown()["windows"][-1]["window_by"]["de"]["examples"] == 0


def test_figures_of_values_are_kept_of_two_windows() -> None:
    one = opened(spec_of(by="country"), Kept())
    for task in range(progressive.WINDOWS_KEPT + 3):
        add(one, task, scores(10, by={"de": 4}))
    windows = one.shown()["windows"]
    assert [ended["number"] for ended in windows] == list(range(4, 14))
    assert [bool(ended["window_by"]) for ended in windows] == [False] * 8 + [True] * 2


ALERT = AlertSpec(metric="auc", below=0.7, for_windows=2)


def test_an_alert_holds_after_so_many_windows_in_a_row(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = opened(spec_of(ALERT), Kept())
    with caplog.at_level(logging.WARNING):
        for task, good in enumerate([False, True, False, False, False]):
            assert add(one, task, scores(10, good=good)) == ""
    words = "auc below 0.7 for 3 windows (0 in the last)"
    assert one.shown()["alerts"] == [words]
    assert [ended["alerts"] for ended in one.shown()["windows"]] == [
        [], [], [], ["auc below 0.7 for 2 windows (0 in the last)"], [words],
    ]  # fmt: skip
    assert caplog.text.count("alert in window 4") == 1, "it is logged when it begins to hold"
    assert "alert in window 5" not in caplog.text
    add(one, 5, scores(10))
    assert one.shown()["alerts"] == []


def test_a_window_without_the_figure_changes_no_alert() -> None:
    one = opened(spec_of(ALERT, window_s=1.0), Kept())
    add(one, 0, scores(10, good=False))
    one.look(0, 1.0)
    add(one, 1, scores(10, good=False), now_s=1.5)
    assert one.shown()["alerts"] == ["auc below 0.7 for 2 windows (0 in the last)"]


def test_an_alert_may_stop_the_job_and_begins_anew_then() -> None:
    rule = AlertSpec(metric="calibration", above=1.5, below=0.5, for_windows=2, action="stop")
    kept = Kept()
    spec = spec_of(rule, AlertSpec(metric="auc", below=0.7), AlertSpec(metric="examples", below=11))
    one = opened(spec, kept)
    low = Scores()
    low.all.add(np.full(10, 0.1), np.ones(10))
    assert add(one, 0, low) == ""
    why = add(one, 1, low)
    assert why == "alert: calibration below 0.5 or above 1.5 for 2 windows (0.1 in the last)"
    # The same command goes on with the job: not with the windows of before.
    again = opened(spec, kept)
    assert again.shown()["alerts"] == ["examples below 11 for 2 windows (10 in the last)"]
    assert add(again, 2, low) == ""
    assert add(again, 3, low) == why


@pytest.mark.parametrize(
    ("rule", "bad"),
    [
        (AlertSpec(metric="examples", below=11), True),
        (AlertSpec(metric="examples", below=10), False),
        (AlertSpec(metric="skipped", above=0), False),
        (AlertSpec(metric="logloss", above=0.2), True),
        (AlertSpec(metric="auc", below=0.9, over="decayed"), True),
        (AlertSpec(metric="auc", below=0.9), False),
    ],
    ids=lambda value: str(value),
)
def test_what_alerts_watch(rule: AlertSpec, bad: bool) -> None:
    one = opened(spec_of(rule, half_life_examples=100), Kept())
    add(one, 0, scores(8, good=False))
    add(one, 1, scores(2))
    add(one, 2, scores(10))
    assert one.window == 3
    assert bool(one.shown()["alerts"]) == bad


@pytest.mark.parametrize("tasks_max", [1, 3, 64])
def test_who_takes_over_has_the_same_counts(
    tasks_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progressive, "TASKS_MAX", tasks_max)
    kept, spec = Kept(), spec_of(ALERT, by="country", half_life_examples=20, window_s=60.0)
    one, now_s = opened(spec, kept), 0.0
    for task in range(11):
        now_s += 1.0
        add(one, task, scores(4, good=task % 3 == 0, by={"de": 2, "fr": 1}), now_s=now_s)
        shown, window = one.shown(), one.window
        one = opened(spec, kept, now_s=now_s + 1000.0)
        one.show_windows(shown)
        again = one.shown()
        assert one.window == window
        for name in ("examples", "skipped", "windows", "alerts"):
            assert again[name] == shown[name], name
        for value, figures in (("", shown["decayed"]), *shown["by"].items()):
            found = again["by"][value] if value else again["decayed"]
            for name, figure in figures.items():
                known = figure if figure is None else pytest.approx(figure, rel=1e-5)
                assert found[name] == known, (value, name)
        now_s += 1000.0
    assert sum(key.startswith("counts/") for key in kept.texts) <= 1
    assert sum(key.startswith("tasks/") for key in kept.texts) < tasks_max + 1


def test_a_task_that_is_not_recorded_as_done_comes_again() -> None:
    kept = Kept()
    one = opened(spec_of(window_examples=100), kept)
    for task in range(3):
        add(one, task, scores(4))
    again = Progressive(
        spec_of(window_examples=100), KEYS, kept, dict(kept.texts), lambda _, task: task != 1, 0.0
    )
    assert again.shown()["examples"] == 8
    assert len(kept.texts) == 2, "its record is removed"
    add(again, 1, scores(4))
    assert again.shown()["examples"] == 12
    assert opened(spec_of(window_examples=100), kept).shown()["examples"] == 12


def test_another_column_begins_with_no_values() -> None:
    kept = Kept()
    one = opened(spec_of(by="country"), kept)
    add(one, 0, scores(10, by={"de": 4}))
    add(one, 1, scores(4, by={"de": 4}))
    again = opened(spec_of(by="device"), kept)
    assert (again.shown()["by"], again.shown()["examples"]) == ({}, 14)


def test_all_counts_fit_into_one_record() -> None:
    kept = Kept()
    spec = spec_of(by="country", by_values_max=32, window_examples=10**9, half_life_examples=10**6)
    one, generator = opened(spec, kept), np.random.default_rng(1)
    for task in range(2):
        # In each bucket some records, which is more than any model's scores are spread.
        found = Scores()
        for counts, buckets in [
            (found.all, BUCKETS), *((found.of(f"value {n}"), GROUP_BUCKETS) for n in range(40)),
        ]:  # fmt: skip
            logits = (np.arange(2 * buckets) + 0.5) / buckets * 16 - 16
            for _ in range(3):
                rows = generator.random(logits.size) < 0.7
                counts.add(logits[rows], np.arange(logits.size)[rows] % 2, logits=True)
        add(one, task, found)
    one._record_counts(0.0)
    assert list(kept.texts) == [f"counts/{2:019d}"]
    assert len(kept.texts[f"counts/{2:019d}"]) < VALUE_BYTES_MAX
    assert len(one.values) == 32


@pytest.mark.parametrize(
    "recorded",
    [
        {"counts/1": "{}"},
        {"counts/x": "{}"},
        {"tasks/1": '{"round":"training-1","task":0,"by":"","scores":"!"}'},
        {"tasks/1": '{"round":"training-1","task":0,"by":"","scores":"AAAA"}'},
        {"begun/training-1/3": "{}"},
    ],
)
def test_records_that_cannot_be_read_are_refused(recorded: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest):
        Progressive.check(recorded)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"progressive": {"window_examples": 0}}, "progressive.window_examples: is 0"),
        ({"progressive": {"by": 3}}, "progressive.by: 3 is not a string"),
        ({"progressive": {"window": 3}}, "progressive.window: no such field; did you mean"),
        ({"progressive": {"predictions": "odds"}}, "progressive.predictions: 'odds' is not one of"),
        ({"alerts": [{"metric": "auc", "below": 1}]}, "alerts: need `progressive`"),
        ({"alerts": {"metric": "auc"}}, "alerts: .* is not a list of mappings"),
        ({"progressive": {}, "alerts": [{"metric": "auc"}]}, "alerts.0.below: is missing"),
        ({"progressive": {}, "alerts": [{"below": 1}]}, "alerts.0.metric: is missing"),
        (
            {"progressive": {}, "alerts": [{"metric": "recall", "below": 1}]},
            "alerts.0.metric: 'recall' is not one of",
        ),
        (
            {"progressive": {}, "alerts": [{"metric": "auc", "below": 2, "above": 1}]},
            "alerts.0.below: 2.0 is more than above",
        ),
        (
            {"progressive": {}, "alerts": [{"metric": "auc", "below": 1, "for": 3}]},
            "alerts.0.for: no such field; there are metric, ",
        ),
        (
            {"progressive": {}, "alerts": [{"metric": "auc", "below": 1}] * 2},
            "alerts.1: 'auc below 1' is there already",
        ),
        ({"prometheus": "here"}, "prometheus: 'here' is not of the form host:port"),
        ({"training": None, "validation": "a.csv", "progressive": {}}, "progressive: needs"),
    ],
)
def test_wrong_fields_are_refused_by_name(fields: dict[str, object], message: str) -> None:
    document = {"name": "job", "model": "m.py", "training": "a.csv", **fields}
    with pytest.raises(ConfigError, match=message):
        JobSpec.from_mapping(document)


def test_a_job_with_alerts_is_the_same_after_json() -> None:
    spec = JobSpec.from_mapping(
        {
            "name": "job",
            "model": "m.py",
            "training": "a.csv",
            "progressive": 5000,
            "alerts": [{"metric": "auc", "below": 0.7}, {"metric": "skipped", "above": 0}],
        }
    )
    assert spec.progressive is not None
    assert spec.progressive.window_examples == 5000
    assert [alert.text for alert in spec.alerts] == ["auc below 0.7", "skipped above 0"]
    assert JobSpec.from_json(spec.to_json()) == spec
