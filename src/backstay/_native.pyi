"""The Rust half of backstay: the data plane of a node and of a trainer.

Bulk arrays cross here without a copy wherever they are contiguous, and the GIL is released
for the whole of every call that may take time. ``SimNode``, ``SimMessage`` and ``SimSlot`` are in
an editable install only: the tests' simulator drives them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "PROTOCOL_VERSION",
    "TABLE_RANGES",
    "Cancellation",
    "CopiedSlots",
    "DataClient",
    "DataServer",
    "FunctionBuilder",
    "KeyPlan",
    "PendingPull",
    "PendingPush",
    "PushRequest",
    "PushStream",
    "ServedTables",
    "SimMessage",
    "SimNode",
    "SimSlot",
    "__version__",
    "canonical_part",
    "canonical_table",
    "check_table",
    "crc32c",
    "initial_rows",
    "log_to_stderr",
    "make_tensor_header",
    "pulled_rows",
    "read_tensor_header",
    "row_scores",
    "slots_of",
    "table_facts",
    "table_id",
    "table_with_settings",
]

__version__: str
PROTOCOL_VERSION: int
# Lowest and highest value of each number of a table's description, by its path in the JSON form.
TABLE_RANGES: Mapping[str, tuple[int, int] | tuple[float, float]]

def table_id(name: str) -> int:
    """Return the 64-bit id under which a table travels: a fixed hash of its name."""

def slots_of(keys: NDArray[np.uint64], slot_count: int) -> NDArray[np.uint32]:
    """Return the slot of each key, in the order given."""

def canonical_table(spec_json: str) -> str:
    """Check a table's JSON description and return it with every default filled in.

    Raises:
        ConfigError: A field is unknown, missing or out of range; the message names it.
    """

def canonical_part(part_json: str, path: str, name: str) -> str:
    """Check a part of a description and return it with every default filled in.

    Args:
        part_json: An object with the part under its path, such as ``{"lifetime.expiry": {...}}``.
        path: The path of the part's settings, with which the core's errors begin.
        name: What an error says in its place.

    Raises:
        ConfigError: Settings are unknown, missing, or contradict each other.
    """

def table_facts(spec_json: str) -> tuple[int, list[str], bool, bool, tuple[int, int] | None]:
    """Return what follows from a table's JSON description.

    Returns:
        Words behind the weights of a row; its statistics, in the order of their words; whether
        pushes may tell of shows and clicks; whether rows have a score; weights and state of a row
        of what counts keys without a row.

    Raises:
        ConfigError: The description is wrong.
    """

@final
class FunctionBuilder:
    """A user function that grows operation by operation; equal ones are one node.

    Each method returns the number of a node.

    Raises:
        ConfigError: The rules do not allow it.
    """

    def __new__(
        cls, path: str, settings: Sequence[str], states: Sequence[tuple[str, str]]
    ) -> FunctionBuilder: ...
    @staticmethod
    def inputs(path: str) -> list[str]: ...
    def constant(self, value: float) -> int: ...
    def input(self, name: str) -> int: ...
    def setting(self, name: str) -> int: ...
    def operation(self, name: str, nodes: Sequence[int]) -> int: ...
    def finish(self, results: Sequence[int]) -> str:
        """Return the expression with these results, as JSON."""

def check_table(spec_json: str, slot_count: int) -> None:
    """Refuse a table that a cluster with so many slots cannot have.

    Raises:
        ConfigError: A slot's share of its capacity or filter would be too small.
    """

def table_with_settings(present_json: str, wanted_json: str) -> str:
    """Return the first description with the second's settings, as far as it can take them over.

    Those are the optimizer's, but for what decides the layout of a row, and the policy for bad
    gradients.

    Raises:
        ConfigError: One of the descriptions is wrong.
    """

def initial_rows(spec_json: str, keys: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Return the weights of keys [n] before their first push, [n, elements].

    What a pull makes of them is left out: see :func:`pulled_rows`.

    Raises:
        ConfigError: The table's description is wrong.
    """

def pulled_rows(spec_json: str, weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return what a pull makes of rows with these weights, [n, elements]: the bits servers answer.

    Raises:
        ConfigError: The table's description is wrong, or its rows have another size.
    """

def row_scores(spec_json: str, time: int, statistics: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Return the score of each row [n] at a time in seconds, as servers compute it.

    Args:
        spec_json: Of a table whose lifetime uses a score.
        time: Unix seconds.
        statistics: The words behind the optimizer's state of each row, [n, statistics].

    Raises:
        ConfigError: The description is wrong, or its rows have no score.
    """

def make_tensor_header(
    metadata: dict[str, str], tensors: list[tuple[str, str, list[int]]]
) -> bytes:
    """Return the header of a safetensors file for tensors (name, type, shape) in this order.

    Raises:
        ValueError: A type is unknown, or the shapes are too large.
    """

def read_tensor_header(
    file: NDArray[np.uint8],
) -> tuple[dict[str, str], list[tuple[str, str, list[int], tuple[int, int]]]]:
    """Return the metadata and the tensors of a safetensors file, in the order of their bytes.

    Each tensor is its name, type, shape, and where its bytes begin and end in the file.

    Raises:
        ValueError: The header is damaged, or its tensors do not fill the file without a gap.
    """

def crc32c(content: bytes) -> int:
    """Return the CRC-32C of some bytes, as iSCSI, ext4 and Snappy's framing have it."""

def log_to_stderr(
    level: str, form: str = "text", node_id: str = "", trace_pushes: bool = False
) -> None:
    """Write the data plane's log lines of ``level`` and above to standard error.

    The first call of a process decides.

    Args:
        level: debug, info, warning or error.
        form: text, or json (one object a line, with the members of Python's side).
        node_id: The member ``node`` of each line in JSON.
        trace_pushes: Write the lines by which a push can be followed at any level.
    """

@final
class DataServer:
    """One node's data plane: rows, optimizers and sockets, on threads of its own."""

    def __new__(
        cls,
        *,
        listen: str,
        cluster_id: str,
        node_id: str,
        instance: int,
        slot_count: int,
        token: str | None = None,
        tls_cert_pem: bytes | None = None,
        tls_key_pem: bytes | None = None,
        tls_client_ca_pem: bytes | None = None,
        tls_peer_ca_pem: bytes | None = None,
        io_threads: int = 2,
        max_frame_bytes: int = 268435456,
        max_keys_per_request: int = 4194304,
        max_connections: int = 4096,
        handshake_timeout_ms: int = 5000,
        stall_timeout_ms: int = 30000,
        memory_limit_bytes: int = 0,
        read_lease_ms: int = 400,
        prepare_timeout_ms: int = 1000,
        copy_bytes_per_s: int = 50_331_648,
        stream_grace_s: int = 604_800,
        counts_process: bool = False,
    ) -> DataServer: ...
    @property
    def address(self) -> str:
        """The bound ``host:port`` (the port is chosen by the system if 0 was asked for)."""
    def set_routing(self, version: int, owned: NDArray[np.bool_]) -> None:
        """Serve exactly the slots marked in ``owned`` [slot_count], without replicas."""
    def set_routing_json(self, routing_json: str) -> None:
        """Go by a routing record, as the coordination store keeps it; an older one is ignored.

        Raises:
            InvalidRequest: It contradicts itself, or is of another number of slots.
        """
    def hold_lease_until(self, until_s: float) -> None:
        """This node's lease in the store is alive until this ``clock_s``; 0: it is lost."""
    def wait_report(self, known: int, timeout_ms: int) -> tuple[int, str]:
        """Wait until what this node wants of the controller changes, or for ``timeout_ms``.

        Returns:
            A number that grows with each change, and a JSON object: ``routing_version``,
            ``silent`` (instances), ``caught_up`` ([slot, term, instance] each), ``refused``
            (instances whose port refuses connections).
        """
    def slot_states_json(self) -> str:
        """A JSON list: ``slot``, ``term``, ``role``, ``follows``, ``position``, ``staged``."""
    def create_table(self, spec_json: str, revision: int = 1) -> None:
        """Create a table, or give it the settings of a newer revision; an older one is ignored.

        Raises:
            TableConflict: The name exists with other settings of the same revision, or with rows
                that cannot go on under these.
        """
    def tables_json(self) -> str:
        """A JSON list: ``[{"spec", "id", "rows", "master_rows", "bytes", "counters", ...}, ...]``.

        ``counters`` and ``counter_bytes`` are of keys without a row, ``row_bytes`` is of one row.
        ``staleness`` has ``buckets``, ``sum`` and ``unknown``: slots of pushes that told from where
        their gradients come, counted where this node is master. Bucket 0 is staleness 0, bucket n
        from 2^(n-1) on.
        """
    def table_usage(self, table: str) -> tuple[int, int, int]:
        """Rows of one table on this node, those in slots it is master of, bytes of all."""
    def table_staleness(self, table: str) -> tuple[int, int]:
        """Slots of pushes of which this node, as master, knows how stale they were, and the sum."""
    def stats_json(self) -> str:
        """A JSON object of counters and gauges of this node."""
    def export_slot(
        self, table: str, slot: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.float32], NDArray[np.float32]]:
        """Return ``(keys [n], weights [n, dim], state [n, state_elements])``, sorted by key."""
    def import_slot(
        self,
        table: str,
        slot: int,
        keys: NDArray[np.uint64],
        weights: NDArray[np.float32],
        state: NDArray[np.float32],
    ) -> None:
        """Replace the rows of one slot of one table."""
    def slot_digest(self, slot: int) -> tuple[int, int]:
        """Return ``(position, digest)``; equal rows and memory of a slot give equal digests."""
    def slot_bytes(self) -> NDArray[np.uint64]:
        """Return for each slot the bytes that its rows here would take in a checkpoint."""
    def track_exports(self, tables: Sequence[str]) -> None:
        """Keep account of what changes in these tables for running exports, and in no others."""
    def export_completed(self, positions: Sequence[int], tables: Sequence[str]) -> None:
        """Let go of what changed before a complete element, of slots that this node backs up.

        Args:
            positions: Of each slot, as the element has it.
            tables: Those of the export.
        """
    def copy_slots(
        self,
        slots_json: str,
        most_bytes: int,
        cancelled: Cancellation,
        export_json: str | None = None,
    ) -> CopiedSlots:
        """Copy slots of which this node is master, each in one short step.

        Not for a thread that others go before: pushes wait for the slot that is copied.

        Args:
            slots_json: ``[{"slot", "base": [position, epoch] or null}]``: with a base only what has
                changed since.
            most_bytes: Slots behind more than this are left out.
            cancelled: Ends the copying when told to.
            export_json: For a running export: ``{"tables": [name], "statistics",
                "score_at_least"}``. Slots are left out, too, until ``track_exports`` has named its
                tables here.

        Raises:
            ClosedError: It was cancelled.
        """
    def to_load(self) -> list[tuple[int, int]]:
        """Return the slots that wait to be loaded from a checkpoint here, each with its epoch."""
    def load_part(self, request_json: str) -> int:
        """Load slots that wait for it from a file of a checkpoint; return the rows put in.

        Args:
            request_json: ``{"path", "bytes", "sha256", "slots": [{"slot", "epoch", "whole",
                "last"}]}``: of a chain the parts come in order, ``last`` with the newest.

        Raises:
            CheckpointUnavailable: The file cannot be read.
            CheckpointDamaged: It is not what the manifest says; nothing of it was used, or what
                was used is wiped by the next attempt.
            RequestRefused: A slot does not wait (any more), or there is no room.
        """
    def stop(self, grace_ms: int) -> bool:
        """Stop taking requests, answer those being served, close. False if cut off by grace."""

@final
class Cancellation:
    """Tells a writer of checkpoints to give up."""

    def __new__(cls) -> Cancellation: ...
    def cancel(self) -> None:
        """Give up."""

@final
class ServedTables:
    """The tables of a running export where it is served: one version, which never changes.

    Any thread may look up in it while the next version is made.
    """

    def __new__(cls, slot_count: int, tables: Sequence[tuple[str, int]]) -> ServedTables:
        """Make empty tables, each with the elements of a row."""
    def with_parts(self, parts_json: str, emptied: Sequence[int]) -> ServedTables:
        """Return the next version: with slots of the parts of an element.

        Args:
            parts_json: ``[{"path", "bytes", "sha256", "element", "slots": [{"slot", "position",
                "whole"}]}]``; of a slot that is not whole the other rows stay.
            emptied: Slots that have no rows in it.

        Raises:
            CheckpointDamaged: A file is not what it should be; the message names it.
            CheckpointUnavailable: A file cannot be read.
        """
    def lookup(
        self, table: str, keys: NDArray[np.uint64]
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return the rows of keys, float32 [n, dim], and whether each has one; zeros without."""
    def all_rows(self, table: str) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
        """Return all keys [n] and rows [n, dim] of a table, in no order."""
    def row_count(self, table: str) -> int:
        """Return how many rows a table has."""
    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory that it takes; what versions share counts in each."""

@final
class CopiedSlots:
    """Slots as they were copied, to be written to a file of a checkpoint."""

    def write(self, part_json: str, cancelled: Cancellation) -> str:
        """Write them, once.

        Args:
            part_json: ``{"path", "checkpoint", "bytes_per_s"}``.
            cancelled: Ends the writing when told to.

        Returns:
            ``{"bytes", "sha256", "slots": [{"slot", "position", "epoch", "whole", "rows"}]}``;
            slots of which the node was not surely the master are missing, and there is no file if
            none is left.

        Raises:
            CheckpointUnavailable: The file cannot be written.
            ClosedError: It was cancelled, or they were written before.
        """

@final
class KeyPlan:
    """A batch of keys made ready: equal keys merged, the rest ordered by server and slot."""

    @property
    def size(self) -> int:
        """Keys of the batch, duplicates included."""
    @property
    def unique_count(self) -> int:
        """Different keys of the batch."""
    @property
    def routing_version(self) -> int:
        """The routing version it was made for."""

@final
class PendingPull:
    """A pull under way."""

    def done(self) -> bool:
        """Whether every answer has come."""
    def finish(self, out: NDArray[np.float32]) -> None:
        """Wait for the rows and write them to ``out`` [size * row_elements]; only once."""

@final
class PendingPush:
    """A push under way or acknowledged."""

    def done(self) -> bool:
        """Whether the outcome is known."""
    def finish(self) -> None:
        """Wait until it is applied; raises if it is not, the same each time."""

@final
class PushRequest:
    """One push: the gradients or values of a batch of keys for one table."""

    def __new__(
        cls,
        *,
        table: int,
        row_elements: int,
        plan: KeyPlan,
        values: NDArray[np.float32],
        kind: str,
        learning_rate_scale: float,
        require_finite: bool,
        deadline_ms: int,
        stream: PushStream | None = None,
        ordinal: int = 0,
        shows: NDArray[np.float32] | None = None,
        clicks: NDArray[np.float32] | None = None,
    ) -> PushRequest:
        """Describe a push of ``kind`` "update", "assign", "assign_if_absent" or "delete".

        ``values`` is [size * row_elements]; a delete has none, and ``row_elements`` 0. With a
        ``stream``, the push is that of the table with this ``ordinal`` in the stream's batch.
        ``shows`` and ``clicks`` are [keys of the plan's batch] each, for updates of tables that
        keep them; if one is missing, each key has 1 show or 0 clicks.
        """

@final
class PushStream:
    """The pushes of one task: their numbers, their floor and the lease of the task."""

    def begin_batch(self, batch: int) -> None:
        """End the batch before and number pushes as those of this one."""
    def end_batch(self) -> None:
        """End the batch, unless a push has failed."""
    def lease_until(self, moment_s: float) -> None:
        """Let frames leave until this moment of ``backstay.consensus.clock.clock_s``."""
    def revoke(self) -> None:
        """Let no frame leave any more; what is under way raises TaskLeaseLost."""
    def acknowledged(self) -> int:
        """How many batches, counted from 0, have ended and are acknowledged everywhere."""
    def flush(self) -> None:
        """End the batch and wait for all pushes; raises the first failure."""
    def close_on_servers(self, deadline_ms: int) -> None:
        """Have every master close the stream."""

@final
class DataClient:
    """A trainer's data plane: plans, sends, waits and retries, with the GIL released."""

    def __new__(
        cls,
        *,
        cluster_id: str,
        client_name: str,
        stream_job: int,
        stream_pass: int = ...,
        stream_task: int = 0,
        token: str | None = None,
        tls_ca_pem: bytes | None = None,
        tls_cert_pem: bytes | None = None,
        tls_key_pem: bytes | None = None,
        connect_timeout_ms: int = 5000,
        stall_timeout_ms: int = 30000,
        max_frame_bytes: int = 268435456,
        part_bytes: int = 1048576,
        max_pushes_in_flight: int = 16,
    ) -> DataClient: ...
    def set_routing(
        self,
        version: int,
        servers: Sequence[tuple[str, str, int]],
        master_of_slot: NDArray[np.uint32],
        *,
        generation: int = 0,
        loss: str = "",
    ) -> bool:
        """Go by this routing table, also in the calls that wait.

        Args:
            version: A table that is not newer than the known one is left aside.
            servers: (node id, data address, instance); instance 0 takes the first process met.
            master_of_slot: Indexes into ``servers``, or 4294967295 for a slot without a master.
            generation: If it is above that of the client's first table, calls raise StateLost.
            loss: What becomes of slots that lost all their copies, for messages.

        Returns:
            Whether it is newer.
        """
    @property
    def routing_version(self) -> int:
        """The version of the routing table that calls go by; 0 if there is none yet."""
    def connect(self, deadline_ms: int) -> None:
        """Connect to every master of the routing table."""
    def next_event(self) -> tuple[str, str] | None:
        """Wait for the next (kind, text); None after ``unwatch`` or ``close``.

        ``trouble``: a server does not answer or refuses. ``waiting``: a call has been waiting
        for some time, and for what. ``resumed``: it goes on. For one thread.
        """
    def unwatch(self) -> None:
        """End ``next_event``."""
    def track_staleness(self, table: int) -> None:
        """Have pulls of a table ask from where their rows come, and pushes to it tell that."""
    def keep_references(self, table: int, *, sums: bool = False) -> None:
        """Keep what pulls of a table bring, and have pushes to it bring it along.

        Args:
            table: It compensates the delay of gradients.
            sums: Keep the sums of gradients that come with the rows, not the rows.
        """
    def plan(self, keys: NDArray[np.uint64]) -> KeyPlan:
        """Make a batch of keys [n] ready."""
    def pull_begin(
        self, table: int, row_elements: int, plan: KeyPlan, deadline_ms: int
    ) -> PendingPull:
        """Ask for rows; wait for them with ``PendingPull.finish``."""
    def pull(
        self,
        table: int,
        row_elements: int,
        plan: KeyPlan,
        out: NDArray[np.float32],
        deadline_ms: int,
    ) -> None:
        """Ask for rows and wait for them."""
    def push_begin(self, request: PushRequest) -> PendingPush:
        """Send a push; it ends in the background."""
    def push(self, request: PushRequest) -> int:
        """Send a push and wait until it is applied; returns the rows that a delete removed."""
    def expire(
        self,
        table: int,
        *,
        deadline_ms: int,
        dry_run: bool = False,
        unseen_seconds: int | None = None,
        score_below: float | None = None,
        norm_below: float | None = None,
    ) -> str:
        """Remove the rows of a table that have expired, slot by slot, or only count them.

        Without a threshold those of the table hold. Returns JSON: rows by reason (``unseen``,
        ``score``, ``norm``), ``counters`` of keys without a row that went, and ``slots`` done.
        """
    def decay(self, table: int, *, period: int, deadline_ms: int, rate: float | None = None) -> int:
        """Multiply shows and clicks of a table, once for a period; the slots that did it now.

        A slot does no period twice, and none before one that it did. ``rate`` None: the table's.
        """
    def task_stream(
        self, job: int, pass_number: int, task: int, tables: int, first_batch: int
    ) -> PushStream:
        """Return a stream for the pushes of a task with so many tables."""
    def close_stream(self, job: int, pass_number: int, task: int, deadline_ms: int) -> None:
        """Have every master close a stream: what still comes of it counts as a late copy."""
    def flush(self) -> None:
        """Wait until every push under way is acknowledged; raises the first failure."""
    def close(self, deadline_ms: int) -> None:
        """Wait for what is under way, then disconnect."""
    def stats(self) -> dict[str, Any]:
        """What the client has done so far, by name."""

@final
class SimSlot:
    """A slot as a checkpoint of a simulated cluster keeps it."""

    @property
    def epoch(self) -> int:
        """The routing version at which its content began."""
    @property
    def position(self) -> int:
        """How many pushes it had applied."""
    @property
    def whole(self) -> bool:
        """Whether it has all rows; else those that changed since the base it was asked for."""

@final
class SimMessage:
    """A message between two simulated nodes."""

    @property
    def kind(self) -> str:
        """What it is, in one word."""

    @property
    def rows(self) -> int:
        """How many rows of a copy or of a push it carries."""

@final
class SimNode:
    """One node's replication and rows without sockets, threads or clock, for simulators.

    Whoever drives it delivers the messages, does the work and tells the time: microseconds on
    the node's own clock, from any origin. Nodes are named by their instance.
    """
    def __new__(
        cls,
        instance: int,
        slot_count: int,
        *,
        read_lease_us: int = 400_000,
        heartbeat_us: int = 100_000,
        prepare_timeout_us: int = 1_000_000,
        max_pending: int = 256,
        copies_at_once: int = 4,
        copy_bytes_per_s: int = 2**64 - 1,
        copy_piece_bytes: int = 65_536,
        copy_window_bytes: int = 262_144,
    ) -> SimNode: ...
    def create_table(self, spec_json: str) -> None:
        """Create a table, or do nothing if it exists with the same settings."""
    def change_settings(self, spec_json: str) -> None:
        """Give a table these settings, for the pushes taken on from now on."""
    def set_routing_json(self, now: int, routing_json: str) -> None:
        """Go by a routing record; one that is not newer changes nothing."""
    def set_lease(self, until: int) -> None:
        """Tell until when this node's lease in the coordination store is alive; 0: it is lost."""
    def link_up(self, now: int, peer: int) -> None:
        """Note that a connection to a backup was opened."""
    def link_down(self, now: int, peer: int, refused: bool) -> None:
        """Note that it broke or could not be opened; ``refused``: its port refuses."""
    def master_connected(self, peer: int) -> None:
        """Note that a master opened a connection to this node."""
    def tick(self, now: int) -> None:
        """Let time pass."""
    def receive(self, now: int, sender: int, message: SimMessage) -> None:
        """Take a message."""
    def take_outcome(
        self,
    ) -> tuple[list[tuple[int, bool, SimMessage]], list[int], list[int], int]:
        """Return what is to be done after a step.

        Returns:
            Messages to send, in order: peer, whether it goes on the connection that this node
            opened to the peer as its backup, message. The apply queues with work. The nodes to keep
            a connection to. The number of the report, which grows when the report changes.
        """
    def work(self, now: int, queue: int) -> tuple[str, int, int, str] | None:
        """Do the next piece of work of an apply queue, if there is one.

        Returns:
            Its kind (``commit``, ``answer`` or ``recovered``); for an answer also the token, the
            refusal's code (0: done) and its text.
        """
    def push(
        self,
        now: int,
        token: int,
        *,
        stream: tuple[int, int, int],
        sequence: int,
        floor: int,
        table: int,
        keys: Sequence[int],
        values: Sequence[float],
        known_version: int = 2**64 - 1,
        change: str = "",
        origins: Sequence[int] | None = None,
        reference: str = "",
    ) -> tuple[int, str]:
        """Take a push on, or without ``values`` a delete, or what ``change`` says.

        ``change`` is "expire" or "decay", of the slots of the keys. The keys are sorted by slot.

        ``origins`` are what ``pull`` told, one for each slot. With ``reference`` "weights" or
        "sums" these stand behind each gradient, as they were pulled.

        ``known_version`` is the client's routing.

        Returns:
            A refusal's code, its text; 0: every slot has had it; -1: this token's work is to come.
        """
    def close_stream(
        self, now: int, token: int, stream: tuple[int, int, int], known_version: int = 2**64 - 1
    ) -> tuple[int, str]:
        """Close a stream in every slot that is served here; the answer as of ``push``."""
    def read(self, now: int, table: int, keys: Sequence[int]) -> tuple[int, list[float]]:
        """Return a refusal's code (0: none) and the rows, as a client would get them."""
    def pull(
        self, now: int, table: int, keys: Sequence[int]
    ) -> tuple[int, list[float], list[float], list[int]]:
        """Return a refusal's code (0: none), rows, and what a push will tell of them.

        That is the sums of a table that keeps some, and an origin for each slot.
        """
    def staleness(self, table: int) -> tuple[int, int]:
        """Return slots of pushes of which it is known how stale they were, and the sum."""
    def peek(self, table: int, keys: Sequence[int]) -> list[float]:
        """Return the rows as they are, whoever is their master."""
    def holds(self, stream: tuple[int, int, int], sequence: int, slot: int) -> bool:
        """Return whether a push is applied or staged in a slot."""
    def save_slot(self, now: int, slot: int, base: tuple[int, int] | None) -> SimSlot | None:
        """Copy a slot as a checkpoint does; None if this node is not surely its master now.

        ``base`` is (position, epoch) of the copy to add to; None: all of it.
        """
    def to_load(self) -> list[tuple[int, int]]:
        """Return the slots that are to be loaded from a checkpoint, each with its epoch."""
    def load_slot(self, now: int, slot: int, epoch: int, chain: Sequence[SimSlot]) -> bool:
        """Load a slot from copies, oldest first, the first one whole; False if not asked for."""
    def report_json(self) -> str:
        """Return what this node wants of the controller."""
    def place(self, slot: int) -> tuple[int, int]:
        """Return the position of a slot, and the position with what is staged."""
    def digest(self, slot: int) -> int:
        """Return a hash of a slot's rows and memory."""
    def serving_state(self, slot: int) -> str:
        """Return ``elsewhere``, ``waiting`` or ``serving``."""
    def slot_state(self, slot: int) -> tuple[int, int, int, bool]:
        """Return term, epoch, source, and whether a copy of the slot is under way to here."""
    def routing_version(self) -> int:
        """Return the routing version this node goes by."""
    def serving_until(self) -> int:
        """Return until when this node may answer reads of the slots it serves."""
    def pending(self) -> int:
        """Return how many transactions wait for backups."""
    def counters(self) -> dict[str, int]:
        """Return what was done so far, by name."""
