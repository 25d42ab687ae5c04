"""The index scan of a job's data: which files or tables there are, and how many records in each.

Done once, when the job begins, and kept in its records: tasks are numbers into it. ``first_look``
only asks whether there is anything at all. Blocking; call them in a thread. Imports the readers;
reads no more than they need to count.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import ModuleType

from backstay.data import BadRecords, Reader, open_reader
from backstay.data.opening import files_of
from backstay.errors import DataChanged
from backstay.job_spec import DataSpec, JobSpec
from backstay.schedule.task_table import TaskTable, cut_data, no_records, shown_places

__all__ = ["first_look", "open_data", "scan"]

# Once one with records is found, no more files than this are looked at.
FILES_LOOKED_AT_MAX = 1000
# Damaged records are counted when the job runs, not here.
UNLIMITED = 2**62

log = logging.getLogger(__name__)


def scan(spec: JobSpec, name: str) -> TaskTable:
    """Return the tasks of one of a job's data.

    Raises:
        ConfigError: An option is wrong, or there are no records.
        DataUnavailable: It cannot be read.
        DataDamaged: It is not of its format.
        LimitExceeded: There are too many tasks.
    """
    table = cut_data(name, open_data(spec, name).shards(), spec)
    log.info("%s data: %d records, %d tasks", name, table.records, len(table))
    return table


def open_data(spec: JobSpec, name: str) -> Reader:
    """Return a reader of one of a job's data; the model file is run only if the reader is in it.

    Raises:
        ConfigError: An option or the model file is wrong.
    """
    data = spec.data[name]
    return open_reader(data, module=_module(spec) if data.kind == "custom" else None)


def first_look(name: str, data: DataSpec, reader: Reader) -> str:
    """Find out whether there are records, without counting them where that costs.

    Of files, the beginning of each is read; tables and readers of the user's own are counted.

    Args:
        name: ``training``, ``validation`` or ``prediction``.
        data: Where they are.
        reader: Of this data.

    Returns:
        A warning that names what has no records beside others that have; empty: none.

    Raises:
        ConfigError: An option is wrong, or there are no records at all.
        DataUnavailable: It cannot be read, or there are no such files.
        DataDamaged: It is not of its format.
    """
    empty, has_records = [], False
    for shard, is_empty in _beginnings(data, reader):
        if is_empty:
            empty.append(shard)
        has_records = has_records or not is_empty
    if not has_records:
        raise no_records(name, empty or data.paths)
    return f"{name}: no records in {shown_places(empty)}; the job goes on without" if empty else ""


def _beginnings(data: DataSpec, reader: Reader) -> Iterator[tuple[str, bool]]:
    """Yield files or tables, and whether each has no records."""
    files = files_of(data)
    if files is None:
        for shard in reader.shards():
            yield shard.name, not shard.records
        return
    found = False
    for number, file in enumerate(files.files()):
        # At a URL each look is a round trip.
        if found and (number >= FILES_LOOKED_AT_MAX or file.system is not None):
            return
        is_empty = not file.size() or not _has_a_record(reader, file.name)
        yield file.name, is_empty
        found = found or not is_empty


def _has_a_record(reader: Reader, shard: str) -> bool:
    try:
        next(iter(reader.read(shard, 0, 1, BadRecords(UNLIMITED, kept=0))), None)
    except DataChanged:
        # It has fewer than the one that was asked for.
        return False
    return True


def _module(spec: JobSpec) -> ModuleType:
    """Load the model file: a custom reader is in it."""
    from backstay.job.model_definition import load

    definition = load(
        spec.model, model_params=spec.model_params, callback_params=spec.callback_params
    )
    return definition.module
