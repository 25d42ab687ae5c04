"""Job files: where an error is, what the command line adds, and YAML without its traps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from backstay.errors import ConfigError
from backstay.job_spec import JobSpec
from backstay.master.job_file import load_job, parse_value, to_yaml

JOB = """\
name: census
model: model.py
training: data/*.csv
workers:
  initial: 2
  max: 8
mode: bounded
"""


def load(folder: Path, text: str, **given: Any) -> JobSpec:
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    names = {name.replace("__", "."): value for name, value in given.items()}
    return load_job(path, names, folder=Path("/elsewhere"))


def test_paths_of_the_file_are_relative_to_it_and_those_of_flags_to_the_folder(
    tmp_path: Path,
) -> None:
    spec = load(tmp_path, JOB, validation=["v.csv", "s3://bucket/v.csv"], output="out")
    assert spec.model == str(tmp_path / "model.py")
    assert spec.training is not None
    assert spec.training.paths == (str(tmp_path / "data/*.csv"),)
    assert spec.validation is not None
    assert spec.validation.paths == ("/elsewhere/v.csv", "s3://bucket/v.csv")
    assert spec.output == "/elsewhere/out"
    assert spec.log_dir == str(tmp_path / "backstay-jobs" / "census")


def test_variables_in_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA", "/mnt/data")
    text = JOB.replace("data/*.csv", '["$DATA/a.csv", "${DATA}-2/b.csv"]')
    training = load(tmp_path, text).training
    assert training is not None
    assert training.paths == ("/mnt/data/a.csv", "/mnt/data-2/b.csv")
    custom = load(tmp_path, JOB.replace("data/*.csv", "{kind: custom, paths: $DATA}")).training
    assert custom is not None
    assert custom.paths == ("/mnt/data",)
    monkeypatch.delenv("DATA")
    with pytest.raises(ConfigError, match=r"yaml, line 3: training: .* variable DATA is not set"):
        load(tmp_path, text)


@pytest.mark.parametrize("text", ["exports: served\n", "exports: {url: served, every_s: 5}\n"])
def test_an_export_beside_the_job_file_is_the_same_folder_for_all_servers(
    tmp_path: Path, text: str
) -> None:
    exports = load(tmp_path, JOB + text).exports
    assert exports is not None
    assert exports.url == str(tmp_path / "served")
    away = load(tmp_path, JOB + text.replace("served", "s3://bucket/served")).exports
    assert away is not None
    assert away.url == "s3://bucket/served"


def test_tables_are_no_files(tmp_path: Path) -> None:
    text = JOB.replace("data/*.csv", "{kind: sql, paths: [clicks]}")
    training = load(tmp_path, text).training
    assert training is not None
    assert training.paths == ("clicks",)


def test_the_command_line_wins_and_leaves_the_rest_of_a_nested_field(tmp_path: Path) -> None:
    spec = load(tmp_path, JOB, workers__initial=5, mode__staleness=9, epochs=3)
    assert (spec.workers.initial, spec.workers.max) == (5, 8)
    assert (spec.mode.kind, spec.mode.staleness, spec.epochs) == ("bounded", 9, 3)
    # A plain value stands for the main field, and leaves the others as well.
    spec = load(tmp_path, JOB, workers=7, mode="sync", model_params={"a": 1})
    assert (spec.workers.initial, spec.workers.max, spec.mode.kind) == (7, 8, "sync")
    assert load(tmp_path, JOB + "early_stop: {metric: auc}\n", early_stop=None).early_stop is None


def test_one_file_is_for_training_evaluation_and_prediction(tmp_path: Path) -> None:
    text = JOB + "validation: v.csv\nprediction: p.csv\nearly_stop: {metric: auc}\naudit: true\n"
    trained = load(tmp_path, text)
    assert (trained.name, trained.kind, trained.prediction) == ("census", "training", None)
    path = tmp_path / "job.yaml"
    judged = load_job(path, {}, folder=tmp_path, use="evaluation")
    assert (judged.name, judged.model_from, judged.kind) == (
        "census-evaluation",
        "census",
        "evaluation",
    )
    assert judged.checkpoint.url == f"{trained.log_dir}/checkpoints"
    assert judged.checkpoint.every == "none"
    assert judged.log_dir == f"{trained.log_dir}-evaluation"
    assert judged.early_stop is None
    assert not judged.audit
    predicted = load_job(path, {"model_from": "other"}, folder=tmp_path, use="prediction")
    assert (predicted.name, predicted.model_from, predicted.kind) == (
        "census",
        "other",
        "prediction",
    )
    path.write_text(JOB)
    with pytest.raises(ConfigError, match="validation: is missing; name the records"):
        load_job(path, {}, folder=tmp_path, use="evaluation")
    with pytest.raises(ConfigError, match="training: is missing; name the records"):
        load(tmp_path, JOB.replace("training", "validation"))


def test_without_a_file_the_command_line_says_everything() -> None:
    given = {"name": "a", "model": "m.py", "training": ["x.csv"]}
    spec = load_job(None, given, folder=Path("/here"))
    assert (spec.model, spec.log_dir) == ("/here/m.py", "/here/backstay-jobs/a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (JOB + "epochs: many\n", "job.yaml, line 8: epochs: 'many' is not an integer"),
        (JOB + "epoch: 2\n", "job.yaml, line 8: epoch: no such field; did you mean 'epochs'?"),
        (JOB.replace("max: 8", "max: no"), "job.yaml, line 6: workers.max: False is not an"),
        (JOB.replace("max: 8", "max: 1"), "job.yaml, line 5: workers.initial: 2 is not between"),
        (JOB.replace("bounded", "bound"), "job.yaml, line 7: mode.kind: 'bound' is not one of"),
        (JOB + "early_stop:\n  mode: min\n", "job.yaml, line 8: early_stop.metric: is missing"),
        (JOB.replace("name: census\n", ""), "job.yaml: name: is missing"),
        (JOB + "name: b\n", "job.yaml, line 8: not a job file: 'name' stands here a second time"),
        (JOB + "a: [\n", "job.yaml, line 9: not a job file: "),
        ("a: &x [1]\nb: *x\n", "job.yaml, line 2: not a job file: aliases (*name) are not"),
        ("- a\n", "job.yaml: not a job file: it must be a list of `name: value` lines"),
        ("", "job.yaml: not a job file: it must be"),
        ("a: !!python/object:os.system x\n", "job.yaml, line 1: not a job file: could not"),
    ],
)
def test_an_error_says_where_it_is(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path}/{message}")


def test_an_error_of_the_command_line_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^epochs: 0 is out of range.*\(from the command line\)"):
        load(tmp_path, JOB, epochs=0)
    with pytest.raises(ConfigError, match=r"^foo: no such field.*\(from the command line\)"):
        load(tmp_path, JOB, **{"foo.bar": 1})
    # The file is at fault where it has the field that is wrong.
    with pytest.raises(ConfigError, match=r"job.yaml, line \d+: foo: no such field"):
        load(tmp_path, f"{JOB}\nfoo: {{bar: 2}}\n", **{"foo.bar": 1})


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the job file .*No such file"):
        load_job(tmp_path / "none.yaml", {}, folder=tmp_path)
    (tmp_path / "large.yaml").write_bytes(b"#" * 2**21)
    with pytest.raises(ConfigError, match="is larger than 1048576 bytes"):
        load_job(tmp_path / "large.yaml", {}, folder=tmp_path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3), ("1.5", 1.5), (".5", 0.5), ("-2E+3", -2000.0), ("7", 7), ("yes", True),
        ("2024-01-01", "2024-01-01"), ("[1, x]", [1, "x"]), ("'1e-3'", "1e-3"), ("e3", "e3"),
        ("1.2.3", "1.2.3"), ("null", None),
    ],
)  # fmt: skip
def test_values_are_what_people_expect(text: str, value: object) -> None:
    parsed = parse_value(text)
    assert (parsed, type(parsed)) == (value, type(value))


def test_no_value_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'\[1' is not a YAML value"):
        parse_value("[1")


def test_what_is_shown_is_a_job_file(tmp_path: Path) -> None:
    spec = load(tmp_path, JOB, model_params={"rate": 1e-7, "words": ["no", "1e3"]})
    assert JobSpec.from_mapping(yaml.safe_load(to_yaml(spec))) == spec
    assert load(tmp_path, to_yaml(spec)) == spec
