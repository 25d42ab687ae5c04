"""What a job would do, without doing it: its tasks counted, its model file checked.

Loads the model file, so it runs the file's top level code, and scans the data's index as the master
would. Starts nothing and writes nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from backstay.course.task_table import TaskTable
from backstay.job_spec import JobSpec
from backstay.trainer.model import model_definition
from backstay.trainer.readers import open_reader

__all__ = ["DataPlan", "DryRun", "dry_run"]

COLUMNS_SHOWN_MAX = 50


@dataclass(frozen=True)
class DataPlan:
    """What one of the job's data sets comes to.

    Attributes:
        use: ``training``, ``validation`` or ``prediction``.
        shards: Files or tables.
        records: In all of them, damaged ones included.
        tasks: Of each round over them.
        columns: The first columns; none where records are bytes.
    """

    use: str
    shards: int
    records: int
    tasks: int
    columns: tuple[str, ...]


@dataclass(frozen=True)
class DryRun:
    """What a job would do.

    Attributes:
        framework: ``paddle`` or ``torch``.
        metrics: Names of the model file's metrics.
        has: Its optional parts that are there.
        data: One entry for each data set.
        rounds: How many rounds over which of them.
    """

    framework: str
    metrics: tuple[str, ...]
    has: tuple[str, ...]
    data: tuple[DataPlan, ...]
    rounds: dict[str, int]

    def to_mapping(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)


def dry_run(spec: JobSpec) -> DryRun:
    """Find out what a job would do.

    Raises:
        ConfigError: The model file or an option of the data is wrong.
        DataError: The data cannot be read.
        InvalidRequest: A data set has the same shard twice.
        LimitExceeded: There would be too many tasks.
    """
    definition = model_definition.load(
        spec.model, model_params=spec.model_params, callback_params=spec.callback_params
    )
    plans = []
    for use in ("training", "validation", "prediction"):
        data = getattr(spec, use)
        if data is None:
            continue
        reader = open_reader(data, module=definition.module)
        shards = list(reader.shards())
        table = TaskTable.from_shards(shards, spec.records_per_task)
        columns = reader.metadata.column_names[:COLUMNS_SHOWN_MAX]
        plans.append(DataPlan(use, len(shards), table.records, len(table), columns))
    optional = {
        "callbacks": hasattr(definition.module, "callbacks"),
        "custom_data_reader": definition.custom_data_reader is not None,
        "PredictionOutputsProcessor": definition.prediction_outputs_processor is not None,
    }
    return DryRun(
        framework=definition.framework(spec.framework),
        metrics=tuple(definition.metrics),
        has=tuple(name for name, is_there in optional.items() if is_there),
        data=tuple(plans),
        rounds=_rounds(spec),
    )


def _rounds(spec: JobSpec) -> dict[str, int]:
    """Return how many rounds of each kind there are at most, as far as that is known before."""
    if spec.kind != "training":
        return {spec.kind: 1}
    rounds = {"training": spec.epochs}
    if spec.validation is not None and not spec.evaluation_every_steps:
        rounds["evaluation"] = spec.epochs
    return rounds
