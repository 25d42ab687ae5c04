"""``trainers/<id>``: a trainer that is alive, as a node keeps its record on its behalf.

This module imports ``backstay.errors`` and ``json_record``; it knows no clock, no network
and no randomness.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from backstay.errors import InvalidRequest
from backstay.json_record import NUMBER_MAX, JsonRecord, check_times

__all__ = ["TrainerRecord"]

_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}")
TEXT_MAX = 255


@dataclass(frozen=True)
class TrainerRecord(JsonRecord, what="trainer", names={"trainer_id": "id"}):
    """A trainer; bound to the lease of the node that hears from it.

    Attributes:
        trainer_id: Unique in the cluster; ``id`` in the JSON form.
        host: The machine, as it names itself.
        address: ``host:port`` that its calls to the node come from.
        pid: Its process id.
        job: The job that it works for; empty for none.
        worker: The job's worker; empty for a loop of one's own.
        start_time: When it began, by its own clock; seconds since the epoch.
        last_push: When its last acknowledged push was, to a few seconds, by the node's clock;
            0 for none yet. Seconds since the epoch.
        pushes: Its acknowledged pushes at that time.
        node: Id of the node that hears from it.
    """

    trainer_id: str
    host: str
    address: str
    pid: int
    job: str
    worker: str
    status: Literal["up"] = field(default="up", kw_only=True)
    start_time: float
    last_push: float
    pushes: int
    node: str

    def __post_init__(self) -> None:
        """Refuse a record that cannot be, or that would take too much room."""
        if not _ID.fullmatch(self.trainer_id):
            raise InvalidRequest(
                f"trainer: id {self.trainer_id[:200]!r} is not 1 to 128 of A-Z a-z 0-9 _ . -"
            )
        for name in ("host", "address", "job", "worker", "node"):
            if len(getattr(self, name)) > TEXT_MAX:
                raise InvalidRequest(f"trainer: {name} has more than {TEXT_MAX} characters")
        if not (0 <= self.pid <= NUMBER_MAX and 0 <= self.pushes <= NUMBER_MAX):
            raise InvalidRequest(f"trainer: pid {self.pid} or pushes {self.pushes} is no count")
        check_times("trainer", start_time=self.start_time, last_push=self.last_push)
