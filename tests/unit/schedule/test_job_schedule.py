"""The schedule of a job: passes, evaluations, early stop, the end, and what a restart finds."""

import json
from dataclasses import replace

import pytest

from backstay.errors import ConfigError, InvalidRequest
from backstay.job_spec import EarlyStop
from backstay.schedule.rounds import RoundId, RoundKind
from backstay.schedule.schedule import Schedule, SchedulePlan

PLAN = SchedulePlan(passes=2, evaluates=True, train_end=True)


def now_open(schedule: Schedule) -> list[str]:
    return [str(round_id) for round_id in schedule.open_rounds]


def add_steps(schedule: Schedule, steps: int) -> None:
    """Have the pass that is open tell of so many more steps."""
    for round_id in schedule.open_rounds:
        if round_id.kind is RoundKind.TRAINING:
            others = schedule._steps_of.get(round_id, 0)
            schedule.count_steps(round_id, others + steps)


def end(schedule: Schedule, name: str, dead_letters: int = 0, **metrics: float) -> None:
    """End a round that must be open, and have a new master take the schedule over."""
    assert name in now_open(schedule)
    schedule.round_over(RoundId.parse(name), dead_letters, metrics)
    text = schedule.to_json()
    again = Schedule.from_json(schedule.plan, text)
    assert again.to_json() == text
    assert again.open_rounds == schedule.open_rounds
    assert again.outcome == schedule.outcome


def test_a_job_is_passes_each_evaluated_then_the_end_of_training() -> None:
    schedule = Schedule(PLAN)
    for name in ("training-1", "evaluation-1", "training-2", "evaluation-2", "train_end-1"):
        assert now_open(schedule) == [name]
        add_steps(schedule, 10)
        end(schedule, name)
    assert schedule.outcome == "finished"
    assert schedule.reason == ""
    assert (schedule.steps, schedule.passes_over) == (20, 2)


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (SchedulePlan(passes=0, evaluates=True, train_end=True), "evaluation-1"),
        (SchedulePlan(passes=0, predicts=True), "prediction-1"),
        (SchedulePlan(), "training-1"),
    ],
)
def test_a_job_of_one_round(plan: SchedulePlan, name: str) -> None:
    schedule = Schedule(plan)
    assert now_open(schedule) == [name]
    end(schedule, name)
    assert schedule.outcome == "finished"
    assert now_open(schedule) == []


def test_evaluations_by_steps_run_beside_the_training_and_one_waits() -> None:
    schedule = Schedule(SchedulePlan(passes=1, evaluates=True, evaluation_every_steps=10))
    add_steps(schedule, 9)
    assert now_open(schedule) == ["training-1"]
    add_steps(schedule, 1)
    assert now_open(schedule) == ["evaluation-1", "training-1"]
    add_steps(schedule, 25)  # due at 20 and 30: they are one
    assert now_open(schedule) == ["evaluation-1", "training-1"]
    end(schedule, "evaluation-1")
    assert now_open(schedule) == ["evaluation-2", "training-1"]
    assert schedule.evaluated_steps == 35
    end(schedule, "evaluation-2")
    assert now_open(schedule) == ["training-1"]
    add_steps(schedule, 1)
    end(schedule, "training-1")
    assert now_open(schedule) == ["evaluation-3"], "the last model was not evaluated"
    end(schedule, "evaluation-3", auc=0.7)
    assert schedule.metrics == {"auc": 0.7}
    assert schedule.outcome == "finished"


def test_the_last_model_is_evaluated_once() -> None:
    schedule = Schedule(SchedulePlan(passes=1, evaluates=True, evaluation_every_steps=10))
    add_steps(schedule, 10)
    end(schedule, "training-1")
    assert now_open(schedule) == ["evaluation-1"]
    end(schedule, "evaluation-1")
    assert schedule.outcome == "finished"


def test_training_ends_in_the_middle_of_a_pass_at_its_most_steps() -> None:
    schedule = Schedule(replace(PLAN, max_steps=100))
    add_steps(schedule, 99)
    assert now_open(schedule) == ["training-1"]
    add_steps(schedule, 3)
    assert now_open(schedule) == ["evaluation-1"]
    assert schedule.passes_over == 0
    end(schedule, "evaluation-1")
    assert now_open(schedule) == ["train_end-1"]
    assert "max_steps: 100" in schedule.reason


def stopping(mode: str, patience: int, *values: float, min_delta: float = 0.0) -> Schedule:
    rule = EarlyStop(metric="auc", mode=mode, patience=patience, min_delta=min_delta)
    schedule = Schedule(replace(PLAN, passes=20, early_stop=rule))
    for number, value in enumerate(values, start=1):
        end(schedule, f"training-{number}")
        end(schedule, f"evaluation-{number}", auc=value)
    return schedule


@pytest.mark.parametrize(
    ("schedule", "goes_on"),
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
def test_early_stop(schedule: Schedule, goes_on: bool) -> None:
    if goes_on:
        assert now_open(schedule)[0].startswith("training")
        assert not schedule.reason
    else:
        assert now_open(schedule) == ["train_end-1"]
        assert "early_stop: auc was not better" in schedule.reason


def test_early_stop_in_the_middle_of_a_pass() -> None:
    rule = EarlyStop(metric="auc")
    schedule = Schedule(replace(PLAN, evaluation_every_steps=5, early_stop=rule))
    add_steps(schedule, 5)
    end(schedule, "evaluation-1", auc=0.5)
    add_steps(schedule, 10)
    end(schedule, "evaluation-2", auc=0.4)
    assert now_open(schedule) == ["train_end-1"]


def test_a_job_that_ends_with_dead_lettered_tasks_says_so_and_goes_on_with_them() -> None:
    schedule = Schedule(replace(PLAN, passes=1))
    training = RoundId.parse("training-1")
    end(schedule, "training-1", dead_letters=2)
    end(schedule, "evaluation-1")
    end(schedule, "train_end-1")
    assert json.loads(schedule.to_json())["ended"] == "finished_with_dead_letters"
    assert schedule.dead_letters == {training: 2}
    assert not schedule.reopen(RoundId.parse("evaluation-1"))
    assert schedule.reopen(training)
    end(schedule, "training-1")
    assert now_open(schedule) == ["train_end-2"], "what was exported lacks the tasks put back"
    end(schedule, "train_end-2")
    assert schedule.outcome == "finished"


def test_an_end_of_training_that_has_begun_is_followed_by_another_one() -> None:
    schedule = Schedule(replace(PLAN, passes=1, evaluates=False))
    end(schedule, "training-1", dead_letters=1)
    assert now_open(schedule) == ["train_end-1"]
    assert schedule.reopen(RoundId.parse("training-1"))
    assert now_open(schedule) == ["training-1"]
    end(schedule, "training-1")
    # It has another name: a worker may still be busy with the first, and complete it.
    assert now_open(schedule) == ["train_end-2"]
    schedule.round_over(RoundId.parse("train_end-1"))
    assert schedule.outcome is None
    end(schedule, "train_end-2")
    assert schedule.outcome == "finished"


def test_dead_lettered_tasks_are_put_back_while_the_next_pass_runs() -> None:
    schedule = Schedule(replace(PLAN, evaluates=False))
    end(schedule, "training-1", dead_letters=1)
    assert schedule.reopen(RoundId.parse("training-1"))
    assert now_open(schedule) == ["training-1", "training-2"]
    end(schedule, "training-2")
    assert now_open(schedule) == ["training-1"]
    end(schedule, "training-1", dead_letters=1)
    end(schedule, "train_end-1")
    assert schedule.outcome == "finished_with_dead_letters"


def test_a_round_that_is_not_open_is_ignored() -> None:
    schedule = Schedule(PLAN)
    end(schedule, "training-1")
    schedule.round_over(RoundId.parse("training-1"))
    schedule.round_over(RoundId.parse("training-2"))
    assert now_open(schedule) == ["evaluation-1"]


def test_more_passes_than_before_are_trained_unless_training_was_cut_short() -> None:
    schedule = Schedule(replace(PLAN, passes=1))
    for name in ("training-1", "evaluation-1", "train_end-1"):
        end(schedule, name)
    longer = Schedule.from_json(replace(PLAN, passes=3), schedule.to_json())
    assert now_open(longer) == ["training-2"]
    cut = Schedule(replace(PLAN, max_steps=1))
    add_steps(cut, 1)
    assert now_open(Schedule.from_json(PLAN, cut.to_json())) == ["evaluation-1"]


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
    text = Schedule(PLAN).to_json()
    assert old in text
    with pytest.raises(InvalidRequest):
        Schedule.from_json(PLAN, text.replace(old, new))


def test_plans_are_checked() -> None:
    with pytest.raises(ConfigError, match="no data"):
        SchedulePlan(passes=0)
    with pytest.raises(ConfigError, match="early_stop: needs"):
        SchedulePlan(early_stop=EarlyStop(metric="auc"))
    with pytest.raises(ConfigError, match="max_steps = -1"):
        SchedulePlan(max_steps=-1)
    with pytest.raises(InvalidRequest, match="-1 steps"):
        Schedule(PLAN).count_steps(RoundId.parse("training-1"), -1)


def test_an_endless_job_has_period_after_period() -> None:
    schedule = Schedule(SchedulePlan(passes=0, endless=True, evaluates=True, train_end=True))
    for number in range(1, 6):
        assert now_open(schedule) == [f"training-{number}"]
        assert schedule.passes_begun(number - 1) == number
        add_steps(schedule, 10)
        end(schedule, f"training-{number}")
        end(schedule, f"evaluation-{number}")
    assert schedule.outcome is None


def test_an_endless_job_ends_by_its_steps_and_is_not_taken_up_again() -> None:
    plan = SchedulePlan(passes=0, endless=True, train_end=True, max_steps=15)
    schedule = Schedule(plan)
    add_steps(schedule, 10)
    end(schedule, "training-1")
    add_steps(schedule, 10)
    assert now_open(schedule) == ["train_end-1"]
    end(schedule, "train_end-1")
    assert schedule.outcome == "finished"
    again = Schedule.from_json(replace(plan, max_steps=0), schedule.to_json())
    assert again.outcome == "finished"


def test_an_endless_job_ends_early_if_it_gets_no_better() -> None:
    rule = EarlyStop(metric="auc", patience=1)
    schedule = Schedule(
        SchedulePlan(passes=0, endless=True, evaluates=True, early_stop=rule, train_end=True)
    )
    for number in (1, 2):
        end(schedule, f"training-{number}")
        end(schedule, f"evaluation-{number}", auc=0.5)
    assert now_open(schedule) == ["train_end-1"]
    assert "early_stop" in schedule.reason


def test_an_endless_job_has_no_number_of_passes() -> None:
    with pytest.raises(ConfigError, match="passes = 3"):
        SchedulePlan(passes=3, endless=True)
