"""Write files of the Criteo format that hold a signal a model can find.

    python examples/ctr/generate.py --rows 100000 --seed 7 clicks.txt

Made up from a seed: labels follow from hidden weights of the categories, from pairs of them,
and from the numbers. May import numpy and backstay.job.metrics.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from backstay.job.metrics import auc

__all__ = ["write_criteo"]

NUMBERS = 13
CATEGORIES = 26
MISSING_SHARE = 0.1
CHUNK_ROWS = 10_000
# Pairs of fields that only say something together: what the factorisation is there to find.
PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))
HIDDEN_DIM = 4


def write_criteo(path: Path, rows: int, seed: int = 0) -> float:
    """Write ``rows`` lines; the same arguments give the same bytes.

    Returns:
        The AUC of the probabilities that the labels were drawn from: no model can beat it by
        more than chance.
    """
    generator = np.random.default_rng(seed)
    # From a handful of values to a thousand a field; real logs have millions.
    values = np.geomspace(5, 1000, CATEGORIES).astype(np.int64)
    weights = [generator.normal(0.0, 0.5, count) for count in values]
    vectors = [generator.normal(0.0, 0.6, (count, HIDDEN_DIM)) for count in values]
    names = [generator.integers(0, 1 << 32, count, dtype=np.uint64) for count in values]
    labels, chances = [], []
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="ascii") as file:
        for begin in range(0, rows, CHUNK_ROWS):
            count = min(CHUNK_ROWS, rows - begin)
            ids = _popular_first(generator, values, count)
            numbers = np.floor(generator.lognormal(1.0, 1.5, (count, NUMBERS))).astype(np.int64)
            logits = -1.6 + 0.25 * (np.log1p(numbers[:, :4]) - 1.3).sum(axis=1)
            logits += sum(weights[field][ids[:, field]] for field in range(CATEGORIES))
            for left, right in PAIRS:
                products = vectors[left][ids[:, left]] * vectors[right][ids[:, right]]
                logits += products.sum(axis=1)
            chance = 1.0 / (1.0 + np.exp(-logits))
            label = generator.random(count) < chance
            labels.append(label)
            chances.append(chance)
            # What is missing was there when the label was drawn: noise, as in life.
            missing = generator.random((count, NUMBERS + CATEGORIES)) < MISSING_SHARE
            for row in range(count):
                texts = [str(number) for number in numbers[row]]
                texts += [f"{names[field][ids[row, field]]:08x}" for field in range(CATEGORIES)]
                kept = (
                    "" if gone else text for text, gone in zip(texts, missing[row], strict=True)
                )
                file.write(f"{int(label[row])}\t" + "\t".join(kept) + "\n")
    return auc(np.concatenate(labels), np.concatenate(chances))


def _popular_first(
    generator: np.random.Generator, values: NDArray[np.int64], count: int
) -> NDArray[np.int64]:
    """Draw ids [count, fields]: a few are frequent, most are rare."""
    uniform = generator.random((count, len(values)))
    return (values * uniform**3).astype(np.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a file of the Criteo format.")
    parser.add_argument("path", type=Path, help="file to write; .gz compresses")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.path.parent.mkdir(parents=True, exist_ok=True)
    best = write_criteo(arguments.path, arguments.rows, arguments.seed)
    print(f"{arguments.path}: {arguments.rows:,} rows; the best possible AUC is about {best:.4f}")


if __name__ == "__main__":
    main()
