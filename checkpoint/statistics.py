"""The statistics of rows whose table has a lifetime: the last columns of their state.

Imports ``backstay.tables``, ``backstay.errors`` and the native module; pure.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from backstay._native import row_scores
from backstay.errors import InvalidRequest
from backstay.tables import TableSpec

__all__ = ["scores_of", "statistics_of"]

# Those that are the bits of a uint32; the others are float32.
_INTEGERS = ("last_seen", "frequency")


def statistics_of(spec: TableSpec, state: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    """Return the statistics of rows by name, [n] each; empty if the table keeps none.

    Args:
        spec: Of the table.
        state: float32 [n, state], as a checkpoint has it.

    Returns:
        ``last_seen`` (seconds) and ``frequency`` uint32, ``show`` and ``click`` float32; those that
        the table's lifetime uses.

    Raises:
        InvalidRequest: The state is of another table.
    """
    _check_shape(spec, state)
    first = state.shape[1] - len(spec.statistics)
    columns = {
        name: np.ascontiguousarray(state[:, first + number])
        for number, name in enumerate(spec.statistics)
    }
    return {
        name: column.view(np.uint32) if name in _INTEGERS else column
        for name, column in columns.items()
    }


def scores_of(spec: TableSpec, state: NDArray[np.float32], time_s: int) -> NDArray[np.float64]:
    """Return the score of each row, float64 [n]: as the servers compute it.

    Args:
        spec: Of the table.
        state: float32 [n, state], as a checkpoint has it.
        time_s: When, for a function that uses the time; Unix seconds.

    Raises:
        InvalidRequest: The table's lifetime uses no score.
    """
    _check_shape(spec, state)
    if not spec.has_score:
        raise InvalidRequest(f"the rows of table {spec.name} have no score: its lifetime uses none")
    words = np.ascontiguousarray(state[:, state.shape[1] - len(spec.statistics) :])
    return row_scores(spec.to_json(), time_s, words.view(np.uint32))


def _check_shape(spec: TableSpec, state: NDArray[np.float32]) -> None:
    if state.ndim != 2 or state.shape[1] != spec.state_elements:
        raise InvalidRequest(
            f"state of table {spec.name} has the shape {state.shape}, not "
            f"[n, {spec.state_elements}]"
        )
