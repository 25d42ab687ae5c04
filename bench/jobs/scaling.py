"""Keys/s of several trainers together, against one server or several.

Each trainer is a process of its own that runs the sequential job of sparse_step.py for the same
span of time; all begin together, when the last one is warm.
"""

from __future__ import annotations

import argparse
import subprocess
from contextlib import ExitStack

from backstay.pserver.local_cluster import LocalCluster
from bench.jobs.local import print_result, result_of, running_job


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--trainers", type=int, default=4)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--keys-per-step", type=int, default=53_248)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--warmup", type=int, default=20)
    return parser.parse_args()


def wait_until_warm(trainer: subprocess.Popen[str]) -> None:
    if trainer.stdout is None:
        raise RuntimeError("the trainer was started without a pipe")
    for line in trainer.stdout:
        if line.strip() == "READY":
            return
    raise RuntimeError(f"a trainer ended before it was warm, exit code {trainer.wait()}")


def run_together(trainers: list[subprocess.Popen[str]]) -> list[dict[str, float]]:
    for trainer in trainers:
        wait_until_warm(trainer)
    for trainer in trainers:
        if trainer.stdin is None:
            raise RuntimeError("the trainer was started without a pipe")
        trainer.stdin.write("go\n")
        trainer.stdin.flush()
    return [result_of(trainer) for trainer in trainers]


def main() -> None:
    arguments = parse_arguments()
    options = [
        *("--keys-per-step", str(arguments.keys_per_step)),
        *("--seconds", str(arguments.seconds), "--warmup", str(arguments.warmup)),
    ]
    with (
        LocalCluster(servers=arguments.servers, settings={"replicas": 1}) as cluster,
        ExitStack() as started,
    ):
        trainers = [
            started.enter_context(
                running_job(
                    "sparse_step",
                    *("--endpoint", cluster.endpoints[0], "--hold", "--seed", str(seed)),
                    *options,
                )
            )
            for seed in range(arguments.trainers)
        ]
        results = run_together(trainers)
    total = sum(result["mean_keys_per_s"] for result in results)
    print_result({"keys_per_s": total, "mean_keys_per_s": total})


if __name__ == "__main__":
    main()
