"""How many pushes came between two counts."""

from __future__ import annotations

import pytest

from backstay.pserver.exports.pushes import most_since


@pytest.mark.parametrize(
    ("now", "most"),
    [
        ({}, 0),
        ({"a": 10, "b": 20}, 0),
        ({"a": 17, "b": 22}, 7),
        # One that does not answer tells nothing.
        ({"b": 22}, 2),
        # One that began anew, and one that is new.
        ({"a": 4, "b": 22}, 4),
        ({"a": 10, "b": 20, "c": 9}, 9),
    ],
)
def test_the_busiest_node_counts(now: dict[str, int], most: int) -> None:
    assert most_since({"a": 10, "b": 20}, now) == most
