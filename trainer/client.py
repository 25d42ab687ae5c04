"""The client of a cluster: tables, pulls and pushes, for any framework.

Membership and tables travel over gRPC (:mod:`backstay.cluster.directory`); keys and rows go
through the native data plane, with the GIL released. Imports no framework and nothing of
the server's.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, NamedTuple

import numpy as np

from backstay._native import KeyPlan, PushRequest
from backstay.cluster.checkpoints import Checkpoints
from backstay.cluster.directory import ClusterInfo, Directory, TableTerms
from backstay.cluster.upkeep import Expired, Thresholds, check_period, decay_now, expire_now
from backstay.cluster.watch import ClusterWatch, ProgressHook, made_data_plane
from backstay.config import ClientConfig
from backstay.errors import ClosedError, InvalidRequest
from backstay.tables import AdaptiveRevision, Compensation, Sparse, TableSpec
from backstay.trainer.arrays import ArrayLike, Rows, as_counts, as_keys, as_rows, output
from backstay.trainer.pending import Pending
from backstay.trainer.push_steps import PushSteps
from backstay.trainer.registration import NO_JOB, TrainerName, TrainerRegistration
from backstay.trainer.table import KeyBatch, Table
from backstay.trainer.task_stream import TaskStream, TaskStreams, check_name

log = logging.getLogger(__name__)

_open_clients: weakref.WeakSet[Client] = weakref.WeakSet()


@atexit.register
def _end_open_clients() -> None:
    """End the threads of clients that were not closed: they may not outlive the interpreter."""
    for client in list(_open_clients):
        client._end_threads()


PushKind = Literal["update", "assign", "assign_if_absent", "delete"]


class _Counts(NamedTuple):
    """How often the keys of a push were shown and clicked, [size of the batch]; None: not told."""

    shows: Rows | None = None
    clicks: Rows | None = None


NOT_TOLD = _Counts()


@dataclass(frozen=True)
class ClientStats:
    """What a client has done since it was made.

    Attributes:
        pulls: Pulls answered.
        keys_pulled: Different keys of those pulls.
        pushes_acknowledged: Pushes that every server concerned has applied.
        keys_pushed: Different keys of those pushes.
        retries: Requests sent again because no answer came or a slot was not there.
        failovers: Requests, or parts of them, that went to another server than before.
        waits: Calls that had to wait for a server or for a newer routing.
        stale_slots: Slots of those pushes of which it is known how stale the push was there.
        staleness_sum: All of that together; over ``stale_slots``, the mean staleness.
        staleness_max: The highest.
        staleness_buckets: How many of ``stale_slots`` belong to pushes of which mean staleness:
            bucket 0 counts those of less than 1, bucket ``n`` those of 2^(n-1) to less than 2^n.
        staleness_unknown: Slots of pushes of which it is not known, such as after a restore.
    """

    pulls: int
    keys_pulled: int
    pushes_acknowledged: int
    keys_pushed: int
    retries: int
    failovers: int
    waits: int
    stale_slots: int
    staleness_sum: int
    staleness_max: int
    staleness_buckets: tuple[int, ...]
    staleness_unknown: int


class Client:
    """A trainer's connection to a cluster.

    Safe to use from many threads. A push is applied at most once however often it is sent
    again; see :class:`backstay.errors.OutcomeUnknown` for the one case in which it is not
    known whether it was.

    Example:
        >>> with Client("127.0.0.1:7000") as client:
        ...     table = client.create_table(TableSpec.sparse("emb", dim=16))
        ...     rows = client.pull(table, np.array([7, 42, 7]))
        ...     client.push(table, np.array([7, 42, 7]), gradients)
    """

    def __init__(
        self,
        endpoint: str | Sequence[str],
        *,
        config: ClientConfig | None = None,
        progress: ProgressHook | None = None,
        trainer: TrainerName | None = NO_JOB,
    ) -> None:
        """Connect.

        Args:
            endpoint: Control address ``host:port`` of any one pserver, or several to try in turn.
            config: Settings; by default from the file that ``BACKSTAY_CONFIG`` names and the
                environment (``BACKSTAY_*``).
            progress: Called with a line of text when a call has waited for a second, then every
                five, and when it goes on; from a thread of the client. The log says the same.
            trainer: What this trainer works for, as ``pserverctl trainers`` shows it; None: it is
                no trainer, and does not register.

        Raises:
            NeverReached: None of the endpoints answered within ``first_contact_timeout_ms``.
            ServerUnavailable: A server of the cluster did not answer within the deadline.
            Unauthenticated: The token is missing or wrong.
            ConfigError: A setting is wrong.
        """
        self._config = config if config is not None else ClientConfig.load()
        self._directory = self._directory_of(endpoint, self._config)
        try:
            info = self._directory.first_contact()
            self._native = made_data_plane(self._config, info)
            self._watch = ClusterWatch(self._native, self._directory, info, progress)
            self._watch.start()
            try:
                # Every master now, and not at its first use: a wrong address or token shows at
                # once.
                self._native.connect(self._config.deadline_ms)
            except BaseException:
                self._watch.close()
                raise
        except BaseException:
            self._directory.close()
            raise
        self.table_terms = TableTerms("update" if self._config.update_settings else "refuse")
        # What became of other settings that were asked for, in words.
        self.table_notes: list[str] = []
        self.push_steps = PushSteps()
        self._tables: dict[str, Table] = {}
        self._dense_plans: dict[int, KeyPlan] = {}
        self._lock = threading.Lock()
        self._tasks = TaskStreams(self._native, self._config.deadline_ms)
        self._registration: TrainerRegistration | None = None
        if trainer is not None:
            native = self._native
            self._registration = TrainerRegistration(
                self._directory, lambda: native.stats()["pushes_acknowledged"], trainer
            )
            self._registration.start()
        self._closed = False
        _open_clients.add(self)

    def _directory_of(self, endpoint: str | Sequence[str], config: ClientConfig) -> Directory:
        """Return what is asked for members and tables; a trial of a model has its own."""
        return Directory(endpoint, config)

    # -- tables ---------------------------------------------------------------------------

    @property
    def default_compensation(self) -> Compensation:
        """What tables of layers and optimizers do about stale gradients."""
        return "scale" if self._config.compensation == "scale" else "ignore"

    def create_table(self, spec: TableSpec, *, update_settings: bool | None = None) -> Table:
        """Create a table on all servers; one with the same settings is left as it is.

        Args:
            spec: What it shall be.
            update_settings: Give a table that is there the settings of this description: those of
                its optimizer, such as the learning rate, and the policy for bad gradients. False:
                refuse. None: as the client's setting of that name says.

        Raises:
            TableConflict: A table of that name exists with other settings, or with rows that
                cannot go on under these; the message says what differs and what to do.
        """
        self._check_open()
        terms = self.table_terms
        if update_settings is not None:
            terms = TableTerms("update" if update_settings else "refuse")
        declared = self._directory.create_table(spec, terms)
        note = ""
        if declared.changed:
            note = f"table {spec.name!r} goes on with {', '.join(declared.changed)}"
            log.info("%s", note)
        elif declared.kept:
            note = f"table {spec.name!r} keeps its settings; not taken over: "
            note += ", ".join(declared.kept)
            log.warning("%s", note)
        if note:
            self.table_notes = [*self.table_notes, note]
        return self._remember(declared.spec)

    def table(self, name: str) -> Table:
        """Return the table of that name.

        Raises:
            UnknownTable: There is none.
        """
        self._check_open()
        known = self._tables.get(name)
        return known if known is not None else self._remember(self._directory.table(name))

    def tables(self) -> list[TableSpec]:
        """Return the descriptions of all tables, ordered by name."""
        self._check_open()
        return self._directory.tables()

    def cluster(self) -> ClusterInfo:
        """Return the nodes and the routing that this client goes by."""
        return self._watch.info

    @property
    def checkpoints(self) -> Checkpoints:
        """The cluster's checkpoints: write one, list them, see what was restored."""
        self._check_open()
        return Checkpoints(self._directory)

    # -- sparse rows ----------------------------------------------------------------------

    def prepare(self, keys: ArrayLike) -> KeyBatch:
        """Merge equal keys and order the rest, once for several calls.

        Args:
            keys: Integers of at most 64 bits, any shape; signed ones keep their bits.

        Raises:
            InvalidRequest: No keys, or not integers.
        """
        array = as_keys(keys)
        return KeyBatch(array.shape, self._native.plan(array.reshape(-1)))

    def pull(
        self, table: Table | str, keys: ArrayLike | KeyBatch, *, out: Rows | None = None
    ) -> Rows:
        """Read rows. A key that was never pushed reads as its initial value.

        Args:
            table: A sparse table.
            keys: Integers of any shape, or a batch from :meth:`prepare`.
            out: Where to write, float32 [*shape of keys, dim], contiguous.

        Returns:
            float32 [*shape of keys, dim].

        Raises:
            ServerUnavailable, DeadlineExceeded: No answer within the deadline.
            StateLost: Rows are gone with all their copies.
            InvalidRequest: Keys or ``out`` do not fit.
        """
        table, batch = self._sparse(table, keys)
        rows = output(out, (*batch.shape, table.dim))
        self._watch.wait_until_running()
        self._native.pull(
            table.id, table.dim, batch.plan, rows.reshape(-1), self._config.deadline_ms
        )
        return rows

    def pull_async(
        self, table: Table | str, keys: ArrayLike | KeyBatch, *, out: Rows | None = None
    ) -> Pending[Rows]:
        """Ask for rows and return at once; see :meth:`pull`.

        The rows are those of some moment between now and ``result()``; pushes acknowledged
        before this call are in them.
        """
        table, batch = self._sparse(table, keys)
        rows = output(out, (*batch.shape, table.dim))
        deadline_ms = self._config.deadline_ms
        self._watch.wait_until_running()
        pending = self._native.pull_begin(table.id, table.dim, batch.plan, deadline_ms)

        def finish() -> Rows:
            pending.finish(rows.reshape(-1))
            return rows

        return Pending(pending.done, finish)

    def push(
        self,
        table: Table | str,
        keys: ArrayLike | KeyBatch,
        gradients: ArrayLike,
        *,
        learning_rate_scale: float = 1.0,
        shows: ArrayLike | None = None,
        clicks: ArrayLike | None = None,
    ) -> None:
        """Run the table's optimizer with these gradients; returns when it is applied.

        Args:
            table: A sparse table.
            keys: Integers of any shape, or the batch of the pull that went before.
            gradients: float32 [*shape of keys, dim]; those of equal keys are summed.
            learning_rate_scale: Multiplies the learning rate of this push.
            shows: How often each key was shown, numbers from 0 [*shape of keys]; those of equal
                keys are summed. For tables whose lifetime uses a score. Default: 1 for each
                different key; with ``clicks``, 1 for each key of the batch.
            clicks: How often each was clicked, likewise. Default: 0.

        Raises:
            OutcomeUnknown: No answer within the deadline: it may or may not be applied.
            ServerUnavailable: It could not be sent: it is not applied.
            NonFiniteGradient: NaN or infinity; nothing was sent.
            MemoryLimitReached: A server has no room for the new rows.
            StateLost: Rows are gone with all their copies.
            InvalidRequest: Keys, gradients, shows or clicks do not fit, or the table keeps no shows
                and clicks; nothing was sent.
        """
        table, batch = self._sparse(table, keys)
        values = as_rows(gradients, (*batch.shape, table.dim), "gradients")
        counts = _counts(table, batch, shows, clicks)
        self._push(table, batch.plan, values, "update", learning_rate_scale, counts)

    def push_async(
        self,
        table: Table | str,
        keys: ArrayLike | KeyBatch,
        gradients: ArrayLike,
        *,
        learning_rate_scale: float = 1.0,
        shows: ArrayLike | None = None,
        clicks: ArrayLike | None = None,
    ) -> Pending[None]:
        """Send a push and return as soon as it has left; see :meth:`push`.

        The arrays may be changed once this returns. Pushes leave in the order of these
        calls and are applied in it, but for one that has to be sent again. A failure is
        raised by ``result()`` and by :meth:`flush`.
        """
        table, batch = self._sparse(table, keys)
        values = as_rows(gradients, (*batch.shape, table.dim), "gradients")
        counts = _counts(table, batch, shows, clicks)
        return self._push_begin(table, batch.plan, values, "update", learning_rate_scale, counts)

    def assign(self, table: Table | str, keys: ArrayLike | KeyBatch, values: ArrayLike) -> None:
        """Set rows, with fresh optimizer state.

        Args:
            table: A sparse table.
            keys: Integers of any shape, each only once.
            values: float32 [*shape of keys, dim].

        Raises:
            InvalidRequest: A key stands twice, or keys and values do not fit.
        """
        table, batch = self._sparse(table, keys)
        if batch.unique_count != batch.size:
            raise InvalidRequest("assign needs each key once")
        rows = as_rows(values, (*batch.shape, table.dim), "values")
        self._push(table, batch.plan, rows, "assign", 1.0)

    def delete(self, table: Table | str, keys: ArrayLike | KeyBatch) -> int:
        """Remove rows; returns when they are gone, as :meth:`push` does.

        A key without a row is passed over. A later push makes the row anew, from its initial
        weights and with fresh optimizer state.

        Args:
            table: A sparse table.
            keys: Integers of any shape.

        Returns:
            How many rows were removed. If an answer was lost and the delete sent again, the rows
            that the first try removed are not counted.

        Raises:
            OutcomeUnknown: No answer within the deadline: it may or may not be applied.
            ServerUnavailable: It could not be sent: it is not applied.
            StateLost: Rows are gone with all their copies.
            InvalidRequest: The table is dense, or the keys do not fit.
        """
        table = self._table(table)
        if not isinstance(table.spec.kind, Sparse):
            raise InvalidRequest(
                f"table {table.name} is dense: only rows of sparse tables can be deleted"
            )
        batch = keys if isinstance(keys, KeyBatch) else self.prepare(keys)
        return self._push(table, batch.plan, np.empty(0, np.float32), "delete", 1.0)

    # -- the lifetime of rows -------------------------------------------------------------

    def expire(
        self,
        table: Table | str,
        *,
        dry_run: bool = False,
        unseen_seconds: int | None = None,
        score_below: float | None = None,
        norm_below: float | None = None,
    ) -> Expired:
        """Remove the rows for which the table's expiry holds, on all copies; pushes go on.

        Args:
            table: A sparse table with a lifetime.
            dry_run: Only count them.
            unseen_seconds: In place of the table's expiry, if one of the three is given: rows that
                no push has named for more than so many seconds.
            score_below: Rows of a lower score.
            norm_below: Rows whose weights have a lower L2 norm.

        Raises:
            InvalidRequest: The table has no expiry and none is given, or it keeps no statistics
                for the one that is given.
            OutcomeUnknown, ServerUnavailable: Not all slots have done it; call it again.
        """
        table = self._table(table)
        self._watch.wait_until_running()
        thresholds = Thresholds(unseen_seconds, score_below, norm_below)
        return expire_now(self._native, table.spec, thresholds, dry_run=dry_run)

    def decay(self, table: Table | str, *, period: int, rate: float | None = None) -> int:
        """Multiply shows and clicks of all rows by a rate, once for each period.

        Args:
            table: A sparse table whose lifetime uses a score.
            period: A number that grows. A slot that has applied this period or a later one,
                whoever asked, does nothing: so the call may be repeated.
            rate: Default: ``decay`` of the table's score.

        Returns:
            How many slots applied it now.

        Raises:
            InvalidRequest: The table keeps no shows and clicks, or a number is out of range.
            OutcomeUnknown, ServerUnavailable: Not all slots have done it; call it again.
        """
        table = self._table(table)
        self._watch.wait_until_running()
        return decay_now(self._native, table.spec, check_period(period), rate)

    # -- dense tensors --------------------------------------------------------------------

    def init_dense(self, table: Table | str, values: ArrayLike) -> None:
        """Set a dense tensor if no trainer has set it yet: the first one wins, block by block."""
        table = self._table(table)
        blocks = self._to_blocks(table, values, "values")
        self._push(table, self._dense_plan(table), blocks, "assign_if_absent", 1.0)

    def pull_dense(self, table: Table | str, *, out: Rows | None = None) -> Rows:
        """Read a dense tensor, float32 of the table's shape. Raises as :meth:`pull`."""
        return self.pull_dense_async(table, out=out).result()

    def pull_dense_async(self, table: Table | str, *, out: Rows | None = None) -> Pending[Rows]:
        """Ask for a dense tensor and return at once; ``out`` as in :meth:`pull`."""
        table = self._table(table)
        shape, plan = table.dense().shape, self._dense_plan(table)
        values = output(out, shape)
        # The last block may reach beyond the tensor: then blocks are read aside and copied.
        whole = values.size == plan.size * table.row_elements
        blocks = (
            values.reshape(-1) if whole else np.empty(plan.size * table.row_elements, np.float32)
        )
        self._watch.wait_until_running()
        pending = self._native.pull_begin(
            table.id, table.row_elements, plan, self._config.deadline_ms
        )

        def finish() -> Rows:
            pending.finish(blocks)
            if not whole:
                values.reshape(-1)[:] = blocks[: values.size]
            return values

        return Pending(pending.done, finish)

    def push_dense(
        self, table: Table | str, gradient: ArrayLike, *, learning_rate_scale: float = 1.0
    ) -> None:
        """Run the optimizer of a dense tensor; ``gradient`` has its shape. As :meth:`push`."""
        table = self._table(table)
        blocks = self._to_blocks(table, gradient, "gradient")
        self._push(table, self._dense_plan(table), blocks, "update", learning_rate_scale)

    def push_dense_async(
        self, table: Table | str, gradient: ArrayLike, *, learning_rate_scale: float = 1.0
    ) -> Pending[None]:
        """Send a dense gradient and return as soon as it has left; see :meth:`push_async`."""
        table = self._table(table)
        blocks = self._to_blocks(table, gradient, "gradient")
        return self._push_begin(
            table, self._dense_plan(table), blocks, "update", learning_rate_scale
        )

    # -- tasks ----------------------------------------------------------------------------

    def task_stream(
        self,
        job: int,
        pass_number: int,
        task: int,
        tables: Sequence[Table],
        *,
        first_batch: int = 0,
    ) -> TaskStream:
        """Return a stream for the pushes of one training task; they go there while it is open.

        Args:
            job: The job's number, at most 64 bits; no two jobs of a cluster may share one.
            pass_number: The pass over the data, at most 31 bits.
            task: The task's number in the pass, at most 32 bits.
            tables: Every table that may be pushed to, at most 64; the same in the same order
                in every worker, for the numbers of the pushes depend on it.
            first_batch: Batches below this are acknowledged everywhere.

        Raises:
            InvalidRequest: No tables, too many, the same one twice, or a number is too large.
        """
        self._check_open()
        return self._tasks.make((job, pass_number, task), tables, first_batch)

    def close_task_stream(self, job: int, pass_number: int, task: int) -> None:
        """Have every server forget the stream of a task that is done for good; idempotent.

        For streams of workers that ended before they could; see
        :meth:`TaskStream.close_on_servers`.

        Raises:
            ServerUnavailable: A server did not answer within the deadline: call it again.
        """
        self._check_open()
        name = check_name(job, pass_number, task)
        self._native.close_stream(*name, self._config.deadline_ms)

    # -- the connection -------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until every push sent so far is acknowledged.

        Raises:
            BackstayError: A push without a waiting caller failed; the first such failure.
        """
        self._native.flush()

    def stats(self) -> ClientStats:
        """Return what this client has done so far."""
        return ClientStats(**self._native.stats())

    def close(self) -> None:
        """Wait for the pushes under way and disconnect. A second call does nothing.

        Raises:
            BackstayError: A push without a waiting caller failed; the client is closed all
                the same.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._native.close(self._config.deadline_ms)
        finally:
            self._end_threads()
            self._directory.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- helpers --------------------------------------------------------------------------

    def _end_threads(self) -> None:
        if self._registration is not None:
            self._registration.close()
        self._watch.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the client is closed")

    def _remember(self, spec: TableSpec) -> Table:
        known = self._tables.get(spec.name)
        if known is None or known.spec != spec:
            known = self._tables[spec.name] = Table.of(spec)
            if self._config.measure_staleness or spec.compensation != "ignore":
                self._native.track_staleness(known.id)
            if not isinstance(spec.compensation, str):
                sums = isinstance(spec.compensation, AdaptiveRevision)
                self._native.keep_references(known.id, sums=sums)
        return known

    def _table(self, table: Table | str) -> Table:
        return self.table(table) if isinstance(table, str) else table

    def _sparse(self, table: Table | str, keys: ArrayLike | KeyBatch) -> tuple[Table, KeyBatch]:
        table = self._table(table)
        table.sparse()
        return table, keys if isinstance(keys, KeyBatch) else self.prepare(keys)

    def _dense_plan(self, table: Table) -> KeyPlan:
        plan = self._dense_plans.get(table.id)
        # A plan of an older routing would do, but its parts are laid out for other servers.
        if plan is None or plan.routing_version != self._native.routing_version:
            plan = self._native.plan(table.block_keys())
            self._dense_plans[table.id] = plan
        return plan

    def _to_blocks(self, table: Table, values: ArrayLike, what: str) -> Rows:
        """Return the values as whole blocks, float32 [blocks * block_elements]."""
        flat = as_rows(values, table.dense().shape, what).reshape(-1)
        padding = -flat.size % table.row_elements
        return np.pad(flat, (0, padding)) if padding else flat

    def _push(
        self,
        table: Table,
        plan: KeyPlan,
        values: Rows,
        kind: PushKind,
        scale: float,
        counts: _Counts = NOT_TOLD,
    ) -> int:
        """Push and wait; returns the rows that a delete removed."""
        self._watch.wait_until_running()
        return self._native.push(self._request(table, plan, values, kind, scale, counts))

    def _push_begin(
        self,
        table: Table,
        plan: KeyPlan,
        values: Rows,
        kind: PushKind,
        scale: float,
        counts: _Counts = NOT_TOLD,
    ) -> Pending[None]:
        """Push without waiting."""
        self._watch.wait_until_running()
        pending = self._native.push_begin(self._request(table, plan, values, kind, scale, counts))
        return Pending(pending.done, pending.finish)

    def _request(
        self,
        table: Table,
        plan: KeyPlan,
        values: Rows,
        kind: PushKind,
        scale: float,
        counts: _Counts,
    ) -> PushRequest:
        stream, ordinal = None, 0
        if kind == "update":
            stream, ordinal = self._tasks.place(table)
            scale *= self.push_steps.correction(table)
        return PushRequest(
            table=table.id,
            row_elements=0 if kind == "delete" else table.row_elements,
            plan=plan,
            values=values.reshape(-1),
            kind=kind,
            learning_rate_scale=scale,
            require_finite=kind != "update" or table.refuses_non_finite,
            deadline_ms=self._config.deadline_ms,
            stream=stream,
            ordinal=ordinal,
            shows=counts.shows,
            clicks=counts.clicks,
        )


def _counts(
    table: Table, batch: KeyBatch, shows: ArrayLike | None, clicks: ArrayLike | None
) -> _Counts:
    """Return shows and clicks as they travel.

    Raises:
        InvalidRequest: They do not fit, or the table keeps none.
    """
    if shows is None and clicks is None:
        return NOT_TOLD
    if not table.spec.takes_counts:
        raise InvalidRequest(
            f"table {table.name} counts no shows and clicks: leave shows= and clicks= out, or make "
            "it with a lifetime that uses a score"
        )
    told = (
        None if given is None else as_counts(given, batch.shape, what).reshape(-1)
        for given, what in ((shows, "shows"), (clicks, "clicks"))
    )
    return _Counts(*told)
