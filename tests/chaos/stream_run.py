"""Runs of jobs over topics: as ``job_run``, with a broker, a producer, an export and a follower.

Each job takes some faults, is then let catch up, stopped and judged; the next one goes on with the
deck.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from backstay.errors import BackstayError
from tests.chaos.cluster import ChaosCluster, NotYet
from tests.chaos.export_faults import EXPORT_FAULTS
from tests.chaos.job_faults import JOB_FAULTS, JobFault, JobOver
from tests.chaos.job_run import LAST_JOB_S, JobsResult, JobStage, strike, take
from tests.chaos.jobs import ChaosJob
from tests.chaos.kafka_hosts import Brokers
from tests.chaos.network import Loopback, Namespaces
from tests.chaos.run import FOLDER_PREFIX, say
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


@dataclass
class _World:
    """What all jobs of a run share."""

    cluster: ChaosCluster
    brokers: Brokers
    sink: Sink
    folder: Path


def run_streams(stage: StreamStage, seconds: float) -> JobsResult:
    """Run jobs for about so long, or, with chosen faults, until all have struck."""
    result = JobsResult(stage)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    network = Namespaces() if is_inside() else Loopback()
    sink: Sink = S3Sink(folder, network) if stage.s3 else FolderSink(folder, mounts=is_inside())
    cluster = ChaosCluster(stage.plan, network, folder)
    brokers = Brokers(network, folder, stage.brokers)
    world = _World(cluster, brokers, sink, folder)
    draw = random.Random(stage.seed)
    deck = iter(stage.kinds) if stage.kinds else _deck(draw)
    try:
        cluster.start()
        brokers.start()
        # A broker alone may take half a minute to start.
        until_s = time.monotonic() + seconds
        say(f"{stage.plan.nodes} servers and {stage.brokers} brokers are there")
        for number in range(1000):
            makers = take(deck, len(stage.kinds) or FAULTS_OF_A_STREAM)
            is_late = time.monotonic() > until_s - LAST_JOB_S
            if not makers or (number and not stage.kinds and is_late):
                break
            limit_s = float("inf") if stage.kinds else until_s
            _run_job(world, stage, number, draw, makers, limit_s, result)
            if not result.passed:
                break
    except (NotYet, RuntimeError, TimeoutError, BackstayError) as error:
        result.stuck = f"{type(error).__name__}: {error}"
        say(f"STUCK: {result.stuck}")
    finally:
        brokers.stop()
        cluster.stop()
        sink.close()
        network.close()
        if result.passed and not stage.keeps_logs:
            shutil.rmtree(folder)
        else:
            result.kept = str(folder)
    return result


def _run_job(
    world: _World,
    stage: StreamStage,
    number: int,
    draw: random.Random,
    kinds: Sequence[str],
    until_s: float,
    result: JobsResult,
) -> None:
    """Run one job to its end, while faults strike it, and judge it."""
    name = f"stream-{number}"
    shape = StreamShape(name, number, brokers=world.brokers.addresses, sink=world.sink.url(name))
    world.brokers.create_topic(shape.topic, PARTITIONS)
    job = ChaosJob(world.cluster, world.folder / name, shape)
    parts = StreamParts(
        world.brokers,
        Filling(world.brokers, shape.topic, lambda: shape.records_per_task * job.completions()),
        FollowerProcess(world.cluster, job.folder, shape.sink, f"{name}/counts"),
    )
    arena = StreamArena(
        cluster=world.cluster,
        job=job,
        draw=draw,
        parts=parts,
        sink=world.sink,
        outage_s=stage.outage_s,
    )
    try:
        parts.filling.start()
        job.start()
        job.wait_going_on(BEGIN_LIMIT_S)
        parts.follower.start()
        parts.follower.wait_fresh()
        say(f"{name} trains, exports and is followed")
        for kind in kinds:
            if job.is_over or time.monotonic() > until_s:
                break
            if not _fits(ALL_FAULTS[kind], arena):
                continue
            try:
                strike(arena, ALL_FAULTS[kind](arena))
            except JobOver as over:
                say(f"{kind}: {over}")
                break
            result.struck.append(kind)
        verdict = judge_stream(world.cluster, job, parts)
        result.jobs.append(verdict)
        say(f"{name}: {'; '.join(verdict.faults) or 'each record counts once, and is served'}")
    finally:
        if parts.follower.is_running:
            parts.follower.kill()
        job.close()


def _deck(draw: random.Random) -> Iterator[str]:
    """Yield all kinds in a random order, before any comes again; those of streams twice."""
    kinds = [*OWN_FAULTS, *OWN_FAULTS, *JOB_FAULTS]
    while True:
        draw.shuffle(kinds)
        yield from kinds


def _fits(kind: type[JobFault], arena: StreamArena) -> bool:
    """Whether a fault can strike here."""
    if kind.needs_etcd and arena.cluster.etcd is None:
        return False
    if not issubclass(kind, StreamFault):
        return True
    is_folder = isinstance(arena.sink, FolderSink)
    has_room = isinstance(arena.sink, FolderSink) and arena.sink.is_mounted
    return (
        (arena.cluster.network.has_faults or not kind.needs_network)
        and (is_folder or not kind.needs_folder)
        and (has_room or not kind.needs_room)
        and len(arena.parts.brokers.members) >= kind.needs_brokers
    )
