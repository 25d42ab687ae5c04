"""A worker's connection to the servers, with the program on it. After a loss it is made anew.

This module may import the session, the adapters by name, and the audit. It makes no call to the job
master.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from backstay.cluster.directory import TableTerms
from backstay.config import ClientConfig
from backstay.errors import BackstayError
from backstay.job.messages import JobTerms
from backstay.job.model_definition import ModelDefinition
from backstay.job_spec import JobSpec
from backstay.trainer.adapter.session import Session, init
from backstay.trainer.client import Client
from backstay.trainer.model.program import Program, build, framework_of
from backstay.trainer.registration import TrainerName
from backstay.trainer.table import Table
from backstay.trainer.worker.audit import RecordCounter
from backstay.trainer.worker.pace import Pace

__all__ = ["Connection", "connect"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Connection:
    """A connection to the servers, with the program on it.

    Attributes:
        session: The open session. A mode may put a client of its own into it.
        client: The client that moves rows.
        program: The user's model on it.
        counter: Counts records, where the job has an audit.
        tables: All tables that batches push to, in their order.
        incarnation: The cluster's state incarnation once the connection was made: the version of
            the last restore, and the generation. The connection fails if there was a restore since.
    """

    session: Session
    client: Client
    program: Program
    counter: RecordCounter | None
    tables: tuple[Table, ...]
    incarnation: tuple[int, int]

    def has_current_incarnation(self) -> bool:
        """Return whether the cluster is of the same state incarnation still.

        Raises:
            ServerUnavailable: No server answers.
        """
        return _incarnation_of(self.client) == self.incarnation

    def close(self) -> None:
        """Disconnect; a failure that no caller waited for is only logged."""
        try:
            self.session.close()
        except BackstayError as error:
            _LOG.info("closing the connection: %s", error)


def connect(
    spec: JobSpec,
    definition: ModelDefinition,
    endpoints: str | Sequence[str],
    config: ClientConfig | None,
    pace: Pace,
    terms: JobTerms,
    worker_id: str = "",
) -> Connection:
    """Connect, make the program, and create its tables or find those of other workers.

    Of a job that goes on, the first worker of each start sets the tables' settings; a job that
    uses the model of another one changes nothing.

    Dense values are those of the servers: the first worker's, or what became of them.

    Raises:
        ConfigError: The model file is wrong, or the servers do not have what it asks for.
        TableConflict: Another worker made a table with other settings.
        ServerUnavailable: No server answers.
    """
    framework = framework_of(definition.framework(spec.framework))
    if spec.mode.kind in ("async", "bounded"):
        # Other workers change the rows while a batch is computed.
        config = replace(
            config or ClientConfig.load(),
            measure_staleness=True,
            compensation=spec.mode.compensation,
        )
    session = init(
        endpoints,
        trainer_id=0,
        trainers_num=1,
        job=spec.model_from or spec.name,
        config=config,
        trainer=TrainerName(spec.name, worker_id),
    )
    with contextlib.ExitStack() as undo:
        undo.callback(session.close)
        client = session.client
        client.table_terms = (
            TableTerms("keep")
            if spec.model_from
            else TableTerms("update", terms.stream_job, terms.start)
        )
        # It has the methods that adapters use; the session is the one place that is told.
        session.client = pace.stand_before(client)
        program = build(framework, definition, session.client, spec)
        counter = RecordCounter(client, spec.name, terms.stream_job) if spec.audit else None
        names = [*program.tables(), *([counter.table_name] if counter else [])]
        tables = tuple(client.table(name) for name in names)
        incarnation = _incarnation_of(client)
        undo.pop_all()
    return Connection(session, client, program, counter, tables, incarnation)


def _incarnation_of(client: Client) -> tuple[int, int]:
    restore = client.checkpoints.restore_state()
    return restore.version, restore.generation
