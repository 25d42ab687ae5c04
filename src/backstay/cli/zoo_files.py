"""The files that ``backstay zoo init`` writes: a job with its model, some data, and its image.

A function from values to the content of files. Does no I/O and imports nothing of the package.
"""

from __future__ import annotations

import json
import random
from typing import Literal

__all__ = ["IMAGE_FOLDER", "zoo_files"]

# Where the image has the folder.
IMAGE_FOLDER = "/zoo"
USERS, ADS, HOURS = 200, 20, 24
RECORDS = {"train": 2_000, "test": 500}
# The user of backstay's images.
USER = "10001:10001"

_JOB = """\
# Here:            backstay train job.yaml --dry-run, then with --local, then without
# As an image:     backstay zoo build . && backstay zoo push .
# On Kubernetes:   backstay train job.yaml --on kubernetes --endpoint pserver:7000 \\
#                    --training {folder}/data/train.csv --validation {folder}/data/test.csv
name: {name}
model: model.py
framework: {framework}
training: data/train.csv
validation: data/test.csv
epochs: 2
batch_size: 64
records_per_task: 500
kubernetes:
  image: {image}   # give each build a new tag: nodes keep the image of a tag that they know
  model_folder: {folder}
"""

_DOCKERFILE = """\
# The image of this folder: `backstay zoo build` makes it, `backstay zoo push` pushes it.
# This base has backstay and {framework}. deploy/Dockerfile of backstay makes it.
FROM {base_image}
# Another index for pip: backstay zoo build --build-arg PIP_EXTRA_INDEX_URL=URL
ARG PIP_EXTRA_INDEX_URL=""
USER 0:0
COPY requirements.txt {folder}/
RUN pip install --no-cache-dir --requirement {folder}/requirements.txt
COPY --chown={user} . {folder}/
USER {user}
"""

_DOCKERIGNORE = """\
backstay-jobs
**/__pycache__
"""

_REQUIREMENTS = """\
# What model.py needs besides backstay and {framework}, one package in a line.
"""

_MODEL = '''\
"""Clicks of users on ads: a model to begin with."""

import numpy as np
import {framework}
from {framework} import nn

USERS, ADS, HOURS = {users}, {ads}, {hours}


class Clicks(nn.{base}):
    def __init__(self, dim):
        super().__init__()
        self.users = nn.Embedding(USERS, dim, sparse=True)
        self.ads = nn.Embedding(ADS, dim, sparse=True)
        self.network = nn.Sequential(nn.Linear(2 * dim + 1, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, user, ad, hour):
        inputs = {concatenated}
        return self.network(inputs).squeeze(1)


def custom_model(dim=8):
    return Clicks(dim)


def loss(labels, predictions):
    return nn.functional.binary_cross_entropy_with_logits(predictions, labels)


def optimizer(parameters):
    return {optimizer}


def feed(records, mode, metadata):
    features = {{
        "user": records.column("user").astype(np.int64),
        "ad": records.column("ad").astype(np.int64),
        "hour": records.column("hour").astype(np.float32)[:, None] / HOURS,
    }}
    if mode == "prediction":
        return features
    return features, records.column("click").astype(np.float32)


def eval_metrics():
    return {{"auc": "auc", "logloss": "logloss_of_logits"}}
'''

# What the two frameworks write in different ways.
_WORDS = {
    "torch": {
        "base": "Module",
        "concatenated": "torch.cat([self.users(user), self.ads(ad), hour], dim=1)",
        "optimizer": "torch.optim.Adagrad(parameters, lr=0.1)",
    },
    "paddle": {
        "base": "Layer",
        "concatenated": "paddle.concat([self.users(user), self.ads(ad), hour], axis=1)",
        "optimizer": "paddle.optimizer.Adagrad(0.1, parameters=parameters)",
    },
}


def zoo_files(
    name: str, framework: Literal["torch", "paddle"], *, image: str, base_image: str
) -> dict[str, str]:
    """Return the text of each file by its path in the folder.

    Args:
        name: Of the job.
        framework: Of the model.
        image: What the folder becomes.
        base_image: An image with backstay and the framework.
    """
    words = {
        # A string of JSON is one of YAML, also where the name is `1` or `null`.
        "name": json.dumps(name),
        "framework": framework,
        "image": json.dumps(image),
        "base_image": base_image,
        "folder": IMAGE_FOLDER,
        "user": USER,
        "users": USERS,
        "ads": ADS,
        "hours": HOURS,
        **_WORDS[framework],
    }
    texts = {
        "job.yaml": _JOB,
        "model.py": _MODEL,
        "requirements.txt": _REQUIREMENTS,
        "Dockerfile": _DOCKERFILE,
        ".dockerignore": _DOCKERIGNORE,
    }
    files = {path: text.format_map(words) for path, text in texts.items()}
    return files | {f"data/{part}.csv": _clicks(part) for part in RECORDS}


def _clicks(part: str) -> str:
    """Return records of clicks, the same each time; who clicks depends on the user and the ad."""
    world = random.Random(0)
    taste = [world.gauss(0, 1) for _ in range(USERS)]
    appeal = [world.gauss(0, 1) for _ in range(ADS)]
    chosen = random.Random(part)
    lines = ["user,ad,hour,click"]
    for _ in range(RECORDS[part]):
        user, ad, hour = (chosen.randrange(count) for count in (USERS, ADS, HOURS))
        click = int(chosen.gauss(0, 1) < taste[user] + appeal[ad])
        lines.append(f"{user},{ad},{hour},{click}")
    return "\n".join(lines) + "\n"
