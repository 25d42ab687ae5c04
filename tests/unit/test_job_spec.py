"""``JobSpec``: what is allowed, what an error says, and JSON that gives the same job again."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay.errors import ConfigError
from backstay.job_spec import (
    SPEC_BYTES_MAX,
    DataSpec,
    EarlyStop,
    JobSpec,
    ModeSpec,
    WorkersSpec,
)
from backstay.settings import DEPTH_MAX, all_settings

TOPIC: dict[str, Any] = {"kind": "kafka", "paths": "clicks"}
STREAM: dict[str, Any] = {"training": TOPIC, "period": {"records": 9}}
PLAIN: dict[str, Any] = {"name": "census", "model": "model.py", "training": "train.csv"}


def test_a_small_job_has_defaults_and_plain_values_stand_for_the_main_field() -> None:
    spec = JobSpec.from_mapping({**PLAIN, "mode": "sync", "workers": 4, "checkpoint": "none"})
    assert spec.training == DataSpec(paths=("train.csv",))
    assert (spec.mode.kind, spec.workers.initial, spec.checkpoint.every) == ("sync", 4, "none")
    assert (spec.epochs, spec.batch_size, spec.records_per_task) == (1, 64, 4096)
    assert spec.kind == "training"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": None}, "name: None is not a string"),
        ({"name": "a/b"}, "name: 'a/b' is not a name of 1 to 64 characters"),
        ({"model": "model.txt"}, "model: 'model.txt' is not the path of a .py file"),
        ({"trainig": "x"}, "trainig: no such field; did you mean 'training'?"),
        ({"training": None}, "training: no data is named; give training, validation or predict"),
        ({"training": []}, "training.paths: no data is named"),
        ({"training": [""]}, "training.paths: one of [''] is empty"),
        ({"training": 5}, "training.paths: 5 is not a string or a list of strings"),
        ({"training": {"kind": "cvs", "paths": "x"}}, "training.kind: 'cvs' is not one of"),
        ({"training": {"paths": "x", "options": 1}}, "training.options: 1 is not a mapping"),
        ({"training": {"path": "x"}}, "training.path: no such field; did you mean 'paths'?"),
        ({"prediction": "x"}, "prediction: is a job of its own"),
        ({"epochs": 0}, "epochs: 0 is out of range; allowed is 1 to"),
        ({"period": {"records": 9}}, "period: needs training data of kind kafka"),
        ({"period": {}}, "period.records: give records, seconds or folders, else no period ends"),
        (
            {**STREAM, "period": {"folders": 1}},
            "period.folders: is given, and training is of kind kafka",
        ),
        (
            {"training": {**TOPIC, "options": {"group": "lag"}}},
            "training.options.group: is for training data without an end; give `period`",
        ),
        (
            {
                "training": {"kind": "csv", "paths": ["d/*"]},
                "validation": {"kind": "csv", "paths": ["d/*"], "options": {"marker": "done"}},
                "period": {"folders": 1},
            },
            "validation.options.marker: is for training data without an end",
        ),
        ({"period": {"seconds": -1.0}}, "period.seconds: -1.0 is out of range"),
        (
            {**STREAM, "epochs": 3},
            "epochs: 3 is given together with period; leave epochs out",
        ),
        (
            {**STREAM, "records_per_task": 2_000_000},
            "period.ahead_records: 1000000 is less than a task has (records_per_task, 2000000)",
        ),
        (
            {**STREAM, "training": {**TOPIC, "options": {"stop": "latest"}}},
            "training.options.stop: is given together with period; leave one of them out",
        ),
        ({"epochs": True}, "epochs: True is not an integer"),
        ({"epochs": "2"}, "epochs: '2' is not an integer"),
        ({"audit": 1}, "audit: 1 is not true or false"),
        ({"straggler_factor": "x"}, "straggler_factor: 'x' is not a number"),
        ({"straggler_factor": float("nan")}, "straggler_factor: nan is not a finite number"),
        ({"mode": "sink"}, "mode.kind: 'sink' is not one of async, sync, bounded, geo"),
        (
            {"mode": {"kind": "geo", "compensation": "scale"}},
            "mode.compensation: scale is for kind async or bounded, not geo",
        ),
        ({"mode": {"staleness": 0}}, "mode.staleness: 0 is out of range"),
        ({"workers": {"min": 5}}, "workers.initial: 2 is not between min (5) and max"),
        ({"workers": {"env": {"A": 1}}}, "workers.env.A: 1 is not a string; put it in quotes"),
        ({"hooks": "ls"}, "hooks: 'ls' is not a mapping"),
        ({"hooks": {"before": [1]}}, "hooks.before: [1] is not a string or a list of strings"),
        ({"early_stop": {"patience": 2}}, "early_stop.metric: is missing; Name of the metric"),
        ({"early_stop": {"metric": "auc"}}, "early_stop: needs both training and validation"),
        ({"evaluation_every_steps": 5}, "evaluation_every_steps: needs both training and valid"),
        ({"servers": {"local": 1, "endpoints": ["a:1"]}}, "servers.endpoints: given together"),
        (
            {"servers": {"local": 3, "min": 4}},
            "servers.local: 3 is not between min (4) and max (64)",
        ),
        (
            {"servers": {"local": 3, "max": 2}},
            "servers.local: 3 is not between min (3) and max (2)",
        ),
        ({"servers": {"local": 3, "min": 1}}, "servers.min: 1 servers cannot keep the 2 copies"),
        ({"autoscale": "grow"}, "autoscale.workers: 'grow' is not one of fixed, fill, throughput"),
        ({"autoscale": {"servers": "fill"}}, "autoscale.servers: 'fill' is not one of fixed, load"),
        ({"autoscale": {"load_low": 0.8}}, "autoscale.load_low: 0.8 is not below load_high (0.8)"),
        ({"autoscale": {"cool_down_s": 0}}, "autoscale.cool_down_s: 0 is out of range"),
        ({"model_params": {"a": object}}, "model_params.a: <class 'object'> is not a string, a nu"),
        ({"model_params": {1: 2}}, "model_params: the name 1 is not a string"),
        ({"model_params": {"a": [float("inf")]}}, "model_params.a.0: inf is not a finite number"),
    ],
)
def test_a_wrong_field_is_named_with_what_is_allowed(fields: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        JobSpec.from_mapping({**PLAIN, **fields})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("servers", "counts"),
    [
        ({"local": 3}, (3, 3, 64)),
        ({"local": 3, "min": 2, "max": 5}, (3, 2, 5)),
        # One server keeps one copy.
        ({"local": 1, "min": 1}, (1, 1, 64)),
        ({"local": 3, "min": 1, "replicas": 1}, (3, 1, 64)),
    ],
)
def test_a_job_has_servers_between_a_minimum_and_a_maximum(
    servers: dict[str, int], counts: tuple[int, int, int]
) -> None:
    spec = JobSpec.from_mapping({**PLAIN, "servers": servers}).servers
    assert spec.counts(servers["local"]) == counts


@pytest.mark.parametrize("name", ["name", "model"])
def test_a_missing_field_is_named(name: str) -> None:
    document = {key: value for key, value in PLAIN.items() if key != name}
    with pytest.raises(ConfigError, match=f"^{name}: is missing"):
        JobSpec.from_mapping(document)


def test_what_is_made_in_python_is_checked_as_well() -> None:
    with pytest.raises(ConfigError, match=r"^kind: 'sink'"):
        ModeSpec(kind="sink")
    with pytest.raises(ConfigError, match=r"^training: 'x' is not a DataSpec"):
        JobSpec(name="a", model="m.py", training="x")  # type: ignore[arg-type]


def test_nesting_and_size_have_limits() -> None:
    deep: Any = 1
    for _ in range(DEPTH_MAX + 2):
        deep = [deep]
    with pytest.raises(ConfigError, match="nested more than"):
        JobSpec.from_mapping({**PLAIN, "model_params": {"deep": deep}})
    with pytest.raises(ConfigError, match="takes more than"):
        JobSpec.from_mapping({**PLAIN, "training": ["x" * SPEC_BYTES_MAX]})


def test_a_job_cannot_be_changed_through_what_it_was_made_of() -> None:
    params = {"layers": [64, 32]}
    spec = JobSpec.from_mapping({**PLAIN, "model_params": params})
    params["layers"].append(16)
    assert spec.model_params == {"layers": [64, 32]}
    with pytest.raises(FrozenInstanceError):
        spec.epochs = 2  # type: ignore[misc]


def test_kinds_of_jobs() -> None:
    data = DataSpec(paths=("x.csv",))
    assert JobSpec(name="a", model="m.py", validation=data).kind == "evaluation"
    assert JobSpec(name="a", model="m.py", prediction=data).kind == "prediction"
    assert JobSpec(name="a", model="m.py", training=data, validation=data).kind == "training"


def test_what_a_job_that_has_begun_cannot_change() -> None:
    spec = JobSpec.from_mapping(PLAIN)
    other = JobSpec.from_mapping({**PLAIN, "epochs": 9, "seed": 1, "training": "other.csv"})
    assert spec.fixed_differences(other) == ("training", "seed")
    assert spec.fixed_differences(JobSpec.from_json(spec.to_json())) == ()


def test_every_field_has_a_sentence_about_it() -> None:
    for name, item, _ in all_settings(JobSpec):
        assert item.metadata["doc"].endswith("."), name


@pytest.mark.parametrize("text", ["", "[]", "nope", '"x"'])
def test_what_is_not_a_job_in_json_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        JobSpec.from_json(text)


NAMES = st.text("abcXYZ019_.-", min_size=1, max_size=64)
TEXTS = st.text(min_size=1, max_size=20)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=10),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=5), below),
    max_leaves=6,
)
PARAMS = st.dictionaries(TEXTS, VALUES, max_size=3)
DATA = st.builds(
    DataSpec,
    kind=st.sampled_from(["auto", "csv", "parquet", "sql"]),
    paths=st.lists(TEXTS, min_size=1, max_size=3).map(tuple),
    options=PARAMS,
)


@given(
    spec=st.builds(
        JobSpec,
        name=NAMES,
        model=TEXTS.map(lambda text: f"{text}.py"),
        model_params=PARAMS,
        training=DATA,
        validation=DATA,
        epochs=st.integers(1, 100),
        straggler_factor=st.floats(1, 100),
        mode=st.builds(ModeSpec, kind=st.sampled_from(["async", "sync", "bounded", "geo"])),
        early_stop=st.none() | st.builds(EarlyStop, metric=TEXTS, min_delta=st.floats(0, 1)),
        workers=st.builds(WorkersSpec, env=st.dictionaries(TEXTS, st.text(max_size=5), max_size=3)),
    )
)
def test_json_gives_the_same_job_and_the_same_text_again(spec: JobSpec) -> None:
    text = spec.to_json()
    again = JobSpec.from_json(text)
    assert again == spec
    assert again.to_json() == text
    assert JobSpec.from_mapping(spec.to_mapping()) == spec
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
