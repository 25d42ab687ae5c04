"""What is refused before a job begins: data without a record, a model file that does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backstay.data import open_reader
from backstay.errors import BackstayError, ConfigError, DataUnavailable
from backstay.job.data_scan import first_look
from backstay.job_check.check import Checked, check_job
from backstay.job_spec import DataSpec, JobSpec

MODEL = """\
import numpy

def custom_model(): ...
def loss(labels, predictions): ...
def optimizer(parameters): ...
def feed(records, mode, metadata): ...
def eval_metrics(): return {"auc": "auc"}
"""


def look(*paths: Path | str, kind: str = "auto", **options: Any) -> str:
    data = DataSpec(kind=kind, paths=tuple(map(str, paths)), options=options)
    return first_look("training", data, open_reader(data))


def job(folder: Path, model: str, **fields: Any) -> JobSpec:
    (folder / "model.py").write_text(model)
    (folder / "data.csv").write_text("x\n1\n")
    fields = {"training": str(folder / "data.csv"), **fields}
    document = {"name": "tiny", "model": str(folder / "model.py"), "framework": "torch", **fields}
    return JobSpec.from_mapping(document)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "x,y\n"),
        ("a.csv", "x,y"),
        ("a.csv", ""),
        ("a.jsonl", ""),
        ("a.jsonl", "\n"),
        ("a.recordio", ""),
    ],
)
def test_a_file_without_a_record_is_refused_by_its_name(
    tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=rf"training: there are no records in .*/{name}"):
        look(tmp_path / name)


def test_columns_that_are_named_make_no_record(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("")
    (tmp_path / "b.csv").write_text("x,y\n")
    with pytest.raises(ConfigError, match=r"a\.csv, .*b\.csv"):
        look(tmp_path, kind="csv", columns=["x", "y"], header=True)
    # Without a header, the line is one.
    assert "a.csv" in look(tmp_path, kind="csv", columns=["x", "y"])


def test_a_parquet_file_without_rows_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"x": pyarrow.array([], pyarrow.int64())})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"no records in .*a\.parquet"):
        look(tmp_path / "a.parquet")


def test_a_table_without_rows_is_refused(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    with duckdb.connect(str(tmp_path / "db")) as connection:
        connection.execute("CREATE TABLE clicks (x INTEGER)")
    with pytest.raises(ConfigError, match="no records in clicks"):
        look("clicks", kind="sql", database=str(tmp_path / "db"))


@pytest.mark.parametrize("pattern", ["part-*.csv", "none.csv", "nothing"])
def test_what_matches_nothing_is_named(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "nothing").mkdir()
    why = "the folder is empty" if pattern == "nothing" else "no such file or folder"
    with pytest.raises(DataUnavailable, match=why) as caught:
        look(tmp_path / pattern)
    assert pattern in str(caught.value)


def test_files_without_a_record_beside_others_are_a_warning(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"{number}.csv").write_text("x\n" + "1\n" * (number % 9 == 4))
    warning = look(tmp_path)
    assert warning.startswith("training: no records in ")
    assert "0.csv" in warning
    assert "4.csv" not in warning
    assert "and 3 more; the job goes on without" in warning
    assert not look(tmp_path / "4.csv")


def test_a_damaged_first_record_is_a_record(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1\n")
    assert not look(tmp_path / "a.csv")
    (tmp_path / "a.jsonl").write_text("{\n")
    assert not look(tmp_path / "a.jsonl")


def test_readers_of_the_users_own_are_asked(tmp_path: Path) -> None:
    reader = """
class Reader:
    def __init__(self, count): self.count = count
    def create_shards(self): return [("s", 0, self.count)]
    def read_records(self, task): return iter([])
def custom_data_reader(data_origin, count): return Reader(count)
"""
    for count, said in [(0, "there are no records in s"), ("x", "the custom reader failed")]:
        data = {"kind": "custom", "options": {"count": count}}
        with pytest.raises(ConfigError, match=f"training: {said}"):
            check_job(job(tmp_path, MODEL + reader, training=data))
    data = {"kind": "custom", "options": {"count": 1}}
    assert check_job(job(tmp_path, MODEL + reader, training=data)) == Checked((), {"training": {}})


@pytest.mark.parametrize(
    ("model", "fields", "said"),
    [
        (MODEL.replace("def loss", "def lose"), {}, "has no function 'loss' (is 'lose' meant"),
        ("def custom_model(:\n", {}, 'model.py", line 1\n    def custom_model(:\n'),
        ("import nosuchmodule\n", {}, "No module named 'nosuchmodule'"),
        ("raise RuntimeError('not today')\n", {}, "RuntimeError: not today"),
        (MODEL, {"framework": "auto"}, "neither Paddle nor PyTorch"),
        (
            MODEL,
            {"validation": "v.csv", "early_stop": {"metric": "aucc"}},
            "early_stop.metric: 'aucc' is none of the model file's eval_metrics (auc)",
        ),
        (MODEL, {"progressive": {}}, "progressive.predictions: set it to probabilities or logits"),
        (
            MODEL,
            {"progressive": {"predictions": "logits", "by": "y"}},
            "progressive.by: the training data has no column 'y'; there are x",
        ),
        (
            MODEL,
            {"training": None, "prediction": "p.csv"},
            "output: predictions have nowhere to go",
        ),
    ],
)
def test_a_model_file_that_does_not_fit_is_refused(
    tmp_path: Path, model: str, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_job(job(tmp_path, model, **fields))
    assert said in str(caught.value)
    # No frame of Python's own import stands before it.
    assert "frozen importlib" not in str(caught.value)


def test_every_error_goes_through_json_and_comes_back(tmp_path: Path) -> None:
    from backstay import errors
    from backstay.job_check.process import _answer

    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, BackstayError)
    ]
    assert len(kinds) > 30
    for kind in kinds:
        document = json.loads(json.dumps({"error": kind.__name__, "text": "what is wrong"}))
        with pytest.raises(kind, match="what is wrong"):
            _answer(document)
