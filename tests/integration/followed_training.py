"""A model that is trained in this process, a little more at each call, for tests that follow it."""

from __future__ import annotations

from typing import Any

import numpy as np

from backstay.job.model_definition import load
from backstay.job_spec import JobSpec
from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer.adapter.session import init
from backstay.trainer.model.program import build, framework_of

__all__ = ["ADS", "USERS", "train"]

USERS = np.arange(0, 900, 13)
ADS = USERS % 50


def train(cluster: LocalCluster, spec: JobSpec, framework: str) -> Any:
    """Train a little more; return what the servers' rows predict then."""
    generator = np.random.default_rng(7)
    with init(cluster.endpoints, trainer_id=0, trainers_num=1, job=spec.name) as session:
        program = build(framework_of(framework), load(spec.model), session.client, spec)
        for _ in range(5):
            users, ads = generator.integers(0, 100, 64), generator.integers(0, 50, 64)
            program.train_batch({"users": users, "ads": ads}, (users % 2).astype(np.float32))
        program.synchronize()
        return program.predict({"users": USERS, "ads": ADS})
