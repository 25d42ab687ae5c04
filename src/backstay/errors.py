"""Every error a user of backstay can meet, in one tree.

::

    BackstayError
    ├── ConfigError            an argument, file or environment value is wrong
    │   └── ListenError        a server cannot listen where it should
    ├── ClosedError            the client or server object was already closed
    ├── ForkError              used in a process forked after its threads had started
    ├── ServerStartError       a server of a local cluster did not start
    ├── ServerEndedError       a server of a local cluster has ended
    ├── TakenForDead           this server was taken for dead, and its slots went to others
    ├── TransportError         the network or the peer failed
    │   ├── ServerUnavailable  no server answers at that address within the deadline
    │   │   └── NeverReached   no server ever answered at any of the addresses
    │   ├── DeadlineExceeded   the peer is there but did not answer in time
    │   ├── OutcomeUnknown     a push was sent and no answer came: it may or may not be applied
    │   └── ProtocolError      the peer does not speak our protocol (or speaks another version)
    ├── RequestRefused         the server refused; nothing of this request was applied there
    │   ├── Unauthenticated    wrong or missing token, wrong cluster
    │   ├── UnknownTable       no table of that name
    │   ├── TableConflict      a table of that name exists with other settings
    │   ├── SettingsChanged    another caller has changed the cluster's settings since
    │   ├── InvalidRequest     wrong shape, dtype, key count, sequence or field
    │   ├── NonFiniteGradient  NaN or infinity, and the table's policy is to refuse
    │   ├── MemoryLimitReached no room for new rows
    │   ├── LimitExceeded      a frame, key count or queue is over its limit
    │   ├── ExportRefused      the export cannot be started or stopped in that way
    │   ├── ResizeRefused      the nodes cannot be changed in that way, or not now
    │   ├── NotMaster          that node does not hold these slots (any more)
    │   └── Stopping           the server is shutting down
    ├── StoreError             the coordination store
    │   ├── StoreUnavailable   it does not answer within the deadline
    │   ├── StoreAuthError     it refuses the credentials, the secret or the certificate
    │   ├── StoreDataLost      it has lost what it had confirmed, or is another store
    │   ├── LeaseLost          the lease is over and its keys are gone
    │   └── WatchLost          events are gone: read again, and watch from there
    ├── CheckpointError        a checkpoint, or the storage it is kept on
    │   ├── CheckpointNotFound there is no checkpoint of that id
    │   ├── CheckpointRefused  it cannot be written, restored or deleted as things are
    │   │   └── NoCheckpointFolder  no folder for checkpoints is set
    │   ├── CheckpointDamaged  a file of it is missing, changed or contradicts another one
    │   └── CheckpointUnavailable  its storage cannot be reached, read or written
    ├── DataError              training data, or the place it is kept at
    │   ├── DataUnavailable    it cannot be reached or read
    │   ├── DataDamaged        a file is not of its format, as a whole
    │   ├── DataChanged        a file is not the one from which the tasks were made
    │   └── TooManyBadRecords  more damaged records than the job allows
    ├── JobError               a job, its job master or one of its tasks
    │   ├── JobRefused         the job cannot be made, joined or changed in that way
    │   ├── UnknownJob         the cluster has no job of that name
    │   ├── NotJobMaster       that process is not the job master (yet, or any more)
    │   ├── WorkerReplaced     another process has joined under this worker's name
    │   ├── NotLeading         that worker does not lead that task (sync mode)
    │   ├── TaskLeaseLost      the worker's right to work on its task was taken back
    │   ├── NonFiniteLoss      the loss of a batch is NaN or infinite
    │   ├── TaskFailed         tasks failed for good, and the job with them
    │   └── KubernetesError    the API of Kubernetes refused a call, or did not answer
    └── StateLost              slots lost all their copies, or a checkpoint was restored

``retry_safe`` on each class says whether the same call may simply be made again without
any risk of counting an update twice or losing one.

This module imports nothing of the package and never does I/O.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "BackstayError",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointNotFound",
    "CheckpointRefused",
    "CheckpointUnavailable",
    "ClosedError",
    "ConfigError",
    "DataChanged",
    "DataDamaged",
    "DataError",
    "DataUnavailable",
    "DeadlineExceeded",
    "ExportRefused",
    "ForkError",
    "InvalidRequest",
    "JobError",
    "JobRefused",
    "KubernetesError",
    "LeaseLost",
    "LimitExceeded",
    "ListenError",
    "MemoryLimitReached",
    "NeverReached",
    "NoCheckpointFolder",
    "NonFiniteGradient",
    "NonFiniteLoss",
    "NotJobMaster",
    "NotLeading",
    "NotMaster",
    "OutcomeUnknown",
    "ProtocolError",
    "RequestRefused",
    "ResizeRefused",
    "ServerEndedError",
    "ServerStartError",
    "ServerUnavailable",
    "SettingsChanged",
    "StateLost",
    "Stopping",
    "StoreAuthError",
    "StoreDataLost",
    "StoreError",
    "StoreUnavailable",
    "TableConflict",
    "TakenForDead",
    "TaskFailed",
    "TaskLeaseLost",
    "TooManyBadRecords",
    "TransportError",
    "Unauthenticated",
    "UnknownJob",
    "UnknownTable",
    "WatchLost",
    "WorkerReplaced",
]


class BackstayError(Exception):
    """Base of every error raised by backstay."""

    retry_safe: ClassVar[bool] = False


def text_of(error: BaseException) -> str:
    """Return what to tell of an error: its text, or its name if it has none.

    A place that says what is wrong takes an empty text for "nothing is".
    """
    return str(error) or type(error).__name__


class ConfigError(BackstayError, ValueError):
    """A setting is wrong; the message names the setting, its value and what is allowed."""


class ClosedError(BackstayError):
    """The object was closed before this call."""


class ListenError(ConfigError):
    """An address cannot be listened on; the message names it and says why."""


class ForkError(BackstayError, RuntimeError):
    """This process was forked after backstay was used; the threads did not come along.

    Use the "spawn" start method, or make the first client after the fork.
    """


class ServerStartError(BackstayError):
    """A server of a local cluster did not start; the message holds the end of its log."""


class ServerEndedError(BackstayError):
    """A server of a local cluster has ended; the message holds the end of its log."""


class TakenForDead(BackstayError):
    """The cluster took this server process for dead and gave its slots to others; start it again.

    What it has in memory is worthless now, even if the cluster was wrong.
    """


class TransportError(BackstayError):
    """The network or the peer process failed."""

    retry_safe = True


class ServerUnavailable(TransportError, ConnectionError):
    """No server answered at the address named in the message within the deadline."""


class NeverReached(ServerUnavailable):
    """None of the addresses has answered a first time: they are wrong, or no server runs there."""


class DeadlineExceeded(TransportError, TimeoutError):
    """The peer did not answer in time. Raised only for calls that change nothing."""


class OutcomeUnknown(TransportError):
    """A push was sent and its answer never came: it may or may not have been applied.

    Not safe to repeat as a *new* push. The client has already repeated the same
    (stream, sequence), which is safe, until its deadline.
    """

    retry_safe = False


class ProtocolError(TransportError):
    """The peer broke the protocol or speaks another version of it."""

    retry_safe = False


class RequestRefused(BackstayError):
    """A server refused the request and applied nothing of it."""


class Unauthenticated(RequestRefused):
    """The token is missing or wrong, or the peer belongs to another cluster."""


class UnknownTable(RequestRefused, LookupError):
    """No table of that name or id exists in the cluster."""


class TableConflict(RequestRefused):
    """A table of that name exists with other settings; the message shows the difference."""


class SettingsChanged(RequestRefused):
    """Another caller has changed the cluster's settings since the revision that was expected."""


class InvalidRequest(RequestRefused, ValueError):
    """Wrong shape, dtype, number of keys or field value."""


class NonFiniteGradient(RequestRefused, ValueError):
    """The gradients hold NaN or infinity and the table's policy is to refuse them."""


class MemoryLimitReached(RequestRefused):
    """The server's memory limit leaves no room for the new rows of this push."""

    retry_safe = True


class LimitExceeded(RequestRefused):
    """A frame, key count or queue is over the limit named in the message."""


class ExportRefused(RequestRefused):
    """An export cannot be started or stopped in that way; the message says why."""


class ResizeRefused(RequestRefused):
    """The cluster's nodes cannot be changed in that way, or not now; the message says why."""


class NotMaster(RequestRefused):
    """The node does not hold these slots; fetch the routing table and try again."""

    retry_safe = True


class Stopping(RequestRefused):
    """The server is shutting down and takes no new requests."""

    retry_safe = True


class StoreError(BackstayError):
    """Something is wrong with the coordination store, or with what was asked of it."""


class StoreUnavailable(StoreError, ConnectionError):
    """The coordination store did not answer within the deadline; the message says who was tried.

    A write may have happened nevertheless. It may be repeated where that does no harm, as with
    a transaction that compares revisions; all of backstay's own writes are of that kind.
    """

    retry_safe = True


class StoreAuthError(StoreError):
    """The coordination store refuses the credentials; the message says which."""


class StoreDataLost(StoreError):
    """The coordination store no longer has what it had confirmed, or is another one.

    A store that was wiped or restored from an old copy must not be relied on: leases and
    elections that it hands out could exist twice.
    """


class LeaseLost(StoreError):
    """The lease is over: its time ran out or it was revoked, and its keys are gone."""


class WatchLost(StoreError):
    """A watch cannot go on without a gap: read again, and watch from there."""

    retry_safe = True


class CheckpointError(BackstayError):
    """Something is wrong with a checkpoint, or with the storage it is kept on."""


class CheckpointNotFound(CheckpointError, LookupError):
    """The storage has no finished checkpoint of that id; the message names both."""


class CheckpointRefused(CheckpointError):
    """It cannot be written, restored or deleted as things are; the message says what to do."""


class NoCheckpointFolder(CheckpointRefused):
    """The cluster's setting ``checkpoint_url`` is empty: it keeps no checkpoints."""


class CheckpointDamaged(CheckpointError):
    """A file of the checkpoint is not what it should be; the message names it and says why.

    It was cut short, changed, lost, or written by another program. Nothing of it was used.
    """


class CheckpointUnavailable(CheckpointError, OSError):
    """The storage cannot be reached, read or written; the message names it and says why."""

    retry_safe = True


class DataError(BackstayError):
    """Something is wrong with training data, or with the place where it is kept."""


class DataUnavailable(DataError, OSError):
    """Data cannot be found, reached or read; the message names the file or table and says why."""

    retry_safe = True


class DataDamaged(DataError):
    """A file is not of its format as a whole, such as a Parquet file without its footer."""


class DataChanged(DataError):
    """A file or table is not what it was when the tasks were made; the message shows how."""


class TooManyBadRecords(DataError):
    """More records are damaged than the job allows; the message names the last of them."""


class JobError(BackstayError):
    """Something is wrong with a job, its job master or one of its tasks."""


class JobRefused(JobError):
    """The job cannot be made, joined or changed in that way; the message says why."""


class UnknownJob(JobError, LookupError):
    """The cluster has no job of that name; the message names the jobs that it has."""


class NotJobMaster(JobError):
    """That process is not the job master yet, or any more: read the job's record again."""

    retry_safe = True


class NotLeading(JobError):
    """That worker does not lead that task, or no longer; ask the job master again."""

    retry_safe = True


class WorkerReplaced(JobError):
    """Another process has joined under this worker's name; this one is to end."""


class TaskLeaseLost(JobError):
    """The worker's lease of its task was revoked: stop working on the task, drop what is left.

    Pushes that had left may or may not be applied. The worker that has the task now pushes the same
    batches under the same numbers, and each slot counts each of them once.
    """


class NonFiniteLoss(JobError, ArithmeticError):
    """The loss of a batch is NaN or infinite; nothing of the batch was pushed."""


class TaskFailed(JobError):
    """Tasks failed more often than they may, and the job with them; the message names the first."""


class KubernetesError(JobError):
    """The API of Kubernetes refused a call, or did not answer; the message has its words.

    Attributes:
        status: HTTP status of the answer; 0: there was none.
        reason: The answer's word for it, such as ``AlreadyExists``.
    """

    def __init__(self, text: str = "", *, status: int = 0, reason: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.reason = reason


class StateLost(BackstayError):
    """Rows that were relied on are gone: with all their copies, or for those of a checkpoint."""
