"""One member of the embedded store's Raft group: PySyncObj in a thread of its own.

It replicates the commands of a ``StoreState``, and drives the state's time
while it leads. Results are handed over by callbacks that run in that thread; ``EmbeddedStore``
brings them to the event loop. The clock is given; it is asked for differences only.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pysyncobj import (
    FAIL_REASON,
    SyncObj,
    SyncObjConf,
    SyncObjConsumer,
    SyncObjException,
    replicated,
)
from pysyncobj.monotonic import monotonic
from pysyncobj.transport import TCPTransport

from backstay.addresses import split_address
from backstay.consensus.store.state import StoreState, command, execute
from backstay.errors import BackstayError, ListenError

__all__ = ["Outcome", "RaftMember"]

_LOG = logging.getLogger(__name__)

# How long a member that hears nothing waits before it stands for election, drawn anew each time
# between these: long enough that a busy machine does not cost a leader its leadership.
ELECTION_MIN_S = 0.5
ELECTION_MAX_S = 1.0
# The leader's sign of life; PySyncObj wants three of them to fit into the shortest wait.
HEARTBEAT_S = 0.1
# When the leader's connection closes, its process is gone: the others stand one after the other,
# these times apart, so that they do not split the votes.
STAND_AFTER_S = 0.01
STAND_APART_S = 0.2
# A single member waits for no other.
ALONE_ELECTION_MIN_S = 0.04
ALONE_ELECTION_MAX_S = 0.05
ALONE_HEARTBEAT_S = 0.01
# A leader that no majority has answered for so long steps back.
STEP_BACK_S = 1.5
POLL_S = 0.02
CONNECTION_TIMEOUT_S = 2.0
RECONNECT_S = 0.2
QUEUE_MAX = 1000
# Above the largest command, so that PySyncObj never cuts one into pieces: the piece that it
# marks as the last one is not always the last.
BATCH_BYTES = 4 * 1_048_576
COMPACT_ENTRIES = 5_000
COMPACT_INTERVAL_S = 300
# Leases are ended in steps of this; no step is longer than the cap, so that a leader that stood
# still (paused, or starved of CPU) does not end leases whose owners could not reach it.
TICK_MS = 100
TICK_MAX_MS = 200
LEAVE_LIMIT_S = 0.5
# A member that leads so soon after its start cannot know for how long there was no leader before:
# it counts as long, and leases are full again.
JUST_STARTED_S = 30.0
UNKNOWN_SILENCE_MS = 10**12


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
        done: Whether it was carried out here.
        value: Its result, if so.
        error: What it raised, if so.
        reason: PySyncObj's reason, if not.
        applied: Whether it may be carried out nevertheless.
    """

    done: bool
    value: Any = None
    error: BackstayError | None = None
    reason: str = ""
    applied: bool = False


_REASONS = {
    FAIL_REASON.QUEUE_FULL: "the queue of commands is full",
    FAIL_REASON.MISSING_LEADER: "there is no leader",
    FAIL_REASON.DISCARDED: "another leader was elected",
    FAIL_REASON.NOT_LEADER: "the leader has changed",
    FAIL_REASON.LEADER_CHANGED: "the leader has changed",
    FAIL_REASON.REQUEST_DENIED: "the command was denied",
    FAIL_REASON.UNKNOWN_OUTCOME: "the answer came too late to be told apart",
}
_MAY_BE_APPLIED = (FAIL_REASON.LEADER_CHANGED, FAIL_REASON.UNKNOWN_OUTCOME)


class _Replica(SyncObjConsumer):  # type: ignore[misc] # PySyncObj has no types
    """The replicated object: PySyncObj calls ``run_command`` in the same order on every member."""

    def __init__(
        self, lock: threading.Lock, clock: Callable[[], float], on_change: Callable[[], None]
    ) -> None:
        super().__init__()
        self._lock = lock
        self._clock = clock
        self._on_change = on_change
        self.state = StoreState(lease_slack_ms=TICK_MAX_MS)
        # When something was last carried out here, by this member's clock.
        self.carried_out_at = clock()

    @replicated  # type: ignore[untyped-decorator]
    def run_command(self, text: str) -> Outcome:
        """Carry a command out; never raises, because PySyncObj would stop there for good."""
        with self._lock:
            before = self.state.revision
            try:
                outcome = Outcome(done=True, value=execute(self.state, text))
            except BackstayError as error:
                outcome = Outcome(done=True, error=error)
            changed = self.state.revision != before
            self.carried_out_at = self._clock()
        if changed:
            self._on_change()
        return outcome

    def _serialize(self) -> dict[str, object]:
        with self._lock:
            return self.state.to_json()

    def _deserialize(self, data: dict[str, object]) -> None:
        with self._lock:
            self.state.restore(data)
            self.carried_out_at = self._clock()
        self._on_change()


def without_known_entries(
    message: dict[str, Any], log: Sequence[tuple[bytes, int, int]]
) -> dict[str, Any]:
    """Return a leader's message without the entries that this member has already.

    PySyncObj deletes everything behind ``prevLogIdx`` and adds what the message brings, also
    where both are the same, which Raft does not allow: a member would lack for a moment what it
    has confirmed, and complain about it. Raft deletes on conflict only.

    Args:
        message: What another member sent.
        log: This member's log: (command, index, term).
    """
    if "prevLogIdx" not in message or "transmission" in message:
        return message
    first = log[0][1]

    def term_at(index: int) -> int | None:
        return log[index - first][2] if first <= index < first + len(log) else None

    previous, term = message["prevLogIdx"], message["prevLogTerm"]
    if previous is None or term_at(previous) != term:
        return message
    entries = message["entries"]
    known = 0
    while known < len(entries) and term_at(entries[known][1]) == entries[known][2]:
        _, previous, term = entries[known]
        known += 1
    _, last, last_term = log[-1]
    if known == len(entries) and last > previous and last_term == message["term"]:
        # Only this leader can have made entries of its own term: it has all up to there.
        previous, term = last, last_term
    return message | {
        "prevLogIdx": previous,
        "prevLogTerm": term,
        "entries": entries[known:],
    }


class _Transport(TCPTransport):  # type: ignore[misc] # PySyncObj has no types
    """PySyncObj's transport, with its handling of repeated entries put right."""

    def _onMessageReceived(self, node: Any, message: dict[str, Any]) -> None:  # noqa: N802
        log = self._syncObj._SyncObj__raftLog
        if message["type"] == "append_entries":
            message = without_known_entries(message, log)
        super()._onMessageReceived(node, message)

    def _onNodeDisconnected(self, node: Any) -> None:  # noqa: N802
        sync = self._syncObj
        if node == sync._getLeader() and sync.selfNode is not None:
            survivors = sorted(each.address for each in {sync.selfNode, *sync.otherNodes} - {node})
            rank = survivors.index(sync.selfNode.address)
            wait_s = STAND_AFTER_S + rank * STAND_APART_S
            deadline = min(sync._SyncObj__raftElectionDeadline, monotonic() + wait_s)
            sync._SyncObj__raftElectionDeadline = deadline
        super()._onNodeDisconnected(node)


class RaftMember:
    """A member, from ``start`` to ``stop``; methods may be called from any thread."""

    def __init__(
        self,
        own: str,
        members: Sequence[str],
        *,
        secret: str | None,
        data_dir: Path | None,
        clock: Callable[[], float],
        on_change: Callable[[], None],
    ) -> None:
        """Prepare.

        Args:
            own: ``host:port`` of this member, one of ``members``.
            members: All members, the same list everywhere.
            secret: Encrypts and authenticates what members send.
            data_dir: Where log and snapshots are kept; None keeps them in memory only.
            clock: Monotonic seconds.
            on_change: Called in the member's thread when the revision has changed.
        """
        self._own = own
        self._others = [member for member in members if member != own]
        self._secret = secret
        self._data_dir = data_dir
        self._clock = clock
        self._lock = threading.Lock()
        self._replica = _Replica(self._lock, clock, on_change)
        self._sync: Any = None
        self._thread = threading.Thread(target=self._run, name=f"raft-{own}", daemon=True)
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._stopping = False
        self._pending = 0
        self._pending_lock = threading.Lock()
        self._led_term = 0
        self._ticked_at = 0.0
        self._tick_under_way = False
        self._started_at = clock()

    def start(self) -> None:
        """Listen and take part; blocks until the log is read.

        Raises:
            ListenError: The address cannot be listened on.
            OSError: The data folder cannot be used.
        """
        if self._data_dir is not None:
            self._data_dir.mkdir(parents=True, exist_ok=True)
        _check_free(self._own)
        self._thread.start()
        self._started.wait()
        if isinstance(self._failure, SyncObjException):
            raise ListenError(f"store_listen: cannot listen on {self._own}: {self._failure}")
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Hand leadership over if others can take it, and end; blocks for a moment."""
        self._stopping = True
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def leader(self) -> str | None:
        """Address of the leader as this member knows it, None while there is none."""
        leader = self._sync._getLeader() if self._sync is not None else None
        return str(leader.address) if leader is not None else None

    def read(self, reader: Callable[[StoreState], Any]) -> Any:
        """Return what a function reads from this member's state, which may lag behind."""
        with self._lock:
            return reader(self._replica.state)

    def submit(
        self,
        text: str,
        on_outcome: Callable[[Outcome], None],
        reader: Callable[[StoreState], Any] | None = None,
    ) -> None:
        """Replicate a command.

        Args:
            text: The command.
            on_outcome: Called in the member's thread when it was carried out here, or will not
                be; not at all if the leader that had it is lost without another taking over.
            reader: Reads the state right after the command; its result becomes the outcome's.
        """
        self._count_pending(1)

        def finish(outcome: Outcome | None, reason: int) -> None:
            self._count_pending(-1)
            if reason != FAIL_REASON.SUCCESS or outcome is None:
                on_outcome(
                    Outcome(
                        done=False,
                        reason=_REASONS.get(reason, f"reason {reason}"),
                        applied=reason in _MAY_BE_APPLIED,
                    )
                )
            elif reader is not None and outcome.error is None:
                on_outcome(Outcome(done=True, value=self.read(reader)))
            else:
                on_outcome(outcome)

        self._replica.run_command(text, callback=finish)

    def _count_pending(self, change: int) -> None:
        with self._pending_lock:
            self._pending += change

    # In the member's thread

    def _run(self) -> None:
        try:
            self._sync = SyncObj(
                self._own,
                self._others,
                self._settings(),
                [self._replica],
                transportClass=_Transport,
            )
        except BaseException as error:  # noqa: BLE001 (start raises it in the caller's thread)
            self._failure = error
            return
        finally:
            self._started.set()
        while not self._stopping:
            self._drive_time()
            # Alone, a command is carried out by the next turn; with others, their answers wake
            # the poll.
            alone_and_busy = not self._others and self._pending > 0
            self._sync.doTick(0.0 if alone_and_busy else POLL_S)
        self._leave()

    def _settings(self) -> SyncObjConf:
        folder, alone = self._data_dir, not self._others
        return SyncObjConf(
            autoTick=False,
            bindAddress=self._own,  # PySyncObj would listen on every address of the machine
            maxBindRetries=1,
            password=self._secret,
            raftMinTimeout=ALONE_ELECTION_MIN_S if alone else ELECTION_MIN_S,
            raftMaxTimeout=ALONE_ELECTION_MAX_S if alone else ELECTION_MAX_S,
            appendEntriesPeriod=ALONE_HEARTBEAT_S if alone else HEARTBEAT_S,
            appendEntriesUseBatch=False,
            appendEntriesBatchSizeBytes=BATCH_BYTES,
            leaderFallbackTimeout=STEP_BACK_S,
            connectionTimeout=CONNECTION_TIMEOUT_S,
            connectionRetryTime=RECONNECT_S,
            commandsQueueSize=QUEUE_MAX,
            journalFile=None if folder is None else str(folder / "journal"),
            fullDumpFile=None if folder is None else str(folder / "snapshot"),
            # A fork of a process with many threads may never come to run.
            useFork=False,
            logCompactionMinEntries=COMPACT_ENTRIES,
            logCompactionMinTime=COMPACT_INTERVAL_S,
            dynamicMembershipChange=False,
        )

    def _drive_time(self) -> None:
        """As leader: take over the leases, then let time pass, one step after the other."""
        if not self._sync._isLeader():
            return
        now = self._clock()
        term = self._sync.raftCurrentTerm
        if term != self._led_term:
            _LOG.info("%s leads the embedded store in term %d", self._own, term)
            self._led_term, self._tick_under_way = term, False
            self._ticked_at = now
            silent_ms = max(0, int((now - self._replica.carried_out_at) * 1000))
            if now - self._started_at < JUST_STARTED_S:
                silent_ms = UNKNOWN_SILENCE_MS
            self.submit(command("lead", term, silent_ms), self._note_tick(term))
            return
        if self._replica.state.next_lease_end_ms() is None:
            self._ticked_at = now
            return
        elapsed_ms = int((now - self._ticked_at) * 1000)
        # One at a time: a step then holds time from before a keepalive for one step at most,
        # which is what the state adds to each lease.
        if elapsed_ms >= TICK_MS and not self._tick_under_way:
            self._ticked_at = now
            self._tick_under_way = True
            step_ms = min(elapsed_ms, TICK_MAX_MS)
            self.submit(command("tick", term, step_ms), self._note_tick(term))

    def _note_tick(self, term: int) -> Callable[[Outcome], None]:
        def note(_outcome: Outcome) -> None:
            # Time of a step that was lost stays lost: leases live a little longer.
            if term == self._led_term:
                self._tick_under_way = False

        return note

    def _leave(self) -> None:
        """Hand leadership over before this member ends, so that no call waits for an election."""
        if self._sync._isLeader():
            refused: list[int] = []
            self._sync.transferLeadership(
                callback=lambda _, reason: refused.append(reason) if reason else None
            )
            deadline = self._clock() + LEAVE_LIMIT_S
            while not refused and self._sync._isLeader() and self._clock() < deadline:
                self._sync.doTick(POLL_S)
        self._sync.destroy()


def _check_free(address: str) -> None:
    """Make sure that the address can be bound now; PySyncObj would not say why it cannot.

    Raises:
        ListenError: It cannot.
    """
    host, port = split_address("store_listen", address)
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        why = error.strerror or str(error)
        raise ListenError(f"store_listen: cannot listen on {address}: {why}") from error
