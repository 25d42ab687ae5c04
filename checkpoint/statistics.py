"""The statistics of rows whose table has a lifetime: the last columns of their state.

Imports ``backstay.tables`` and ``backstay.errors``; pure.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    if state.ndim != 2 or state.shape[1] != spec.state_elements:
        raise InvalidRequest(
            f"state of table {spec.name} has the shape {state.shape}, not "
            f"[n, {spec.state_elements}]"
        )
    first = state.shape[1] - len(spec.statistics)
    columns = {
        name: np.ascontiguousarray(state[:, first + number])
        for number, name in enumerate(spec.statistics)
    }
    return {
        name: column.view(np.uint32) if name in _INTEGERS else column
        for name, column in columns.items()
    }


def scores_of(spec: TableSpec, state: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the score of each row, float64 [n].

    Raises:
        InvalidRequest: The table keeps no shows and clicks.
    """
    kept = statistics_of(spec, state)
    if spec.lifetime is None or spec.lifetime.score is None or "show" not in kept:
        raise InvalidRequest(f"table {spec.name} keeps no shows and clicks: its rows have no score")
    score = spec.lifetime.score
    show, click = kept["show"].astype(np.float64), kept["click"].astype(np.float64)
    scores: NDArray[np.float64] = (
        score.nonclick_coefficient * (show - click) + score.click_coefficient * click
    )
    return scores
