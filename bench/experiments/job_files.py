"""The files of a Wide & Deep job on census: its model file, with a pause, and its job file.

Reads ``examples/census``; writes nothing. The pause comes after each batch: so many workers on few
cores would else share the machine's CPU, and more of them would bring nothing. It stands for the
time that a batch takes on a CPU of a worker's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bench.programs import REPOSITORY
from tests.kubernetes.backstay_image import FRAMEWORKS_FOLDER, IMAGE

__all__ = ["CENSUS", "FIRST_BATCH", "MODEL", "RECORDS", "JobShape", "job_settings", "paced_model"]

CENSUS = REPOSITORY / "examples" / "census"
DATA = "/census"
CHECKPOINTS = "/checkpoints"
MODEL = "wide_deep_torch.py"
# What a worker says when it begins, and the time.
FIRST_BATCH = "first batch at "
# The records of adult.data.
RECORDS = 32561
PACED = """

import sys
import time

_feed = feed
_first = [True]


def feed(records, mode, metadata):
    if mode == "training":
        if _first:
            _first.clear()
            print(f"FIRST_BATCH{time.time():.3f}", file=sys.stderr, flush=True)
        time.sleep(PAUSE_S)
    return _feed(records, mode, metadata)
"""


@dataclass(frozen=True)
class JobShape:
    """What differs between the jobs of the experiments."""

    name: str
    workers: int
    workers_min: int = 1
    workers_max: int = 100
    passes: int = 1
    batch_size: int = 64
    records_per_task: int = 512
    pause_s: float = 0.1
    """After each batch."""
    evaluation_every_steps: int = 0
    seed: int = 0
    saves: bool = False
    """Writes a checkpoint after each pass."""
    requests: dict[str, dict[str, str]] = field(default_factory=dict)
    """What the Pods of a role ask for."""
    priorities: dict[str, str] = field(default_factory=dict)
    """PriorityClass by role."""


def paced_model(pause_s: float) -> str:
    """Return the model file with a pause after each batch of training."""
    paced = PACED.replace("FIRST_BATCH", FIRST_BATCH).replace("PAUSE_S", str(pause_s))
    return (CENSUS / MODEL).read_text(encoding="utf-8") + paced


def job_settings(shape: JobShape, etcd: str, checkpoints: Path, packages: Path) -> dict[str, Any]:
    """Return what the job file says.

    Args:
        shape: Of the job.
        etcd: Where its servers keep their records.
        checkpoints: Folder of this machine for them.
        packages: Folder of this machine that has PyTorch.
    """
    given = yaml.safe_load((CENSUS / "job.yaml").read_text(encoding="utf-8"))
    for kind in ("training", "validation"):
        paths = [f"{DATA}/{Path(path).name}" for path in given[kind]["paths"]]
        given[kind] = {**given[kind], "paths": paths}
    if not shape.evaluation_every_steps and shape.passes == 1 and not shape.saves:
        # Its end would only be evaluated.
        given.pop("validation")
    roles: dict[str, Any] = {
        role: {
            "requests": shape.requests.get(role, {}),
            "priority_class": shape.priorities.get(role, ""),
        }
        for role in ("master", "worker", "pserver")
    }
    roles["pserver"]["limits"] = {"memory": "512Mi"}
    roles["pserver"]["volumes"] = [{"host_path": str(checkpoints), "mount_path": CHECKPOINTS}]
    return {
        **given,
        "name": shape.name,
        "model": MODEL,
        "framework": "torch",
        "epochs": shape.passes,
        "batch_size": shape.batch_size,
        "records_per_task": shape.records_per_task,
        "evaluation_every_steps": shape.evaluation_every_steps,
        "seed": shape.seed,
        "audit": True,
        "checkpoint": {"every": "pass" if shape.saves else "none", "url": CHECKPOINTS},
        "workers": {
            "initial": shape.workers,
            "min": shape.workers_min,
            "max": shape.workers_max,
            # One thread each: there are more workers than cores.
            "env": {"OMP_NUM_THREADS": "1"},
        },
        "servers": {"local": 2, "settings": {"store_endpoints": [etcd]}},
        "kubernetes": {
            "image": IMAGE,
            "pull_policy": "Never",
            "insecure": True,
            "volumes": [
                {"host_path": str(CENSUS / "data"), "mount_path": DATA, "read_only": True},
                {
                    "host_path": str(packages),
                    "mount_path": FRAMEWORKS_FOLDER,
                    "read_only": True,
                },
            ],
            **roles,
        },
    }
