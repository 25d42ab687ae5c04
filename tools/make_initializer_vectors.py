"""Write tests/vectors/initializers.json: the bits of initial weights, for ever.

A second implementation of what docs/reference/tables.md says about initial weights, in plain
Python, so that the vectors hold the definition and not whatever the Rust code does. Run by
hand when a kind of initializer is added; existing vectors must never change::

    python tools/make_initializer_vectors.py

Imports numpy (for float32) and the standard library; nothing of backstay.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

TARGET = Path(__file__).resolve().parent.parent / "tests" / "vectors" / "initializers.json"
MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
ELEMENTS = 5
PLACES = (
    ("emb", 0, 0),
    ("emb", 0, 1),
    ("a/b.c", MASK, MASK),
    ("emb", 7, 0x0123456789ABCDEF),
)
INITIALIZERS: list[dict[str, dict[str, Any]]] = [
    {"zeros": {}},
    {"constant": {"value": 0.1}},
    {"uniform": {"low": -0.05, "high": 0.05}},
    {"uniform": {"low": 1.0, "high": 3.0}},
    {"normal": {"mean": 0.0, "std": 0.01}},
    {"normal": {"mean": -1.0, "std": 2.0}},
    {"truncated_normal": {"mean": 0.0, "std": 0.01}},
    {"truncated_normal": {"mean": 3.0, "std": 0.5}},
    {"xavier": {"fan_in": 784, "fan_out": 10, "gain": 1.0, "distribution": "uniform"}},
    {"xavier": {"fan_in": 3, "fan_out": 5, "gain": 1.5, "distribution": "normal"}},
]


def mix64(x: int) -> int:
    """Return the 64-bit finalizer of MurmurHash3."""
    x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD & MASK
    x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53 & MASK
    return x ^ x >> 33


def split_mix(x: int) -> int:
    """Return the output of SplitMix64 in state ``x``."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def table_id(name: str) -> int:
    """Return FNV-1a of the name, mixed."""
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = (value ^ byte) * 0x100000001B3 & MASK
    return mix64(value)


def uniform(low: float, high: float, bits: int) -> np.float32:
    """Return a float32 in [low, high] from 32 random bits."""
    first, last = np.float32(low), np.float32(high)
    fraction = np.float32((bits >> 8) / 2**24)
    return min(first + (last - first) * fraction, last)


def normal(output: int, odd: bool) -> float:
    """Return one of the two normal values of an output of the generator."""
    radius = math.sqrt(-2.0 * math.log(((output >> 32) + 1) / 2**32))
    angle = math.tau * ((output & 0xFFFFFFFF) / 2**32)
    return radius * (math.sin(angle) if odd else math.cos(angle))


def truncated_normal(bits: int) -> float:
    """Return a standard normal value cut at 2, from 32 random bits."""
    outside = 0.022750131948179207
    probability = outside + (bits + 0.5) / 2**32 * (1.0 - 2.0 * outside)
    return min(max(NormalDist().inv_cdf(probability), -2.0), 2.0)


def weight(initializer: dict[str, dict[str, Any]], start: int, element: int) -> np.float32:
    """Return one element of the row whose stream begins at ``start``."""
    ((kind, settings),) = initializer.items()
    output = split_mix(start + GAMMA * (element // 2 + 1) & MASK)
    odd = element % 2 == 1
    bits = output & 0xFFFFFFFF if odd else output >> 32
    if kind in ("zeros", "constant"):
        return np.float32(settings.get("value", 0.0))
    if kind == "uniform":
        return uniform(settings["low"], settings["high"], bits)
    if kind == "truncated_normal":
        return np.float32(settings["mean"] + settings["std"] * truncated_normal(bits))
    if kind == "normal":
        return np.float32(settings["mean"] + settings["std"] * normal(output, odd))
    fans = settings["fan_in"] + settings["fan_out"]
    if settings["distribution"] == "uniform":
        limit = settings["gain"] * math.sqrt(6.0 / fans)
        return uniform(-limit, limit, bits)
    return np.float32(settings["gain"] * math.sqrt(2.0 / fans) * normal(output, odd))


def main() -> None:
    """Write all cases."""
    cases = []
    for initializer in INITIALIZERS:
        for table, seed, key in PLACES:
            stream = mix64(table_id(table) ^ mix64(seed + GAMMA & MASK))
            start = mix64(stream + mix64(key) & MASK)
            row = np.array([weight(initializer, start, i) for i in range(ELEMENTS)], np.float32)
            cases.append(
                {
                    "table": table,
                    "seed": seed,
                    "initializer": initializer,
                    "key": key,
                    "weights": [f"{bits:08x}" for bits in row.view(np.uint32)],
                }
            )
    TARGET.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")
    print(f"{TARGET.name}: {len(cases)} cases")


if __name__ == "__main__":
    main()
