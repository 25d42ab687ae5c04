"""The records of a job: what it is, who its master is, where it stands, who holds what.

Values, strict about their JSON form, like those of ``consensus.records``. All lie below
``jobs/<job>/`` and are written by the job's master alone, each write under the condition that its
``master`` key is the one it created. Which tasks are done is kept as bitmaps; the shards of the
data in the form of ``master.core.task_table``. No clock, no I/O.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from backstay.consensus.json_fields import (
    dump,
    fields_of,
    parse_fields,
    strings_of,
    whole_numbers_of,
)
from backstay.errors import InvalidRequest

__all__ = [
    "DONE_CHUNK_TASKS",
    "HeldRecord",
    "JobNameRecord",
    "JobSpecRecord",
    "JobStateRecord",
    "JournalRecord",
    "MasterRecord",
    "ParkedRecord",
    "RunState",
    "bitmap_from_text",
    "bitmap_to_text",
    "stream_job_of",
]

RunState = Literal["running", "stopping", "done", "stopped", "failed"]
RUN_STATES: tuple[RunState, ...] = get_args(RunState)
# Tasks in one record of ``done/``: 1 KiB of text.
DONE_CHUNK_TASKS = 4096


def stream_job_of(uid: str) -> int:
    """Return the first part of the ids of a job's streams: 63 bits, never 0."""
    digest = hashlib.blake2b(uid.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 1) or 1


def bitmap_to_text(bits: bytes) -> str:
    """Return a part of a bitmap as its record keeps it: hex; bit i of byte i // 8 is task i."""
    return bits.hex()


def bitmap_from_text(text: str) -> bytes:
    """Return the part of a bitmap that ``bitmap_to_text`` gave.

    Raises:
        InvalidRequest: It is no such text.
    """
    try:
        bits = bytes.fromhex(text)
    except ValueError as error:
        raise InvalidRequest("bitmap of tasks: not hex digits") from error
    if len(bits) > DONE_CHUNK_TASKS // 8:
        raise InvalidRequest(f"bitmap of tasks: {len(bits)} bytes; at most {DONE_CHUNK_TASKS // 8}")
    return bits


@dataclass(frozen=True)
class JobNameRecord:
    """``jobs/@/<job>``: there is a job of that name.

    Attributes:
        uid: Which one.
    """

    uid: str

    def to_json(self) -> str:
        """Return the record as the text that the coordination store keeps."""
        return dump({"uid": self.uid})

    @classmethod
    def from_json(cls, text: str) -> JobNameRecord:
        """Return the record that ``to_json`` gave.

        Raises:
            InvalidRequest: It is not such a text.
        """
        return cls(**parse_fields("job name", text, {"uid": str}))


@dataclass(frozen=True)
class JobSpecRecord:
    """``spec``: what the job is; written once, and again where settings that may change do.

    Attributes:
        uid: What tells it from others of its name.
        created_ms: Unix time.
        spec: The spec as ``backstay.job_spec`` writes it.
    """

    uid: str
    created_ms: int
    spec: str

    def to_json(self) -> str:
        """Return the record as the text that the coordination store keeps."""
        return dump({"uid": self.uid, "created_ms": self.created_ms, "spec": self.spec})

    @classmethod
    def from_json(cls, text: str) -> JobSpecRecord:
        """Return the record that ``to_json`` gave.

        Raises:
            InvalidRequest: It is not such a text.
        """
        return cls(**parse_fields("job spec", text, {"uid": str, "created_ms": int, "spec": str}))


@dataclass(frozen=True)
class MasterRecord:
    """``master``: the process that is the job's master; bound to its lease.

    Attributes:
        address: ``host:port`` of its gRPC services.
        instance: Of the process.
        host: Its machine, for people.
        pid: Its process id there.
    """

    address: str
    instance: int
    host: str
    pid: int

    def to_json(self) -> str:
        """Return the record as the text that the coordination store keeps."""
        return dump(
            {
                "address": self.address,
                "instance": self.instance,
                "host": self.host,
                "pid": self.pid,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> MasterRecord:
        """Return the record that ``to_json`` gave.

        Raises:
            InvalidRequest: It is not such a text.
        """
        kinds: Mapping[str, type] = {"address": str, "instance": int, "host": str, "pid": int}
        return cls(**parse_fields("job master", text, kinds))


@dataclass(frozen=True)
class JournalRecord:
    """``journal``: the last transaction of a master.

    Each transaction writes it and compares its revision: one whose outcome was unknown cannot
    take effect behind a later one.

    Attributes:
        instance: The master.
        number: 1, 2, ... of its transactions.
    """

    instance: int
    number: int

    def to_json(self) -> str:
        """Return the record as the text that the coordination store keeps."""
        return dump({"instance": self.instance, "number": self.number})

    @classmethod
    def from_json(cls, text: str) -> JournalRecord:
        """Return the record that ``to_json`` gave.

        Raises:
            InvalidRequest: It is not such a text.
        """
        return cls(**parse_fields("job journal", text, {"instance": int, "number": int}))


@dataclass(frozen=True)
class JobStateRecord:
    """``state``: where the job stands, but for the tasks.

    Attributes:
        state: ``running``, ``stopping``, ``done``, ``stopped`` or ``failed``.
        reason: Why, if it does not run.
        starts: How often a master took the job over.
        course: Which round it is at, as ``master.core.course`` writes it.
        tables: Names of the job's tables, in order; empty: not declared yet.
        workers: How many are wanted.
        restore_version: Which restore of the cluster the progress goes with; 0: none.
        checkpoint: The newest checkpoint of the job; empty: none.
        figures: Sums for people: ``examples``, ``steps``, ``bad_records``, ...
        evaluations: The last evaluations: objects with ``round``, ``steps``, ``records`` and
            ``metrics``.
    """

    state: RunState
    reason: str = ""
    starts: int = 0
    course: Mapping[str, Any] = field(default_factory=dict)
    tables: tuple[str, ...] = ()
    workers: int = 0
    restore_version: int = 0
    checkpoint: str = ""
    figures: Mapping[str, int] = field(default_factory=dict)
    evaluations: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        """Refuse a state that is none."""
        if self.state not in RUN_STATES:
            raise InvalidRequest(f"job state: unknown state {self.state!r}")

    def to_json(self) -> str:
        """Return the record as the text that the coordination store keeps."""
        return dump(
            {
                "state": self.state,
                "reason": self.reason,
                "starts": self.starts,
                "course": dict(self.course),
                "tables": list(self.tables),
                "workers": self.workers,
                "restore_version": self.restore_version,
                "checkpoint": self.checkpoint,
                "figures": dict(self.figures),
                "evaluations": [dict(each) for each in self.evaluations],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> JobStateRecord:
        """Return the record that ``to_json`` gave.

        Raises:
            InvalidRequest: It is not such a text.
        """
        values = parse_fields("job state", text, _STATE_FIELDS)
        values["tables"] = tuple(strings_of("job state", "tables", values["tables"]))
        whole_numbers_of("job state", "figures", list(values["figures"].values()))
        if not all(isinstance(each, dict) for each in values["evaluations"]):
            raise InvalidRequest("job state: evaluations holds more than objects")
        values["evaluations"] = tuple(values["evaluations"])
        return cls(**values)


@dataclass(frozen=True)
class HeldRecord:
    """``held/<worker>``: what a worker holds, and which streams it has yet to close.

    Attributes:
        instance: Of its process.
        host: Its machine.
        pid: Its process id there.
        holds: (round, task, attempt) for each hold, the round as ``training-1``.
        closing: (pass, task) of tasks that it completed; their streams are open still.
    """

    instance: int
    host: str
    pid: int
    holds: tuple[tuple[str, int, int], ...] = ()
    closing: tuple[tuple[int, int], ...] = ()

    def to_json(self) -> str:
        """Return the record as the text that the coordination store keeps."""
        return dump(
            {
                "instance": self.instance,
                "host": self.host,
                "pid": self.pid,
                "holds": [
                    {"round": name, "task": task, "attempt": attempt}
                    for name, task, attempt in self.holds
                ],
                "closing": [{"pass": number, "task": task} for number, task in self.closing],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> HeldRecord:
        """Return the record that ``to_json`` gave.

        Raises:
            InvalidRequest: It is not such a text.
        """
        values = parse_fields("job hold", text, _HELD_FIELDS)
        holds = [fields_of("job hold", one, _HOLD_FIELDS) for one in values.pop("holds")]
        closing = [fields_of("job hold", one, _CLOSING_FIELDS) for one in values.pop("closing")]
        return cls(
            holds=tuple((one["round"], one["task"], one["attempt"]) for one in holds),
            closing=tuple((one["pass"], one["task"]) for one in closing),
            **values,
        )


@dataclass(frozen=True)
class ParkedRecord:
    """``parked/<round>-<task>``: a task that failed more often than it may.

    Attributes:
        tries: How often it was tried.
        error: Of the last try.
        worker: Who tried last.
        first_record: Of those concerned, as an offset within the task.
        last_record: The last one.
        bad_records: (file, offset, reason) of damaged ones.
    """

    tries: int
    error: str
    worker: str
    first_record: int = 0
    last_record: int = 0
    bad_records: tuple[tuple[str, int, str], ...] = ()

    def to_json(self) -> str:
        """Return the record as the text that the coordination store keeps."""
        return dump(
            {
                "tries": self.tries,
                "error": self.error,
                "worker": self.worker,
                "first_record": self.first_record,
                "last_record": self.last_record,
                "bad_records": [
                    {"file": file, "offset": offset, "reason": reason}
                    for file, offset, reason in self.bad_records
                ],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> ParkedRecord:
        """Return the record that ``to_json`` gave.

        Raises:
            InvalidRequest: It is not such a text.
        """
        values = parse_fields("parked task", text, _PARKED_FIELDS)
        bad = [fields_of("parked task", one, _BAD_FIELDS) for one in values.pop("bad_records")]
        return cls(
            bad_records=tuple((one["file"], one["offset"], one["reason"]) for one in bad), **values
        )


_STATE_FIELDS: Mapping[str, type] = {
    "state": str,
    "reason": str,
    "starts": int,
    "course": dict,
    "tables": list,
    "workers": int,
    "restore_version": int,
    "checkpoint": str,
    "figures": dict,
    "evaluations": list,
}
_HELD_FIELDS: Mapping[str, type] = {
    "instance": int,
    "host": str,
    "pid": int,
    "holds": list,
    "closing": list,
}
_HOLD_FIELDS: Mapping[str, type] = {"round": str, "task": int, "attempt": int}
_CLOSING_FIELDS: Mapping[str, type] = {"pass": int, "task": int}
_PARKED_FIELDS: Mapping[str, type] = {
    "tries": int,
    "error": str,
    "worker": str,
    "first_record": int,
    "last_record": int,
    "bad_records": list,
}
_BAD_FIELDS: Mapping[str, type] = {"file": str, "offset": int, "reason": str}
