"""Runs of jobs over topics: as ``job_run``, with a broker, a producer, an export and a follower.

Each job takes some faults, is then let catch up, stopped and judged; the next one goes on with the
deck.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.export_faults import EXPORT_FAULTS
from tests.chaos.job_faults import JOB_FAULTS, JobArena, JobFault
from tests.chaos.job_run import JobsResult, JobStage, JobWorld, run_jobs
from tests.chaos.jobs import ChaosJob, JobVerdict
from tests.chaos.kafka_hosts import Brokers
from tests.chaos.run import say
from tests.chaos.sandbox import is_inside
from tests.chaos.sinks import FolderSink, S3Sink, Sink
from tests.chaos.stream_faults import STREAM_FAULTS, StreamArena, StreamFault
from tests.chaos.stream_jobs import (
    PARTITIONS,
    Filling,
    FollowerProcess,
    StreamParts,
    StreamShape,
    judge_stream,
)

__all__ = ["ALL_FAULTS", "StreamStage", "run_streams"]

# It takes longer to begin than another job, and to be judged.
FAULTS_OF_A_STREAM = 8
# Beside everything else that a busy machine starts.
BEGIN_LIMIT_S = 300.0
# By the name that they are counted under.
OWN_FAULTS = {kind.kind: kind for kind in (*STREAM_FAULTS, *EXPORT_FAULTS)}
ALL_FAULTS: dict[str, type[JobFault]] = {**OWN_FAULTS, **JOB_FAULTS}


@dataclass(frozen=True)
class StreamStage(JobStage):
    """As ``JobStage``.

    Attributes:
        brokers: 1 or 3.
        s3: The sink is an S3 server; otherwise a folder.
        outage_s: How long what is away stays away.
    """

    brokers: int = 1
    s3: bool = False
    outage_s: float = 6.0


class StreamWorld(JobWorld):
    """Brokers, and where exports go, as well; one job and its follower."""

    faults = ALL_FAULTS
    is_right = "each record counts once, and is served"

    def __init__(self, stage: StreamStage, folder: Path) -> None:
        super().__init__(stage, folder)
        self.outage_s = stage.outage_s
        self.faults_of_a_job = len(stage.kinds) or FAULTS_OF_A_STREAM
        self.sink: Sink = (
            S3Sink(folder, self.network) if stage.s3 else FolderSink(folder, mounts=is_inside())
        )
        self.brokers = Brokers(self.network, folder, stage.brokers)

    def start(self) -> None:
        super().start()
        self.brokers.start()
        say(f"{self.stage.plan.nodes} servers and {len(self.brokers.members)} brokers are there")

    def stop(self) -> None:
        self.brokers.stop()
        self.sink.close()
        super().stop()

    def deck(self) -> list[str]:
        """Return all kinds; those of streams twice."""
        return [*OWN_FAULTS, *OWN_FAULTS, *JOB_FAULTS]

    def run_job(self, number: int, strike_all: Callable[[JobArena], None]) -> JobVerdict:
        """Run one job and its follower, while faults strike them, and judge both."""
        name = f"stream-{number}"
        shape = StreamShape(name, number, brokers=self.brokers.addresses, sink=self.sink.url(name))
        self.brokers.create_topic(shape.topic, PARTITIONS)
        job = ChaosJob(self.cluster, self.folder / name, shape)
        parts = StreamParts(
            self.brokers,
            Filling(self.brokers, shape.topic, lambda: shape.records_per_task * job.completions()),
            FollowerProcess(self.cluster, job.folder, shape.sink, f"{name}/counts"),
        )
        arena = StreamArena(
            cluster=self.cluster,
            job=job,
            draw=self.draw,
            parts=parts,
            sink=self.sink,
            outage_s=self.outage_s,
        )
        try:
            parts.filling.start()
            job.start()
            job.wait_going_on(BEGIN_LIMIT_S)
            parts.follower.start()
            parts.follower.wait_fresh()
            say(f"{name} trains, exports and is followed")
            strike_all(arena)
            return judge_stream(self.cluster, job, parts)
        finally:
            if parts.follower.is_running:
                parts.follower.kill()
            job.close()

    def fits(self, kind: type[JobFault]) -> bool:
        """Whether a fault can strike here."""
        if kind.needs_etcd and self.cluster.etcd is None:
            return False
        if not issubclass(kind, StreamFault):
            return True
        is_folder = isinstance(self.sink, FolderSink)
        has_room = isinstance(self.sink, FolderSink) and self.sink.is_mounted
        return (
            (self.network.has_faults or not kind.needs_network)
            and (is_folder or not kind.needs_folder)
            and (has_room or not kind.needs_room)
            and len(self.brokers.members) >= kind.needs_brokers
        )


def run_streams(stage: StreamStage, seconds: float) -> JobsResult:
    """Run jobs for about so long, or, with chosen faults, until all have struck."""
    return run_jobs(stage, seconds, lambda folder: StreamWorld(stage, folder))
