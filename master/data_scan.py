"""The index scan of a job's data: which files or tables there are, and how many records in each.

Done once, when the job begins, and kept in its records: tasks are numbers into it. Blocking; call
it in a thread. Imports the readers; reads no more than they need to count.
"""

from __future__ import annotations

import logging
from types import ModuleType

from backstay.course.task_table import TaskTable
from backstay.errors import ConfigError
from backstay.job_spec import DataSpec, JobSpec
from backstay.trainer.readers import open_reader

__all__ = ["DATA", "data_specs", "scan"]

DATA = ("training", "validation", "prediction")

log = logging.getLogger(__name__)


def data_specs(spec: JobSpec) -> dict[str, DataSpec]:
    """Return the data that a job has, by name."""
    return {name: data for name in DATA if (data := getattr(spec, name)) is not None}


def scan(spec: JobSpec, name: str) -> TaskTable:
    """Return the tasks of one of a job's data.

    Raises:
        ConfigError: An option is wrong, or there are no records.
        DataUnavailable: It cannot be read.
        DataDamaged: It is not of its format.
        LimitExceeded: There are too many tasks.
    """
    data = data_specs(spec)[name]
    reader = open_reader(data, module=_module(spec) if data.kind == "custom" else None)
    table = TaskTable.from_shards(reader.shards(), spec.records_per_task)
    if not len(table):
        raise ConfigError(f"{name}: no records in {', '.join(data.paths) or 'the custom reader'}")
    log.info("%s data: %d records, %d tasks", name, table.records, len(table))
    return table


def _module(spec: JobSpec) -> ModuleType:
    """Load the model file: a custom reader is in it."""
    from backstay.trainer.model.model_definition import load

    definition = load(
        spec.model, model_params=spec.model_params, callback_params=spec.callback_params
    )
    return definition.module
