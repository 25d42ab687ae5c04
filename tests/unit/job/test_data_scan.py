"""How a job's data is opened where no worker is: by its master, by an audit."""

from __future__ import annotations

from pathlib import Path

from backstay.job.data_scan import open_data
from backstay.job_spec import DataSpec, JobSpec

MODEL = """
def custom_model(): ...
def loss(labels, predictions): ...
def optimizer(parameters): ...
def feed(records, mode, metadata): ...
def callbacks(rate): return []


def custom_data_reader(data_origin, **options):
    return Numbers()


class Numbers:
    def create_shards(self):
        return {"numbers": (0, 7)}

    def read_records(self, task):
        return iter(range(task.start, task.end))
"""


def test_a_model_file_is_given_all_its_arguments(tmp_path: Path) -> None:
    path = tmp_path / "numbers_model.py"
    path.write_text(MODEL, encoding="utf-8")
    data = DataSpec(kind="custom", paths=("numbers",))
    spec = JobSpec(name="numbers", model=str(path), training=data, callback_params={"rate": 0.1})
    assert [shard.records for shard in open_data(spec, "training").shards()] == [7]
