"""``python -m tests.chaos``: the fault-injection suite as a program.

::

    python -m tests.chaos --seed 1 --minutes 3            # random faults, both stores
    python -m tests.chaos --store etcd --faults store_down,drop   # these, once each
    python -m tests.chaos restart --store etcd            # all nodes stop and start again
    python -m tests.chaos failover --kills 50             # how long a killed node holds up trainers
    python -m tests.chaos failover --signal STOP          # a node that stands still
    python -m tests.chaos failover --partition            # a node that is cut off
    python -m tests.chaos jobs --minutes 1                # jobs, and all that may happen to them
    python -m tests.chaos jobs --faults restore,master_sigkill   # these, once each
    python -m tests.chaos streams --minutes 2             # jobs over topics of Kafka, with exports
    python -m tests.chaos streams --faults leader_sigkill --brokers 3
    python -m tests.chaos streams --faults sink_away --s3 --outage-s 60
    python -m tests.chaos clean                           # remove what killed runs left in /tmp

The last line on standard output is ``CHAOS {json}``, ``FAILOVER {json}``, ``JOBS {json}`` or
``STREAMS {json}``. Exit code 0 if the verdict is true, 1 if not.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from tests.chaos import sandbox
from tests.chaos.cluster import Plan, StoreKind
from tests.chaos.deck import BY_KIND
from tests.chaos.faults import Fault, KillNode, PauseNode
from tests.chaos.job_faults import JOB_FAULTS
from tests.chaos.job_run import JobStage, run_jobs
from tests.chaos.network_faults import Partition
from tests.chaos.report import failover_figures, print_line, quantiles, throughput
from tests.chaos.run import (
    FOLDER_PREFIX,
    Stage,
    StageResult,
    run_each,
    run_restart,
    run_stage,
    say,
    strike,
    under_load,
)
from tests.chaos.stream_run import ALL_FAULTS, StreamStage, run_streams
from tests.kafka.broker import kafka_jars, missing_programs

STORES: tuple[StoreKind, ...] = ("embedded", "etcd")
# A store that stays away for a minute leaves no time for anything else in a short run.
LONG_MINUTES = 10


def main(arguments: list[str]) -> int:
    """Run; return the exit code."""
    options = _options(arguments)
    if options.command == "clean":
        return _clean()
    if options.command == "streams":
        if missing := missing_programs():
            say(f"streams are left out: {missing}")
            return 0
        # From inside the namespaces no package registry is reached.
        kafka_jars()
    if not sandbox.is_inside() and not options.loopback:
        reason = sandbox.why_not()
        if not reason:
            return sandbox.enter(arguments)
        say(f"no namespaces, so no faults of the network: {reason}")
    # A run that is told to end removes its processes and folders first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if options.command == "jobs":
        return _jobs(options)
    if options.command == "streams":
        return _streams(options)
    return _failover(options) if options.command == "failover" else _chaos(options)


def _stage(options: argparse.Namespace, store: StoreKind, number: int) -> Stage:
    # Three copies with the embedded store, two with etcd; the other way round for even seeds.
    three = (store == "embedded") == bool(options.seed % 2)
    members = 3 if store == "etcd" else 1
    plan = Plan(
        store, nodes=4, replicas=options.replicas or (3 if three else 2), etcd_members=members
    )
    outage_s = options.outage_s or (60.0 if options.minutes >= LONG_MINUTES else 15.0)
    return Stage(plan, options.seed * 1000 + number, outage_s=outage_s, keeps_logs=options.keep)


def _run(options: argparse.Namespace, stage: Stage, seconds: float) -> StageResult:
    if options.command == "restart":
        return run_restart(stage, clean=not options.unclean)
    if options.faults:
        return run_each(stage, [BY_KIND[kind] for kind in options.faults])
    return run_stage(stage, seconds)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument(
        "command",
        nargs="?",
        choices=("run", "restart", "failover", "jobs", "streams", "clean"),
        default="run",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--store", choices=STORES, help="default: both, one after the other")
    parser.add_argument(
        "--faults", type=_kinds, default=[], help="kinds, by commas; default: any, at random"
    )
    parser.add_argument(
        "--outage-s", type=float, help="how long the store, a broker or a sink stays away"
    )
    parser.add_argument("--unclean", action="store_true", help="restart: SIGKILL, not SIGTERM")
    parser.add_argument("--replicas", type=int, choices=(2, 3))
    parser.add_argument("--nodes", type=int, default=3, help="of failover, jobs, streams")
    parser.add_argument("--brokers", type=int, choices=(1, 3), default=1, help="of streams")
    parser.add_argument("--s3", action="store_true", help="streams: export to an S3 server")
    parser.add_argument("--kills", type=int, default=50, help="how often a node is hit")
    parser.add_argument("--signal", choices=("KILL", "STOP"), default="KILL")
    parser.add_argument("--partition", action="store_true")
    parser.add_argument("--keep", action="store_true", help="keep the logs also if it passes")
    parser.add_argument("--loopback", action="store_true", help="make no namespaces")
    options = parser.parse_args(arguments)
    known: Collection[str] = BY_KIND
    if options.command in ("jobs", "streams"):
        known = JOB_FAULTS if options.command == "jobs" else ALL_FAULTS
    for kind in options.faults:
        if kind not in known:
            parser.error(f"--faults: {kind!r} is not one of {', '.join(known)}")
    return options


def _kinds(text: str) -> list[str]:
    return text.split(",")


def _chaos(options: argparse.Namespace) -> int:
    stores = [options.store] if options.store else STORES
    # Starting and judging a stage takes time as well.
    seconds = options.minutes * 60 / len(stores) - 20
    results = [
        _run(options, _stage(options, store, number), max(10.0, seconds))
        for number, store in enumerate(stores)
    ]
    struck = [one for result in results for one in result.struck]
    verdicts = [result.verdict.verdict for result in results]
    worst = next((v for v in ("false", "unknown") if v in verdicts), "true")
    fields = {
        "seed": options.seed,
        "minutes": options.minutes,
        "stores": list(stores),
        "network_faults": sandbox.is_inside(),
        "faults": dict(sorted(Counter(one.kind for one in struck).items())),
        "pushes_acknowledged": sum(result.verdict.acknowledged for result in results),
        "pushes_unknown": sum(result.verdict.unknown_outcome for result in results),
        "lost": sum(result.verdict.lost for result in results),
        "duplicated": sum(result.verdict.duplicated for result in results),
        "torn": sum(result.verdict.torn for result in results),
        "stale_reads": sum(result.verdict.stale_reads for result in results),
        "replicas_unequal": sum(result.verdict.unequal for result in results),
        "checkpoints": sum(result.verdict.checkpoints for result in results),
        "checkpoint_faults": sum(result.verdict.checkpoint_faults for result in results),
        "failover_ms": failover_figures(struck),
        "throughput": {
            result.stage.plan.store: throughput(result.histories, result.struck)
            for result in results
        },
        "stuck": [result.stuck for result in results if result.stuck],
        "kept": [result.kept for result in results if result.kept],
        "verdict": worst,
    }
    print_line("CHAOS", fields)
    return 0 if all(result.passed for result in results) else 1


def _failover(options: argparse.Namespace) -> int:
    if options.partition and not sandbox.is_inside():
        say("a partition needs namespaces")
        return 1
    kind: type[KillNode | PauseNode | Partition] = KillNode
    if options.partition:
        kind = Partition
    elif options.signal == "STOP":
        kind = PauseNode
    store: StoreKind = options.store or "etcd"
    plan = Plan(store, nodes=options.nodes, replicas=2)
    result = StageResult(Stage(plan, options.seed, keeps_logs=options.keep))
    with under_load(result.stage, result) as arena:
        for _ in range(options.kills):
            # Long enough for a lease to end; a process that is killed needs no such time.
            hold_s = 0.5 if kind is KillNode else plan.lease_ttl_ms / 1000 + 2
            fault: Fault = kind(arena, "any")
            result.struck.append(strike(arena, fault, hold_s=hold_s))
    fields: dict[str, object] = {
        "kind": kind.kind,
        "seed": options.seed,
        "store": store,
        "nodes": plan.nodes,
        "replicas": plan.replicas,
        "lease_ttl_ms": plan.lease_ttl_ms,
        "failover_ms": quantiles([one.failover_ms for one in result.struck]),
        "heal_ms": quantiles([one.heal_ms for one in result.struck]),
        "throughput": throughput(result.histories, result.struck),
        "pushes_acknowledged": result.verdict.acknowledged,
        "lost": result.verdict.lost,
        "duplicated": result.verdict.duplicated,
        "stuck": result.stuck,
        "kept": result.kept,
        "verdict": result.verdict.verdict,
    }
    print_line("FAILOVER", fields)
    return 0 if result.passed else 1


def _jobs(options: argparse.Namespace) -> int:
    plan = Plan(
        options.store or "etcd", nodes=options.nodes, replicas=options.replicas or 2, slots=16
    )
    stage = JobStage(plan, options.seed, options.faults, keeps_logs=options.keep)
    result = run_jobs(stage, options.minutes * 60)
    print_line("JOBS", result.figures())
    return 0 if result.passed else 1


def _streams(options: argparse.Namespace) -> int:
    plan = Plan("etcd", nodes=options.nodes, replicas=options.replicas or 2, slots=16)
    is_long = options.minutes >= LONG_MINUTES
    stage = StreamStage(
        plan,
        options.seed,
        options.faults,
        keeps_logs=options.keep,
        brokers=options.brokers,
        s3=options.s3,
        outage_s=options.outage_s or (60.0 if is_long else 6.0),
    )
    result = run_streams(stage, options.minutes * 60)
    print_line("STREAMS", result.figures())
    return 0 if result.passed else 1


def _clean() -> int:
    """Remove folders of runs that were killed; all else went with them."""
    for folder in sorted(Path(tempfile.gettempdir()).glob(FOLDER_PREFIX + "*")):
        shutil.rmtree(folder)
        say(f"removed {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
