"""A job's model on the first records of its data: whether its functions work at all.

One small batch through ``feed``, the model, the loss and the optimizer, by the same calls as in a
worker: tables are made and gradients pushed, on a server in this process. So what servers would
refuse is refused here. A job of ``--local`` has servers only for layers of backstay. Runs the
user's code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from backstay.data import BadRecords, Reader, Shard, read_batch
from backstay.errors import (
    BackstayError,
    ConfigError,
    InvalidRequest,
    LimitExceeded,
    NonFiniteLoss,
    TableConflict,
)
from backstay.job.model_definition import (
    Mode,
    ModelDefinition,
    is_users,
    user_traceback,
)
from backstay.job_check.trial_servers import TrialServers
from backstay.job_spec import JobSpec
from backstay.trainer.adapter.session import set_session_factory
from backstay.trainer.client import Client
from backstay.trainer.model.batches import split_feed
from backstay.trainer.model.program import Program, build, framework_of, predictions_of
from backstay.trainer.modes.gathering import GatheringClient, Piece
from backstay.trainer.modes.geo import GeoClient
from backstay.trainer.modes.pieces import piece_of
from backstay.trainer.worker.scoring import Groups, Scorer, groups_of
from backstay.trainer.worker.task_feed import groups_by

__all__ = ["Trial"]

RECORDS_MAX = 8
MODES: dict[str, Mode] = {
    "training": "training",
    "validation": "evaluation",
    "prediction": "prediction",
}

# What the model asks for, and servers do not do.
REFUSALS = (InvalidRequest, TableConflict, LimitExceeded)

ResultT = TypeVar("ResultT")


class Trial:
    """Tries a job's model file; the model is made once. A context manager.

    Args:
        spec: The job.
        definition: Its model file.
        local: It is to be trained in one process.
    """

    def __init__(self, spec: JobSpec, definition: ModelDefinition, *, local: bool = False) -> None:
        self._spec = spec
        self._definition = definition
        self._local = local
        compensation = "ignore" if local else spec.mode.compensation
        self._servers = TrialServers(spec.model_from or spec.name, compensation)
        self._program: Program | None = None
        self._send: Callable[[], None] = _nothing
        self._scorer: Scorer | None = None
        if spec.progressive is not None:
            self._scorer = Scorer(spec.progressive, definition.metrics)

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: object) -> None:
        self._servers.close()

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
        column = groups_by(self._spec, mode)
        groups: Groups | None = None
        if column:
            groups = self._users(
                f"progressive.by: {column!r} failed on {where}",
                lambda: groups_of(records.column(column)),
            )
        self._users(
            f"the model failed on {where}",
            lambda: self._step(program, mode, (features, labels, groups), len(records)),
        )
        steps = "feed, model, loss and optimizer" if mode == "training" else "feed and model"
        return f"{steps}, on {where}"

    def _made(self) -> Program:
        """Return the program, made the first time."""
        if self._program is None:
            framework = framework_of(self._definition.framework(self._spec.framework))
            # In one process, a layer that asks for servers gets the session then.
            before = set_session_factory(self._servers.session if self._local else None)
            try:
                client = None if self._local else self._connected()
                self._program = self._users(
                    "the model cannot be made",
                    lambda: build(framework, self._definition, client, self._spec),
                )
            finally:
                set_session_factory(before)
        return self._program

    def _connected(self) -> Any:
        """Open the session, with the job's mode before its client, as a worker does."""
        session = self._servers.session()
        mode = self._spec.mode.kind if self._spec.training is not None else "async"
        if mode == "geo":
            front = GeoClient(session.client)
            # It has the methods that adapters use; the session is the one place that is told.
            session.client = cast(Client, front)
            self._send = front.exchange
        elif mode == "sync":
            gathering = GatheringClient(session.client)
            session.client = cast(Client, gathering)
            self._send = lambda: gathering.push_all(gathering.take())
        return session.client

    def _step(
        self, program: Program, mode: Mode, fed: tuple[Any, Any, Groups | None], count: int
    ) -> None:
        features, labels, groups = fed
        if mode != "training":
            predictions_of(program, features, count)
            return
        if self._spec.mode.kind == "sync" and not self._local:
            features, labels = (piece_of(one, Piece(0, count), count) for one in (features, labels))
        _, predictions = program.train_batch(features, labels)
        if self._scorer is not None:
            self._scorer.of(predictions, labels, groups)
        self._send()
        # What the servers say of the pushes.
        program.synchronize()

    def _users(self, what: str, call: Callable[[], ResultT]) -> ResultT:
        """Return what a function of the user's returns; its errors are told with its lines."""
        try:
            return call()
        except NonFiniteLoss as error:
            raise NonFiniteLoss(f"{what}: {error}") from error
        except Exception as error:
            if isinstance(error, BackstayError) and not is_users(error, self._definition.path):
                if isinstance(error, REFUSALS):
                    raise ConfigError(f"{what}: {error}") from error
                raise
            text = user_traceback(error, self._definition.path)
            raise ConfigError(f"{what}:\n{text}") from error


def _nothing() -> None:
    """Send nothing: the optimizer has."""
