"""Train DeepFM on a click log: here alone, on a cluster of this machine, or as one trainer.

    python -m examples.deepfm.train --form frappe --data frappe_ctr.tsv.gz --local
    python -m examples.deepfm.train --form frappe --data frappe_ctr.tsv.gz
    python -m examples.deepfm.train --form criteo --data train.txt --role trainer

The second form starts three servers and two trainers; the third is such a trainer, which finds
the servers in PADDLE_PSERVERS_IP_PORT_LIST.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import paddle

from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer import paddle as distributed
from examples.common.dataset import Examples, renumber
from examples.common.launch import run_trainers
from examples.common.training import RunningScore, fit, print_report, score
from examples.deepfm.model import DeepFM
from examples.deepfm.reader import FORMATS, load

JOB = "deepfm"
BATCH_SIZE = 512
PASSES = 5
NETWORK_RATE = 1e-3
ROW_RATE = 0.05
WARM_UP_STEPS = 20
STEPS_IN_FLIGHT = 4


def make_optimizers(
    model: DeepFM,
) -> tuple[list[paddle.optimizer.Optimizer], paddle.optimizer.lr.LRScheduler]:
    """Return Adam for the network and Adagrad for the rows, and the schedule of the latter.

    Adagrad changes a row by its own history only, so rare rows learn as fast as they are met.
    Its first steps are large; several trainers that make them at once would overshoot.
    """
    scheduler = paddle.optimizer.lr.LinearWarmup(
        ROW_RATE, WARM_UP_STEPS, ROW_RATE / WARM_UP_STEPS, ROW_RATE
    )
    rows = model.factors.parameters() + model.linear.parameters()
    return [
        paddle.optimizer.Adam(NETWORK_RATE, parameters=model.network.parameters()),
        paddle.optimizer.Adagrad(scheduler, parameters=rows),
    ], scheduler


def train_here(splits: Sequence[Examples], arguments: argparse.Namespace) -> dict[str, Any]:
    """Train in this process with plain Paddle; return figures on the test split."""
    rows, (training, _, test) = renumber(*splits)
    paddle.seed(arguments.seed)
    model = DeepFM(paddle.nn.Embedding, rows, training.keys.shape[1])
    optimizers, scheduler = make_optimizers(model)
    begin = time.perf_counter()
    fit(
        model, optimizers, training, passes=arguments.passes,
        batch_size=arguments.batch_size, seed=arguments.seed, scheduler=scheduler,
    )  # fmt: skip
    seconds = time.perf_counter() - begin
    return {**score(model, test), "examples": len(training) * arguments.passes, "seconds": seconds}


def train_on_cluster(splits: Sequence[Examples], arguments: argparse.Namespace) -> None:
    """Train this trainer's share of the examples, and report on the way."""
    training, seed = splits[0], arguments.seed
    with distributed.init(job=JOB) as session:
        paddle.seed(seed)
        model = DeepFM(distributed.Embedding, None, training.keys.shape[1])
        plain, scheduler = make_optimizers(model)
        optimizers = [
            distributed.DistributedOptimizer(optimizer, steps_in_flight=arguments.steps_in_flight)
            for optimizer in plain
        ]
        # The same first values everywhere, but not the same dropout.
        paddle.seed(seed + session.trainer_id)

        def report(running: RunningScore) -> None:
            print_report(trainer=session.trainer_id, **running.summary())

        running = fit(
            model, optimizers, training[session.trainer_id :: session.trainers_num],
            passes=arguments.passes, batch_size=arguments.batch_size,
            seed=seed + session.trainer_id, scheduler=scheduler,
            prefetch=model.prefetch if arguments.steps_in_flight else None, report=report,
        )  # fmt: skip
        for optimizer in optimizers:
            optimizer.synchronize()
        report(running)


def launch(splits: Sequence[Examples], arguments: argparse.Namespace) -> dict[str, Any]:
    """Start servers and trainers on this machine; return figures on the test split."""
    command = ["-m", "examples.deepfm.train", "--role", "trainer", *sys.argv[1:]]
    reports: dict[int, dict[str, Any]] = {}

    def on_report(report: dict[str, Any]) -> None:
        reports[report["trainer"]] = report
        done = sum(item["examples"] for item in reports.values())
        total = len(splits[0]) * arguments.passes
        # A line for a log file would only fill it.
        if sys.stderr.isatty():
            status = f"{done / total:4.0%}  loss {report['loss']:.4f}  AUC {report['auc']:.4f}"
            print("\r" + status, end="", file=sys.stderr)

    with LocalCluster(servers=arguments.servers) as cluster:
        run_trainers(command, trainers=arguments.trainers, cluster=cluster, on_report=on_report)
        if sys.stderr.isatty():
            print(file=sys.stderr)
        with distributed.init(cluster.endpoints, trainer_id=0, trainers_num=1, job=JOB):
            model = DeepFM(distributed.Embedding, None, splits[0].keys.shape[1])
            # Finds the tables that the trainers made, and loads the dense parameters.
            for optimizer in make_optimizers(model)[0]:
                distributed.DistributedOptimizer(optimizer)
            scores = score(model, splits[2])
    return {
        **scores,
        "examples": sum(report["examples"] for report in reports.values()),
        "seconds": max(report["seconds"] for report in reports.values()),
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--form", choices=sorted(FORMATS), default="criteo")
    parser.add_argument("--data", type=Path, required=True, help="the file; .gz is read as well")
    parser.add_argument("--rows", type=int, help="read only so many rows")
    parser.add_argument("--passes", type=int, default=PASSES)
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local", action="store_true", help="plain Paddle, without servers")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument(
        "--steps-in-flight",
        type=int,
        default=STEPS_IN_FLIGHT,
        help="0: wait for each push, and fetch nothing ahead",
    )
    parser.add_argument("--role", choices=["launcher", "trainer"], default="launcher")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse()
    try:
        splits = load(arguments.data, arguments.form, arguments.rows)
    except (OSError, EOFError, ValueError) as error:
        sys.exit(f"--data {arguments.data} cannot be read as --form {arguments.form}: {error}")
    if arguments.role == "trainer":
        train_on_cluster(splits, arguments)
        return
    figures = train_here(splits, arguments) if arguments.local else launch(splits, arguments)
    print(
        f"test AUC {figures['auc']:.4f}, logloss {figures['logloss']:.4f}, "
        f"{figures['examples'] / figures['seconds']:,.0f} examples/s"
    )
    print("DEEPFM " + json.dumps(figures))


if __name__ == "__main__":
    main()
