"""Small generated files in the formats of the model zoo, with signals that a model can find."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

from examples.ctr.clicks import FRAPPE_COLUMNS

# Different values of each column of the Frappe log, as in the real one, but for fewer users, apps.
FRAPPE_VALUES = (100, 200, 7, 7, 2, 3, 2, 9, 40, 100)
FACTORS = 3
SIDE = 28
DIGITS = 10


def write_frappe(path: Path, rows: int, seed: int) -> None:
    """Write clicks that follow from hidden vectors of user and app, with the header of the log."""
    generator = np.random.default_rng(seed)
    users = np.random.default_rng(0).normal(0.0, 1.0, (FRAPPE_VALUES[0], FACTORS))
    items = np.random.default_rng(1).normal(0.0, 1.0, (FRAPPE_VALUES[1], FACTORS))
    values = generator.integers(0, FRAPPE_VALUES, (rows, len(FRAPPE_VALUES)))
    logits = 2.0 * (users[values[:, 0]] * items[values[:, 1]]).sum(axis=1)
    labels = generator.random(rows) < 1.0 / (1.0 + np.exp(-logits))
    with open(path, "w", encoding="utf-8") as file:
        file.write("\t".join(FRAPPE_COLUMNS) + "\n")
        for label, row in zip(labels, values, strict=True):
            file.write("\t".join([str(int(label)), *map(str, row)]) + "\n")


def write_ratings(path: Path, rows: int, seed: int) -> None:
    """Write ratings of 1 to 5, of hidden tastes, in the typed form of MovieLens 100k."""
    generator = np.random.default_rng(seed)
    users = np.random.default_rng(2).normal(0.0, 1.0, 200)
    films = np.random.default_rng(3).normal(0.0, 1.0, 300)
    user, film = generator.integers(0, 200, rows), generator.integers(0, 300, rows)
    ratings = 3.0 + users[user] + films[film] + generator.normal(0.0, 0.5, rows)
    with open(path, "w", encoding="utf-8") as file:
        file.write("user_id:token\titem_id:token\trating:float\ttimestamp:float\n")
        for line in zip(user, film, np.clip(np.rint(ratings), 1, 5).astype(int), strict=True):
            file.write("\t".join(map(str, line)) + "\t0\n")


def write_digits(folder: Path, name: str, count: int, seed: int) -> None:
    """Write idx files of pictures: a noisy bright square, whose place is the label."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, DIGITS, count).astype(np.uint8)
    pictures = generator.integers(0, 120, (count, SIDE, SIDE)).astype(np.uint8)
    for picture, label in zip(pictures, labels, strict=True):
        row, column = 2 + 12 * (int(label) // 5), 1 + 5 * (int(label) % 5)
        picture[row : row + 8, column : column + 5] += 100
    folder.mkdir(parents=True, exist_ok=True)
    words = np.array([0x803, count, SIDE, SIDE], ">u4").tobytes()
    with gzip.open(folder / f"{name}-images-idx3-ubyte.gz", "wb") as file:
        file.write(words + pictures.tobytes())
    words = np.array([0x801, count], ">u4").tobytes()
    with gzip.open(folder / f"{name}-labels-idx1-ubyte.gz", "wb") as file:
        file.write(words + labels.tobytes())
