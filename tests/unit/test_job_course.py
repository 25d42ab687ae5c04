"""The course of a job: passes, evaluations, early stop, the end, and what a restart finds."""

import json
from dataclasses import replace

import pytest

from backstay.course.course import Course, CoursePlan
from backstay.course.rounds import RoundId, RoundKind
from backstay.errors import ConfigError, InvalidRequest
from backstay.job_spec import EarlyStop

PLAN = CoursePlan(passes=2, evaluates=True, train_end=True)


def now_open(course: Course) -> list[str]:
    return [str(round_id) for round_id in course.open_rounds]


def add_steps(course: Course, steps: int) -> None:
    """Have the pass that is open tell of so many more steps."""
    for round_id in course.open_rounds:
        if round_id.kind is RoundKind.TRAINING:
            others = course._steps_of.get(round_id, 0)
            course.count_steps(round_id, others + steps)


def end(course: Course, name: str, dead_letters: int = 0, **metrics: float) -> None:
    """End a round that must be open, and have a new master take the course over."""
    assert name in now_open(course)
    course.round_over(RoundId.parse(name), dead_letters, metrics)
    text = course.to_json()
    again = Course.from_json(course.plan, text)
    assert again.to_json() == text
    assert again.open_rounds == course.open_rounds
    assert again.outcome == course.outcome


def test_a_job_is_passes_each_evaluated_then_the_end_of_training() -> None:
    course = Course(PLAN)
    for name in ("training-1", "evaluation-1", "training-2", "evaluation-2", "train_end-1"):
        assert now_open(course) == [name]
        add_steps(course, 10)
        end(course, name)
    assert course.outcome == "finished"
    assert course.reason == ""
    assert (course.steps, course.passes_over) == (20, 2)


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (CoursePlan(passes=0, evaluates=True, train_end=True), "evaluation-1"),
        (CoursePlan(passes=0, predicts=True), "prediction-1"),
        (CoursePlan(), "training-1"),
    ],
)
def test_a_job_of_one_round(plan: CoursePlan, name: str) -> None:
    course = Course(plan)
    assert now_open(course) == [name]
    end(course, name)
    assert course.outcome == "finished"
    assert now_open(course) == []


def test_evaluations_by_steps_run_beside_the_training_and_one_waits() -> None:
    course = Course(CoursePlan(passes=1, evaluates=True, evaluation_every_steps=10))
    add_steps(course, 9)
    assert now_open(course) == ["training-1"]
    add_steps(course, 1)
    assert now_open(course) == ["evaluation-1", "training-1"]
    add_steps(course, 25)  # due at 20 and 30: they are one
    assert now_open(course) == ["evaluation-1", "training-1"]
    end(course, "evaluation-1")
    assert now_open(course) == ["evaluation-2", "training-1"]
    assert course.evaluated_steps == 35
    end(course, "evaluation-2")
    assert now_open(course) == ["training-1"]
    add_steps(course, 1)
    end(course, "training-1")
    assert now_open(course) == ["evaluation-3"], "the last model was not evaluated"
    end(course, "evaluation-3", auc=0.7)
    assert course.metrics == {"auc": 0.7}
    assert course.outcome == "finished"


def test_the_last_model_is_evaluated_once() -> None:
    course = Course(CoursePlan(passes=1, evaluates=True, evaluation_every_steps=10))
    add_steps(course, 10)
    end(course, "training-1")
    assert now_open(course) == ["evaluation-1"]
    end(course, "evaluation-1")
    assert course.outcome == "finished"


def test_training_ends_in_the_middle_of_a_pass_at_its_most_steps() -> None:
    course = Course(replace(PLAN, max_steps=100))
    add_steps(course, 99)
    assert now_open(course) == ["training-1"]
    add_steps(course, 3)
    assert now_open(course) == ["evaluation-1"]
    assert course.passes_over == 0
    end(course, "evaluation-1")
    assert now_open(course) == ["train_end-1"]
    assert "max_steps: 100" in course.reason


def stopping(mode: str, patience: int, *values: float, min_delta: float = 0.0) -> Course:
    rule = EarlyStop(metric="auc", mode=mode, patience=patience, min_delta=min_delta)
    course = Course(replace(PLAN, passes=20, early_stop=rule))
    for number, value in enumerate(values, start=1):
        end(course, f"training-{number}")
        end(course, f"evaluation-{number}", auc=value)
    return course


@pytest.mark.parametrize(
    ("course", "goes_on"),
    [
        (stopping("max", 1, 0.5, 0.6), True),
        (stopping("max", 1, 0.5, 0.5), False),
        (stopping("max", 2, 0.5, 0.4, 0.6, 0.5), True),
        (stopping("max", 2, 0.5, 0.4, 0.45), False),
        (stopping("min", 1, 0.5, 0.4), True),
        (stopping("min", 1, 0.5, 0.6), False),
        (stopping("max", 1, 0.5, 0.505, min_delta=0.01), False),
        (stopping("max", 1, 0.5, float("nan")), False),
        (stopping("max", 2, float("nan"), 0.1), True),
    ],
)
def test_early_stop(course: Course, goes_on: bool) -> None:
    if goes_on:
        assert now_open(course)[0].startswith("training")
        assert not course.reason
    else:
        assert now_open(course) == ["train_end-1"]
        assert "early_stop: auc was not better" in course.reason


def test_early_stop_in_the_middle_of_a_pass() -> None:
    rule = EarlyStop(metric="auc")
    course = Course(replace(PLAN, evaluation_every_steps=5, early_stop=rule))
    add_steps(course, 5)
    end(course, "evaluation-1", auc=0.5)
    add_steps(course, 10)
    end(course, "evaluation-2", auc=0.4)
    assert now_open(course) == ["train_end-1"]


def test_a_job_that_ends_with_dead_lettered_tasks_says_so_and_goes_on_with_them() -> None:
    course = Course(replace(PLAN, passes=1))
    training = RoundId.parse("training-1")
    end(course, "training-1", dead_letters=2)
    end(course, "evaluation-1")
    end(course, "train_end-1")
    assert json.loads(course.to_json())["ended"] == "finished_with_dead_letters"
    assert course.dead_letters == {training: 2}
    assert not course.reopen(RoundId.parse("evaluation-1"))
    assert course.reopen(training)
    end(course, "training-1")
    assert now_open(course) == ["train_end-2"], "what was exported lacks the tasks put back"
    end(course, "train_end-2")
    assert course.outcome == "finished"


def test_dead_lettered_tasks_are_put_back_while_the_next_pass_runs() -> None:
    course = Course(replace(PLAN, evaluates=False))
    end(course, "training-1", dead_letters=1)
    assert course.reopen(RoundId.parse("training-1"))
    assert now_open(course) == ["training-1", "training-2"]
    end(course, "training-2")
    assert now_open(course) == ["training-1"]
    end(course, "training-1", dead_letters=1)
    end(course, "train_end-1")
    assert course.outcome == "finished_with_dead_letters"


def test_stop_ends_the_job_once() -> None:
    course = Course(PLAN)
    course.stop("asked by ann")
    course.stop("too late")
    assert (course.outcome, course.reason) == ("stopped", "asked by ann")
    assert now_open(course) == []
    add_steps(course, 5)
    course.round_over(RoundId.parse("training-1"))
    assert course.outcome == "stopped"
    assert not course.reopen(RoundId.parse("training-1"))


def test_a_round_that_is_not_open_is_ignored() -> None:
    course = Course(PLAN)
    end(course, "training-1")
    course.round_over(RoundId.parse("training-1"))
    course.round_over(RoundId.parse("training-2"))
    assert now_open(course) == ["evaluation-1"]


def test_more_passes_than_before_are_trained_unless_training_was_cut_short() -> None:
    course = Course(replace(PLAN, passes=1))
    for name in ("training-1", "evaluation-1", "train_end-1"):
        end(course, name)
    longer = Course.from_json(replace(PLAN, passes=3), course.to_json())
    assert now_open(longer) == ["training-2"]
    cut = Course(replace(PLAN, max_steps=1))
    add_steps(cut, 1)
    assert now_open(Course.from_json(PLAN, cut.to_json())) == ["evaluation-1"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"steps_over":0', '"steps_over":-1'),
        ('"steps_of":{}', '"steps_of":{"training-1":"0"}'),
        ('"ended":""', '"ended":"soon"'),
        ('"best":""', '"best":"good"'),
        ('"dead_letters":{}', '"dead_letters":{"lunch-1":1}'),
        ('"reason":""', '"because":""'),
    ],
)
def test_a_damaged_record_is_refused(old: str, new: str) -> None:
    text = Course(PLAN).to_json()
    assert old in text
    with pytest.raises(InvalidRequest):
        Course.from_json(PLAN, text.replace(old, new))


def test_plans_are_checked() -> None:
    with pytest.raises(ConfigError, match="no data"):
        CoursePlan(passes=0)
    with pytest.raises(ConfigError, match="early_stop: needs"):
        CoursePlan(early_stop=EarlyStop(metric="auc"))
    with pytest.raises(ConfigError, match="max_steps = -1"):
        CoursePlan(max_steps=-1)
    with pytest.raises(InvalidRequest, match="-1 steps"):
        Course(PLAN).count_steps(RoundId.parse("training-1"), -1)
