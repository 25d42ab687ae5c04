"""A small convolutional network for MNIST, in Paddle: dense parameters, and a reader of its own.

The images come in the idx format, which backstay does not know: ``custom_data_reader`` reads it.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import nn

from backstay.data import Metadata, Shard

SIDE = 28
# Bytes before the values: a word that says the type, then one word for each dimension.
IMAGES_HEADER, LABELS_HEADER = 16, 8


def custom_model() -> nn.Layer:
    return nn.Sequential(
        nn.Conv2D(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2D(2),
        nn.Conv2D(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2D(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def loss(labels: paddle.Tensor, predictions: paddle.Tensor) -> paddle.Tensor:
    return nn.functional.cross_entropy(predictions, labels)


def optimizer(parameters: Iterable[paddle.Tensor]) -> paddle.optimizer.Optimizer:
    return paddle.optimizer.Adam(1e-3, parameters=parameters)


def feed(records: Any, mode: str, metadata: Any) -> Any:
    images = records.column("image").reshape(-1, 1, SIDE, SIDE).astype(np.float32) / 255.0
    return images if mode == "prediction" else (images, records.column("label"))


def eval_metrics() -> dict[str, str]:
    return {"accuracy": "accuracy"}


class IdxReader:
    """Images and labels of one part of the data; each image is a record.

    Args:
        folder: Holds ``{name}-images-idx3-ubyte.gz`` and ``{name}-labels-idx1-ubyte.gz``.
        name: "train" or "t10k", as the files are called.
        part: Only every tenth image ("test"), only all others ("training"), or "all".
    """

    def __init__(self, folder: Path, name: str, part: str) -> None:
        images = _idx(folder / f"{name}-images-idx3-ubyte.gz", IMAGES_HEADER)
        labels = _idx(folder / f"{name}-labels-idx1-ubyte.gz", LABELS_HEADER)
        if images.size != labels.size * SIDE * SIDE:
            raise ValueError(f"{folder}: {images.size} bytes of images for {labels.size} labels")
        tenth = np.arange(labels.size) % 10 == 9
        kept = {"training": ~tenth, "test": tenth, "all": tenth | ~tenth}[part]
        self.metadata = Metadata(column_names=("image", "label"))
        self._shard = Shard(name=f"{name}/{part}", records=int(kept.sum()))
        self._images = images.reshape(-1, SIDE * SIDE)[kept]
        self._labels = labels[kept].astype(np.int64)

    def shards(self) -> Iterable[Shard]:
        return [self._shard]

    def read(self, shard: str, start: int, count: int, bad: Any) -> Iterator[dict[str, Any]]:
        for index in range(start, start + count):
            yield {"image": self._images[index], "label": self._labels[index]}


def custom_data_reader(data_origin: str, name: str = "train", part: str = "all") -> IdxReader:
    return IdxReader(Path(data_origin), name, part)


def _idx(path: Path, header: int) -> NDArray[np.uint8]:
    with gzip.open(path) as file:
        return np.frombuffer(file.read(), np.uint8, offset=header)
