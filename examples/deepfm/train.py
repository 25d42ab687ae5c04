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

from backstay.trainer import paddle as distributed
from examples.common.dataset import Examples, renumber
from examples.common.launch import run_trainers
from examples.common.training import RunningScore, fit, print_report, score
from examples.deepfm.model import DeepFM
from examples.deepfm.reader import FORMATS, load

JOB = "deepfm"
BATCH_SIZE = 512
LEARNING_RATE = 1e-3
STEPS_IN_FLIGHT = 4


def make_optimizer(model: DeepFM) -> paddle.optimizer.Adam:
    """Return Adam that touches only the rows of the batch."""
    return paddle.optimizer.Adam(LEARNING_RATE, parameters=model.parameters(), lazy_mode=True)


def train_here(splits: Sequence[Examples], passes: int, seed: int) -> dict[str, Any]:
    """Train in this process with plain Paddle; return figures on the test split."""
    rows, (training, _, test) = renumber(*splits)
    paddle.seed(seed)
    model = DeepFM(paddle.nn.Embedding, rows, training.keys.shape[1])
    begin = time.perf_counter()
    fit(model, make_optimizer(model), training, passes=passes, batch_size=BATCH_SIZE, seed=seed)
    seconds = time.perf_counter() - begin
    return {**score(model, test), "examples": len(training) * passes, "seconds": seconds}


def train_on_cluster(splits: Sequence[Examples], passes: int, seed: int) -> None:
    """Train this trainer's share of the examples, and report on the way."""
    training = splits[0]
    with distributed.init(job=JOB) as session:
        paddle.seed(seed)
        model = DeepFM(distributed.Embedding, None, training.keys.shape[1])
        optimizer = distributed.DistributedOptimizer(
            make_optimizer(model), steps_in_flight=STEPS_IN_FLIGHT
        )
        # The same first values everywhere, but not the same dropout.
        paddle.seed(seed + session.trainer_id)

        def report(running: RunningScore) -> None:
            print_report(trainer=session.trainer_id, **running.summary())

        fit(
            model, optimizer, training[session.trainer_id :: session.trainers_num],
            passes=passes, batch_size=BATCH_SIZE, seed=seed + session.trainer_id,
            prefetch=model.prefetch, report=report,
        )  # fmt: skip
        optimizer.synchronize()


def launch(splits: Sequence[Examples], arguments: argparse.Namespace) -> dict[str, Any]:
    """Start servers and trainers on this machine; return figures on the test split."""
    from backstay.pserver.local_cluster import LocalCluster

    command = ["-m", "examples.deepfm.train", "--role", "trainer", *sys.argv[1:]]
    reports: dict[int, dict[str, Any]] = {}

    def on_report(report: dict[str, Any]) -> None:
        reports[report["trainer"]] = report
        done = sum(item["examples"] for item in reports.values())
        total = len(splits[0]) * arguments.passes
        print(
            f"\r{done / total:4.0%}  loss {report['loss']:.4f}  AUC so far {report['auc']:.4f}",
            end="", file=sys.stderr,
        )  # fmt: skip

    with LocalCluster(servers=arguments.servers) as cluster:
        run_trainers(
            command, trainers=arguments.trainers, endpoints=cluster.endpoints,
            on_report=on_report, check_servers=cluster.check,
        )  # fmt: skip
        print(file=sys.stderr)
        with distributed.init(cluster.endpoints, trainer_id=0, trainers_num=1, job=JOB):
            model = DeepFM(distributed.Embedding, None, splits[0].keys.shape[1])
            # Finds the tables that the trainers made, and loads the dense parameters.
            distributed.DistributedOptimizer(make_optimizer(model))
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
    parser.add_argument("--passes", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local", action="store_true", help="plain Paddle, without servers")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--role", choices=["launcher", "trainer"], default="launcher")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse()
    splits = load(arguments.data, arguments.form, arguments.rows)
    if arguments.role == "trainer":
        train_on_cluster(splits, arguments.passes, arguments.seed)
        return
    if arguments.local:
        figures = train_here(splits, arguments.passes, arguments.seed)
    else:
        figures = launch(splits, arguments)
    print(
        f"test AUC {figures['auc']:.4f}, logloss {figures['logloss']:.4f}, "
        f"{figures['examples'] / figures['seconds']:,.0f} examples/s"
    )
    print("DEEPFM " + json.dumps(figures))


if __name__ == "__main__":
    main()
