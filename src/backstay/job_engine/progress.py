"""A job's progress as a checkpoint keeps it: the schedule, and the tasks done of its open rounds.

It is taken before the checkpoint begins. What is done by then is in the model that is saved; what
is done while it is written is in some slots, and is done again after a restore: slots skip what
they have. Imports ``job_engine`` and ``json_fields``; does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from backstay.consensus.json_fields import dump, fields_of, parse_fields, strings_of
from backstay.errors import InvalidRequest
from backstay.job_engine.task_bits import TaskBits
from backstay.job_engine.values import DeadLetter
from backstay.schedule.rounds import RoundId

__all__ = ["JobProgress", "RoundProgress"]


@dataclass(frozen=True)
class RoundProgress:
    """How far a round is.

    Attributes:
        size: Number of its tasks.
        table_digest: ``TaskTable.digest()`` of the data it goes over.
        done: Chunk number -> tasks done, ``TaskBits.chunks()``.
        dead_letters: Its dead-lettered tasks.
    """

    size: int
    table_digest: str
    done: Mapping[int, str] = field(default_factory=dict)
    dead_letters: tuple[DeadLetter, ...] = ()

    def done_bits(self) -> TaskBits:
        """Return the tasks done; raises InvalidRequest if they do not fit ``size``."""
        return TaskBits.from_chunks(self.size, self.done)


@dataclass(frozen=True)
class JobProgress:
    """How far a job is.

    Attributes:
        job_uid: Which job.
        schedule: ``Schedule.to_json()``.
        rounds: Those that are open or have dead-lettered tasks. Evaluations are left out: they are
            begun again.
        figures: Sums over the job's life, such as of examples.
        inexact: Since when and why records may count never or twice; empty: each counts once.
        damaged: Damaged records of the data, as ``DamagedRecords.learn`` takes them.
        passes_begun: Training passes of which a task was given out, or may have been.
    """

    job_uid: str
    schedule: str
    rounds: Mapping[RoundId, RoundProgress]
    figures: Mapping[str, int] = field(default_factory=dict)
    inexact: str = ""
    damaged: Mapping[str, str] = field(default_factory=dict)
    passes_begun: int = 0

    def to_json(self) -> str:
        """Return the progress as JSON."""
        return dump(
            {
                "job_uid": self.job_uid,
                "schedule": self.schedule,
                "figures": dict(self.figures),
                "inexact": self.inexact,
                "damaged": dict(self.damaged),
                "passes_begun": self.passes_begun,
                "rounds": {
                    str(round_id): {
                        "size": progress.size,
                        "table_digest": progress.table_digest,
                        "done": {str(number): text for number, text in progress.done.items()},
                        "dead_letters": [task.to_json() for task in progress.dead_letters],
                    }
                    for round_id, progress in self.rounds.items()
                },
            }
        )

    @classmethod
    def from_json(cls, text: str) -> JobProgress:
        """Return the progress that ``to_json`` wrote.

        Raises:
            InvalidRequest: It is no such text.
        """
        what = "job progress"
        fields = parse_fields(
            what,
            text,
            {
                "job_uid": str,
                "schedule": str,
                "figures": dict,
                "inexact": str,
                "damaged": dict,
                "passes_begun": int,
                "rounds": dict,
            },
        )
        rounds: dict[RoundId, RoundProgress] = {}
        for name, value in fields["rounds"].items():
            entry = fields_of(
                f"{what}: {name}",
                value,
                {"size": int, "table_digest": str, "done": dict, "dead_letters": list},
            )
            done: dict[int, str] = {}
            for number, chunk in entry["done"].items():
                if not number.isdecimal() or type(chunk) is not str:
                    raise InvalidRequest(f"{what}: {name}: a chunk of done is not number: hex")
                done[int(number)] = chunk
            dead_letters = tuple(DeadLetter.from_json(task) for task in entry["dead_letters"])
            progress = RoundProgress(entry["size"], entry["table_digest"], done, dead_letters)
            progress.done_bits()
            rounds[RoundId.parse(name)] = progress
        figures = fields["figures"]
        if not set(map(type, figures.values())) <= {int}:
            raise InvalidRequest(f"{what}: figures holds more than integers")
        damaged = fields["damaged"]
        strings_of(what, "damaged", list(damaged.values()))
        return cls(
            fields["job_uid"],
            fields["schedule"],
            rounds,
            figures,
            fields["inexact"],
            damaged,
            fields["passes_begun"],
        )
