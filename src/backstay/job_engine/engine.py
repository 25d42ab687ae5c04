"""The engine of one job: it takes events, decides, and stages the records that must be written.

Each event is a method. Follow one from here:

| module of ``events`` | what happens | methods |
| --- | --- | --- |
| workers | a worker joins, calls, leaves; a launcher reports | ``join``, ``hear``, ``report`` |
| tasks | a worker asks for a task, renews leases, ends them | ``give``, ``renew``, ``complete`` |
| rounds | a round begins or ends, the job ends | ``advance``, ``evaluated``, ``finish`` |
| checkpoints | a checkpoint is due, written or missing | ``take_checkpoint_due`` |
| restores | the cluster was restored, or rows are lost | ``rows_are``, ``follow`` |
| orders | a user or a rule wants something | ``stop``, ``scale``, ``retry_dead_letters`` |
| streams | data without an end have grown | ``plan_take``, ``take`` |
| upkeeps | the rows are seen to at the end of a pass | ``keep_rows``, ``note_upkeep`` |
| timers | time passes | ``expire``, ``plan_lease_ttl`` |

The state that they share is ``JobCore``. The caller drives the engine: it calls ``advance`` after
events, ``expire`` when time has passed, and answers when the staged records are written. The job
master does so over the coordination store (``master.job``), ``--local`` over memory, the simulator
in virtual time. Does no I/O; reads time from the clock that it is given.
"""

from __future__ import annotations

from backstay.job_engine.events.checkpoints import CheckpointEvents
from backstay.job_engine.events.orders import OrderEvents
from backstay.job_engine.events.restores import RestoreEvents
from backstay.job_engine.events.rounds import RoundEvents
from backstay.job_engine.events.streams import StreamEvents
from backstay.job_engine.events.tasks import TaskEvents
from backstay.job_engine.events.timers import TimerEvents
from backstay.job_engine.events.upkeeps import UpkeepEvents
from backstay.job_engine.events.workers import WorkerEvents

__all__ = ["JobEngine"]


class JobEngine(
    WorkerEvents,
    TaskEvents,
    RoundEvents,
    CheckpointEvents,
    UpkeepEvents,
    RestoreEvents,
    OrderEvents,
    StreamEvents,
    TimerEvents,
):
    """One job; not thread-safe."""
