"""The pushes of one training task, numbered so that each slot counts each batch once.

Imports the native module and the errors. Sends nothing by itself: the client pushes, and the
native part keeps the numbers, the floor and the lease. How it works, and why a replayed batch
is not counted again, is told in docs/internals/exactly-once.md.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType

from backstay._native import DataClient, PushStream
from backstay.errors import InvalidRequest
from backstay.trainer.table import Table

MAX_TABLES = 64
"""The most tables that one task may push to."""

_MAX_BATCHES = 1 << 48


class TaskStream:
    """The pushes of one training task; made by :meth:`backstay.trainer.Client.task_stream`.

    While it is open (``with``), every update push of the client goes into it, from any thread.
    A push of batch ``b`` to the table with ordinal ``t`` of ``K`` has the number ``b*K + t``,
    whichever client sends it: a batch that is pushed again, by another worker, say, is skipped
    wherever it was applied.

    One failed push ends the attempt: every later one raises the same error, so that no batch
    is counted without one before it. What to do then is to give the task back with
    :attr:`acknowledged`.

    Example:
        >>> stream = client.task_stream(job, 1, task.number, [table], first_batch=task.first_batch)
        >>> with stream:
        ...     for number, batch in batches:
        ...         stream.begin_batch(number)
        ...         client.push_async(table, batch.keys, gradients(batch))
        >>> stream.flush()
        >>> stream.close_on_servers()  # once the job master knows that the task is done
    """

    def __init__(self, owner: TaskStreams, native: PushStream, tables: Sequence[Table]) -> None:
        """Not for users: see :meth:`backstay.trainer.Client.task_stream`."""
        self._owner = owner
        self._native = native
        self._ordinals = {table.id: ordinal for ordinal, table in enumerate(tables)}
        self._names = [table.name for table in tables]

    def __enter__(self) -> TaskStream:
        """Send the client's update pushes into this stream.

        Raises:
            InvalidRequest: Another stream of the client is open.
        """
        self._owner.open(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Send the client's pushes into its own stream again; waits for nothing.

        Without an error the last batch counts as ended. Pushes under way go on: see
        :meth:`flush`.
        """
        self._owner.leave(self)
        if error is None:
            self._native.end_batch()

    def lease_until(self, moment_s: float) -> None:
        """Let pushes leave until then; from any thread.

        A push, or a retry of one, that would leave later waits, at most until its deadline, for
        the next call of this method or for :meth:`revoke`. Without any call there is no limit.

        Args:
            moment_s: A moment of :func:`backstay.trainer.clock_s`; at or before now, pushes wait
                from now on.
        """
        self._native.lease_until(moment_s)

    def begin_batch(self, batch: int) -> None:
        """Number the pushes from here on as those of a batch; the one before it has ended.

        Args:
            batch: Its number in the task, from 0; higher than that of the batch before.

        Raises:
            InvalidRequest: The numbers do not ascend.
            BackstayError: A push of the stream has failed; the same error as there.
        """
        self._native.begin_batch(batch)

    @property
    def acknowledged(self) -> int:
        """Batches of the task that are acknowledged everywhere, those before the first included.

        All batches below this number; never one that has not ended or a push of which failed.
        """
        return self._native.acknowledged()

    def flush(self) -> None:
        """End the batch and wait until all pushes are acknowledged.

        Raises:
            BackstayError: A push has failed; the first failure, the same each time.
        """
        self._native.flush()

    def revoke(self) -> None:
        """Let nothing leave any more; from any thread.

        Pushes under way and later ones raise :class:`backstay.errors.TaskLeaseLost`.
        """
        self._native.revoke()

    def close_on_servers(self) -> None:
        """Have every server forget the stream, once the task is done for good; idempotent.

        From then on all its pushes count as late copies and are skipped, whichever client sends
        them.

        Raises:
            InvalidRequest: A push of the stream failed or was revoked. The worker that completes
                the task closes it.
            ServerUnavailable: A server did not answer within the deadline: call it again.
        """
        self._native.close_on_servers(self._owner.deadline_ms)

    def place(self, table: Table) -> tuple[PushStream, int]:
        """Return the native stream and a table's ordinal in it; for the client.

        Raises:
            InvalidRequest: The table was not named when the stream was made.
        """
        ordinal = self._ordinals.get(table.id)
        if ordinal is None:
            error = (
                f"table {table.name} is not one of this task's, so its pushes have no number: "
                f"name it when the stream is made (now: {', '.join(self._names)})"
            )
            raise InvalidRequest(error)
        return self._native, ordinal


class TaskStreams:
    """The task streams of one client: makes them, and knows which one is open."""

    def __init__(self, native: DataClient, deadline_ms: int) -> None:
        """Make streams of this native client; ``deadline_ms`` is for closing them."""
        self.deadline_ms = deadline_ms
        self._native = native
        self._lock = threading.Lock()
        self._open: TaskStream | None = None

    def make(
        self, name: tuple[int, int, int], tables: Sequence[Table], first_batch: int
    ) -> TaskStream:
        """See :meth:`backstay.trainer.Client.task_stream`; ``name`` is (job, pass, task)."""
        check_name(*name)
        if not 1 <= len(tables) <= MAX_TABLES:
            raise InvalidRequest(f"a task may have 1 to {MAX_TABLES} tables, not {len(tables)}")
        if len({table.id for table in tables}) != len(tables):
            raise InvalidRequest("a table stands twice among those of the task")
        if not 0 <= first_batch < _MAX_BATCHES:
            raise InvalidRequest(f"first_batch is {first_batch}: 0 to {_MAX_BATCHES - 1}")
        native = self._native.task_stream(*name, len(tables), first_batch)
        return TaskStream(self, native, tables)

    def open(self, stream: TaskStream) -> None:
        """Send the client's update pushes into this stream from now on."""
        with self._lock:
            if self._open is not None:
                raise InvalidRequest(
                    "another task stream of this client is open: leave its `with` first, or use "
                    "one client for each task"
                )
            self._open = stream

    def leave(self, stream: TaskStream) -> None:
        """Send the client's update pushes into its own stream again."""
        with self._lock:
            if self._open is stream:
                self._open = None

    def place(self, table: Table) -> tuple[PushStream | None, int]:
        """Return where an update push to a table goes: (stream, ordinal), or None: the client's."""
        stream = self._open
        return (None, 0) if stream is None else stream.place(table)


def check_name(job: int, pass_number: int, task: int) -> tuple[int, int, int]:
    """Return the three, which name a stream.

    Raises:
        InvalidRequest: One is negative or too large.
    """
    # Higher passes are of streams that are no task's: crates/backstay-core/src/stream.rs.
    for what, value, bits in (("job", job, 64), ("pass", pass_number, 31), ("task", task, 32)):
        if not 0 <= value < 1 << bits:
            raise InvalidRequest(f"{what} is {value}: 0 to {(1 << bits) - 1}")
    return job, pass_number, task
