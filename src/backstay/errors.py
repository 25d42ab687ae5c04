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

    def __str__(self) -> str:
        """Return the text; of an error without one its name, because no text means no error."""
        return super().__str__() or type(self).__name__


def text_of(error: BaseException) -> str:
    """Return what to tell of an error: its text, or its name if it has none.

    A place that says what is wrong takes an empty text for "nothing is".
    """
    return str(error) or type(error).__name__


class ConfigError(BackstayError, ValueError):
    """A setting is wrong; the message names it, its value and what is allowed."""


class ClosedError(BackstayError):
    """The client or server object is closed."""


class ListenError(ConfigError):
    """A server cannot listen at an address; the message names it and says why."""


class ForkError(BackstayError, RuntimeError):
    """This process was forked after it used backstay; the threads did not come along.

    Use the "spawn" start method, or make the first client after the fork.
    """


class ServerStartError(BackstayError):
    """A server of ``backstay local`` or ``LocalCluster`` did not start.

    The message has the end of its log.
    """


class ServerEndedError(BackstayError):
    """A server of ``backstay local`` or ``LocalCluster`` has ended.

    The message has the end of its log. With one copy of each slot its rows are lost.
    """


class TakenForDead(BackstayError):
    """The cluster took this server for dead and gave its slots to others.

    Its process ends; start it again. What it has in memory is worthless now, even if the cluster
    was wrong.
    """


class TransportError(BackstayError):
    """The network or the peer failed."""

    retry_safe = True


class ServerUnavailable(TransportError, ConnectionError):
    """No server, or no master of a slot, answered within the deadline; nothing is applied.

    Check the pserver, its address and firewalls.
    """


class NeverReached(ServerUnavailable):
    """No address answered within ``first_contact_timeout_ms``.

    Check the addresses, token and TLS.
    """


class DeadlineExceeded(TransportError, TimeoutError):
    """The peer did not answer a call that changes nothing.

    Check that node's load, or raise ``deadline_ms``.
    """


class OutcomeUnknown(TransportError):
    """A push may be applied or not: no answer came, or some servers refused their part.

    The client has repeated the same (stream, sequence), which is safe, until its deadline. A *new*
    push of the same gradients may count them twice, which most training tolerates.
    """

    retry_safe = False


class ProtocolError(TransportError):
    """The peer broke the protocol or has another version of it.

    Run one version, and check that the port is a pserver's.
    """

    retry_safe = False


class RequestRefused(BackstayError):
    """A server refused the request and applied nothing of it."""


class Unauthenticated(RequestRefused):
    """The token is missing or wrong (``BACKSTAY_TOKEN``), or the peer is of another cluster."""


class UnknownTable(RequestRefused, LookupError):
    """No table has that name; ``pserverctl tables`` lists them."""


class TableConflict(RequestRefused):
    """A table of that name has other settings, or a model makes other tables than its job has.

    The message shows the difference. Change the table's settings, or use another name.
    """


class SettingsChanged(RequestRefused):
    """Another operator changed the cluster's settings since the revision that was expected.

    Run ``pserverctl config get``, then set again.
    """


class InvalidRequest(RequestRefused, ValueError):
    """Wrong shape, dtype, number of keys or value, or a push that cannot be taken.

    It is too far ahead of the oldest open one, or the client's stream has ended.
    """


class NonFiniteGradient(RequestRefused, ValueError):
    """The gradients hold NaN or infinity.

    Lower the learning rate, or set the table's ``non_finite``.
    """


class MemoryLimitReached(RequestRefused):
    """No memory for the push's new rows.

    Add servers, raise ``memory_limit_bytes``, or give tables a capacity.
    """

    retry_safe = True


class LimitExceeded(RequestRefused):
    """A frame, key count or queue is over the limit that the message names.

    Raise the limit, or use smaller batches.
    """


class ExportRefused(RequestRefused):
    """An export cannot be started or stopped in that way; the message says why."""


class ResizeRefused(RequestRefused):
    """The nodes cannot be changed in that way, or not now; the message says why."""


class NotMaster(RequestRefused):
    """The node is not the master of these slots. The client finds the master."""

    retry_safe = True


class Stopping(RequestRefused):
    """The server is shutting down."""

    retry_safe = True


class StoreError(BackstayError):
    """Something is wrong with the coordination store, or with what was asked of it."""


class StoreUnavailable(StoreError, ConnectionError):
    """The coordination store did not answer within the deadline; the message says who was tried.

    A write may have happened, so repeat only transactions that compare revisions, as all of
    backstay's own do. Check the endpoints, and that a majority of members lives.
    """

    retry_safe = True


class StoreAuthError(StoreError):
    """The store refuses the user, password, secret or certificate; the message says which."""


class StoreDataLost(StoreError):
    """The store lost what it had confirmed, or another store answers.

    Repair it, then restart the nodes. A store that was wiped or restored from an old copy must not
    be relied on: leases and elections that it hands out could exist twice.
    """


class LeaseLost(StoreError):
    """The lease is over and its keys are gone; the node registers anew."""


class WatchLost(StoreError):
    """The store no longer has the history that the watch needs; the reader starts a new one."""

    retry_safe = True


class CheckpointError(BackstayError):
    """Something is wrong with a checkpoint, or with the storage it is kept on."""


class CheckpointNotFound(CheckpointError, LookupError):
    """No finished checkpoint has that id; the message names the id and the storage."""


class CheckpointRefused(CheckpointError):
    """It cannot be written, restored or deleted now; the message says what to do.

    Another one is under way or builds on it, its slot count differs, or ``--slots`` was given while
    a job is not done.
    """


class NoCheckpointFolder(CheckpointRefused):
    """The cluster keeps no checkpoints. Run ``pserverctl config set checkpoint_url=...``."""


class CheckpointDamaged(CheckpointError):
    """A file is missing, changed, or contradicts another; the message names it.

    Nothing of the checkpoint was used. Check the storage, or restore an older checkpoint.
    """


class CheckpointUnavailable(CheckpointError, OSError):
    """The storage cannot be reached, read or written; the message names it and says why."""

    retry_safe = True


class DataError(BackstayError):
    """Something is wrong with training data, or with the place where it is kept."""


class DataUnavailable(DataError, OSError):
    """Data cannot be found, reached or read; the message names the file or table.

    Every worker must reach it under the same name.
    """

    retry_safe = True


class DataDamaged(DataError):
    """A whole file cannot be read, such as a Parquet file without its footer.

    Write it anew, or leave it out.
    """


class DataChanged(DataError):
    """A file or table has changed since the job's tasks were made; the message shows how.

    Put the old one back, or begin a new job.
    """


class TooManyBadRecords(DataError):
    """More records are damaged than ``max_bad_records``; the message names the last one."""


class JobError(BackstayError):
    """Something is wrong with a job, its job master or one of its tasks."""


class JobRefused(JobError):
    """The job cannot be made, joined or changed in that way; the message says why.

    It has other settings, is over, or its data has changed.
    """


class UnknownJob(JobError, LookupError):
    """No job has that name; the message lists the jobs."""


class NotJobMaster(JobError):
    """The process is not the job master, or not yet. Read the job's record again."""

    retry_safe = True


class NotLeading(JobError):
    """In mode sync: the worker does not lead that task. Ask the job master again."""

    retry_safe = True


class WorkerReplaced(JobError):
    """Another process has this worker's name and tasks; this process ends."""


class TaskLeaseLost(JobError):
    """The task's lease was revoked: stop the task.

    The worker that has the task now pushes the same batches under the same numbers, and each slot
    counts each of them once.
    """


class NonFiniteLoss(JobError, ArithmeticError):
    """The loss of a batch is NaN or infinite, and its task failed. Nothing of the batch was pushed.

    Check the records in the message, or lower the learning rate.
    """


class TaskFailed(JobError):
    """Tasks failed more often than ``max_task_retries``; the message names the first.

    ``backstay jobs show`` has the errors and records. Mend the cause, then ``backstay jobs retry``.
    """


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
    """Slots lost all copies, or a checkpoint was restored.

    Jobs go back to the checkpoint by themselves. Start other trainers again together, from
    ``client.checkpoints.restored().progress``. Without a checkpoint: ``pserverctl slots
    accept-loss``, then ``backstay train --fresh``.
    """
