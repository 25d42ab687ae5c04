"""A job's model on the first records of its data: whether its functions work at all.

One small batch through ``feed``, the model, the loss and the optimizer, in this process and without
servers; with layers of backstay, whose rows are on servers, through ``feed`` only. Runs the user's
code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from backstay.errors import BackstayError, ConfigError, NonFiniteLoss
from backstay.job_spec import JobSpec
from backstay.trainer.adapter.session import Session, set_session_factory
from backstay.trainer.model.frameworks import Program, adapter, predictions_of, split_feed
from backstay.trainer.model.model_definition import (
    Mode,
    ModelDefinition,
    is_users,
    user_traceback,
)
from backstay.trainer.readers import BadRecords, Reader, Shard, read_batch

__all__ = ["Trial"]

RECORDS_MAX = 8
MODES: dict[str, Mode] = {
    "training": "training",
    "validation": "evaluation",
    "prediction": "prediction",
}

ResultT = TypeVar("ResultT")


class _NeedsServers(Exception):
    """A layer of the model asks for servers."""


class Trial:
    """Tries a job's model file; the model is made once.

    Args:
        spec: The job.
        definition: Its model file.
    """

    def __init__(self, spec: JobSpec, definition: ModelDefinition) -> None:
        self._spec = spec
        self._definition = definition
        self._is_built = False
        self._program: Program | None = None

    def on(self, use: str, reader: Reader, shard: Shard) -> str:
        """Try one of the job's data sets.

        Args:
            use: ``training``, ``validation`` or ``prediction``.
            reader: Of this data.
            shard: One that has records; its first ones are taken.

        Returns:
            What was done, for people.

        Raises:
            ConfigError: A function of the model file failed, or answered what it should not.
            NonFiniteLoss: The loss is NaN or infinite.
            DataError: The records cannot be read.
        """
        count = min(RECORDS_MAX, shard.records, self._spec.batch_size)
        where = f"the first {count} records of {shard.name}"
        bad = BadRecords(self._spec.max_bad_records)
        records = self._users(
            f"reading failed on {where}", lambda: read_batch(reader, shard.name, 0, count, bad)
        )
        if not len(records):
            return f"nothing: {where} are damaged"
        mode = MODES[use]
        features, labels = self._users(
            f"feed failed on {where}",
            lambda: split_feed(self._definition.feed(records, mode, reader.metadata), mode),
        )
        program = self._made()
        if program is None:
            return f"feed, on {where}; the model needs servers and was not tried"
        self._users(
            f"the model failed on {where}",
            lambda: _step(program, mode, features, labels, len(records)),
        )
        steps = "feed, model, loss and optimizer" if mode == "training" else "feed and model"
        return f"{steps}, on {where}"

    def _made(self) -> Program | None:
        """Return the program, made the first time; None: it needs servers."""
        if not self._is_built:
            self._is_built = True
            framework = adapter(self._definition.framework(self._spec.framework))
            before = set_session_factory(_refuse)
            try:
                self._program = self._users(
                    "the model cannot be made",
                    lambda: framework.build(self._definition, None, self._spec),
                )
            except _NeedsServers:
                self._program = None
            finally:
                set_session_factory(before)
        return self._program

    def _users(self, what: str, call: Callable[[], ResultT]) -> ResultT:
        """Return what a function of the user's returns; its errors are told with its lines."""
        try:
            return call()
        except _NeedsServers:
            raise
        except NonFiniteLoss as error:
            raise NonFiniteLoss(f"{what}: {error}") from error
        except Exception as error:
            if isinstance(error, BackstayError) and not is_users(error, self._definition.path):
                raise
            text = user_traceback(error, self._definition.path)
            raise ConfigError(f"{what}:\n{text}") from error


def _refuse() -> Session:
    raise _NeedsServers


def _step(program: Program, mode: Mode, features: Any, labels: Any, count: int) -> None:
    if mode == "training":
        program.train_batch(features, labels)
        return
    predictions_of(program, features, count)
