"""Examples/s of DeepFM on generated Criteo-shaped data: as a job, or in one plain process.

The job is ``backstay train`` with ``--workers`` workers and one server on this machine, as a user
starts it; its rate is taken from the job's own ``metrics.jsonl``, after the first fifth of the
records. ``--plain`` trains the same definition file with the framework alone: the same batches of
the same records, read and fed in the same way, without tasks, servers or a job master.

Usage: ``python -m bench.jobs.train --workers 2`` or ``--plain``; ``--framework paddle``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from backstay.data import BadRecords, open_reader, read_batch
from backstay.data.batch import Batch
from backstay.job.model_definition import TRAINING, ModelDefinition, load
from backstay.job_spec import DataSpec
from backstay.trainer.model.batches import arguments_of
from bench.jobs.local import print_result
from examples.ctr.clicks import CRITEO_COLUMNS
from examples.ctr.generate import write_criteo

CTR = Path(__file__).resolve().parents[2] / "examples" / "ctr"
FIELDS = len(CRITEO_COLUMNS) - 1
WARM_UP_SHARE = 0.2
# Records that the plain process reads at a time, as a task would.
PIECE_RECORDS = 4096
JOB_LIMIT_S = 280.0
TAIL_CHARACTERS = 2000


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--plain", action="store_true", help="one process, the framework alone")
    parser.add_argument("--framework", choices=["torch", "paddle"], default="torch")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--records-per-task", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--data", type=Path, help="a file of the Criteo format; made if missing")
    return parser.parse_args()


def data_spec(path: Path) -> dict[str, Any]:
    """Return the ``training`` entry of a job for a file of the Criteo format."""
    options = {"header": False, "columns": list(CRITEO_COLUMNS)}
    return {"kind": "tsv", "paths": [str(path)], "options": options}


def rate_of(lines: Sequence[dict[str, Any]], total: int) -> float:
    """Return the examples/s of a job after its first fifth.

    Args:
        lines: Of its ``metrics.jsonl``.
        total: Records of the training data.

    Raises:
        RuntimeError: Too few lines to tell.
    """
    points = [
        (line["time_s"], line["examples"])
        for line in lines
        if line.get("kind") == "training" and line["examples"] >= WARM_UP_SHARE * total
    ]
    # Examples are counted task by task: only lines on which they have grown count.
    points = [
        point
        for number, point in enumerate(points)
        if not number or point[1] > points[number - 1][1]
    ]
    if len(points) < 3:
        raise RuntimeError(f"the job reported {len(points)} times: too few records")
    return float((points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0]))


def run_job(arguments: argparse.Namespace, path: Path, folder: Path) -> float:
    """Run ``backstay train`` and return its examples/s."""
    job = {
        "name": "bench",
        "model": str(CTR / f"deepfm_{arguments.framework}.py"),
        "model_params": {"fields": FIELDS},
        "training": data_spec(path),
        "batch_size": arguments.batch_size,
        "records_per_task": arguments.records_per_task,
        "mode": {"kind": "async", "steps_in_flight": 4},
        "checkpoint": "none",
        "workers": {"initial": arguments.workers, "max": arguments.workers},
        "servers": {"local": 1, "replicas": 1},
        "log_dir": str(folder / "log"),
    }
    file = folder / "job.yaml"
    file.write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, "-m", "backstay.cli", "train", str(file)],
        capture_output=True,
        text=True,
        timeout=JOB_LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"backstay train failed:\n{done.stderr[-TAIL_CHARACTERS:]}")
    lines = (folder / "log" / "metrics.jsonl").read_text().splitlines()
    return rate_of([json.loads(line) for line in lines], arguments.rows)


def batches(definition: ModelDefinition, path: Path, size: int) -> Iterator[tuple[Any, Any]]:
    """Yield features and labels of all batches, in a random order within each piece."""
    reader = open_reader(DataSpec(**data_spec(path)), module=definition.module)
    generator = np.random.default_rng(0)
    for shard in reader.shards():
        for begin in range(0, shard.records, PIECE_RECORDS):
            count = min(PIECE_RECORDS, shard.records - begin)
            piece: Batch = read_batch(reader, shard.name, begin, count, BadRecords())
            piece = piece.take(generator.permutation(len(piece)))
            for start in range(0, len(piece), size):
                yield definition.feed(piece[start : start + size], TRAINING, reader.metadata)


def plain_step(definition: ModelDefinition, framework: str) -> Callable[[Any, Any], None]:
    """Return what trains one batch with the framework alone."""
    if framework == "torch":
        import torch as library

        tensor = library.from_numpy
        library.manual_seed(0)
    else:
        import paddle as library

        tensor = library.to_tensor
        library.seed(0)
    model = definition.make_model()
    optimizer = definition.optimizer(model.parameters())
    clear = optimizer.zero_grad if framework == "torch" else optimizer.clear_grad

    def step(features: Any, labels: Any) -> None:
        inputs = [tensor(np.ascontiguousarray(one)) for one in arguments_of(features).positional]
        loss = definition.loss(tensor(labels), model(*inputs))
        loss.backward()
        optimizer.step()
        clear()
        # A user's loop looks at the loss, and so does a worker.
        float(loss.detach())

    return step


def run_plain(arguments: argparse.Namespace, path: Path) -> float:
    """Train in this process and return the examples/s after the first fifth."""
    file = CTR / f"deepfm_{arguments.framework}.py"
    definition = load(file, model_params={"fields": FIELDS})
    step = plain_step(definition, arguments.framework)
    done, counted, begun = 0, 0, 0.0
    for features, labels in batches(definition, path, arguments.batch_size):
        step(features, labels)
        done += len(labels)
        if done >= WARM_UP_SHARE * arguments.rows and not begun:
            begun, counted = time.perf_counter(), done
    return (done - counted) / (time.perf_counter() - begun)


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as name:
        path = arguments.data or Path(name) / "clicks.txt"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_criteo(path, arguments.rows, seed=0)
        if arguments.plain:
            rate = run_plain(arguments, path)
        else:
            rate = run_job(arguments, path, Path(name))
    print_result({"examples_per_s": rate})


if __name__ == "__main__":
    main()
