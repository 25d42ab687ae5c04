"""What a job would do, without doing it: its tasks counted, its model tried on a few records.

Loads the model file, so it runs the file's code, and scans the data's index as the job master
would. Starts nothing and leaves no file; for a process of its own (``backstay.job_check.process``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from backstay.data import open_reader
from backstay.data.opening import open_source
from backstay.job.model_definition import ModelDefinition
from backstay.job_check.check import check_data, check_folders, load_definition
from backstay.job_check.trial import Trial
from backstay.job_spec import DataSpec, JobSpec
from backstay.schedule.task_table import cut_data

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
        tried: What was done with its first records.
    """

    use: str
    shards: int
    records: int
    tasks: int
    columns: tuple[str, ...]
    tried: str


@dataclass(frozen=True)
class DryRun:
    """What a job would do.

    Attributes:
        framework: ``paddle`` or ``torch``.
        metrics: Names of the model file's metrics.
        has: Its optional parts that are there.
        data: One entry for each data set.
        rounds: How many rounds over which of them.
        warnings: About the data.
    """

    framework: str
    metrics: tuple[str, ...]
    has: tuple[str, ...]
    data: tuple[DataPlan, ...]
    rounds: dict[str, int]
    warnings: tuple[str, ...]

    @classmethod
    def from_mapping(cls, document: Mapping[str, Any]) -> DryRun:
        """Return what ``to_mapping`` wrote."""
        plans = [DataPlan(**{**one, "columns": tuple(one["columns"])}) for one in document["data"]]
        lists = {name: tuple(document[name]) for name in ("metrics", "has", "warnings")}
        return cls(**{**document, **lists, "data": tuple(plans)})

    def to_mapping(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)


def dry_run(spec: JobSpec, *, local: bool = False) -> DryRun:
    """Find out what a job would do.

    Args:
        spec: The job.
        local: It is to be trained in one process.

    Raises:
        ConfigError: The model file, a folder, an option of the data or the data is wrong, or its
            functions fail on the first records, or ask for what the servers do not have.
        NonFiniteLoss: The loss of the first records is.
        DataError: The data cannot be read.
        InvalidRequest: A data set has the same shard twice.
        LimitExceeded: There would be too many tasks.
    """
    check_folders(spec)
    definition = load_definition(spec)
    warnings = check_data(spec, definition)
    with Trial(spec, definition, local=local) as trial:
        plans = [_tried(use, spec, definition, trial) for use in spec.data]
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
        warnings=tuple(warnings),
    )


def _tried(use: str, spec: JobSpec, definition: ModelDefinition, trial: Trial) -> DataPlan:
    """Count one of the job's data sets, and try the model on its first records."""
    reader = open_reader(spec.data[use], module=definition.module, grows=spec.grows(use))
    shards = list(reader.shards())
    first = next((shard for shard in shards if shard.records), None)
    records = tasks = 0
    if first is not None or not spec.grows(use):
        table = cut_data(use, shards, spec)
        records, tasks = table.records, len(table)
    else:
        # A job that begins with what comes next is tried on what came before.
        data = spec.data[use]
        earlier = replace(data, options={**data.options, "start": "earliest"})
        reader = open_reader(earlier, module=definition.module, grows=True)
        first = next((shard for shard in reader.shards() if shard.records), None)
    if first is None:
        return DataPlan(use, len(shards), 0, 0, (), f"nothing: {_no_records(spec.data[use])}")
    columns = reader.metadata.column_names[:COLUMNS_SHOWN_MAX]
    tried = trial.on(use, reader, first)
    return DataPlan(use, len(shards), records, tasks, columns, tried)


def _no_records(data: DataSpec) -> str:
    """Return why data without an end have no records yet."""
    source = open_source(data)
    try:
        return source.look(source.start()).trouble or "there are no records yet"
    finally:
        source.close()


def _rounds(spec: JobSpec) -> dict[str, int]:
    """Return how many rounds of each kind there are at most, as far as that is known before."""
    if spec.kind != "training":
        return {spec.kind: 1}
    if spec.is_stream:
        # As many periods as come, and evaluations.
        return {}
    rounds = {"training": spec.epochs}
    if spec.validation is not None and not spec.evaluation_every_steps:
        rounds["evaluation"] = spec.epochs
    return rounds
