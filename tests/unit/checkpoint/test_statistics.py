"""The statistics of rows in checkpoints and exports."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from backstay.checkpoint.export import RowChoice, export
from backstay.checkpoint.export_reader import Export
from backstay.checkpoint.statistics import scores_of, statistics_of
from backstay.checkpoint.storage import CheckpointStorage
from backstay.errors import InvalidRequest
from backstay.tables import (
    Adam,
    Capacity,
    Expiry,
    Lifetime,
    Score,
    ScoreFunction,
    TableSpec,
)
from tests.unit.checkpoint_files import FULL, Content, make_checkpoint

SCORED = TableSpec.sparse(
    "ads/scored",
    2,
    optimizer=Adam(0.1),
    lifetime=Lifetime(
        expiry=Expiry(unseen_seconds=60, score_below=0.5),
        capacity=Capacity(rows=1000, evict="least_frequent"),
        score=Score(nonclick_coefficient=0.5, click_coefficient=2.0),
    ),
)
PLAIN = TableSpec.sparse("ads/plain", 2)
RECENT = TableSpec.sparse(
    "ads/recent",
    2,
    lifetime=Lifetime(
        expiry=Expiry(score_below=0.5),
        score=ScoreFunction.of(lambda time, last_seen, show: show - (time - last_seen)),
    ),
)


def state_of(spec: TableSpec, *rows: tuple[int, int, float, float]) -> np.ndarray:
    """State whose last columns are these statistics: last seen, frequency, show, click."""
    state = np.zeros((len(rows), spec.state_elements), np.float32)
    for row, (seen, frequency, show, click) in zip(state, rows, strict=True):
        row[-4:-2] = np.array([seen, frequency], np.uint32).view(np.float32)
        row[-2:] = show, click
    return state


def test_statistics_are_the_last_columns_with_their_own_types() -> None:
    assert SCORED.statistics == ("last_seen", "frequency", "show", "click")
    # The bits of a time of today are a huge float, and those of a small number a tiny one.
    state = state_of(SCORED, (1_764_000_000, 3, 4.0, 1.5), (2**32 - 1, 1, 0.0, 0.0))
    kept = statistics_of(SCORED, state)
    assert kept["last_seen"].tolist() == [1_764_000_000, 2**32 - 1]
    assert kept["frequency"].tolist() == [3, 1]
    assert kept["show"].tolist() == [4.0, 0.0]
    assert kept["click"].tolist() == [1.5, 0.0]
    assert scores_of(SCORED, state, 0).tolist() == [0.5 * 2.5 + 2.0 * 1.5, 0.0]


def test_a_score_of_ones_own_is_of_the_time_given() -> None:
    state = np.zeros((2, RECENT.state_elements), np.float32)
    state[:, -2] = np.array([100, 104], np.uint32).view(np.float32)
    state[:, -1] = 9.0, 2.0
    assert scores_of(RECENT, state, 105).tolist() == [4.0, 1.0]
    assert scores_of(RECENT, state, 108).tolist() == [1.0, -2.0]


def test_a_table_without_statistics_has_none_and_no_score() -> None:
    state = np.zeros((2, PLAIN.state_elements), np.float32)
    assert statistics_of(PLAIN, state) == {}
    with pytest.raises(InvalidRequest, match="ads/plain have no score"):
        scores_of(PLAIN, state, 0)
    with pytest.raises(InvalidRequest, match="ads/scored has the shape"):
        statistics_of(SCORED, state)


@pytest.fixture
def storage(tmp_path: Path) -> CheckpointStorage:
    """A checkpoint of rows with weight 1 to 30 and all state -1 to -30, statistics included."""
    storage = CheckpointStorage(tmp_path / "root")
    rows = {key * 2**58 + key: float(key) for key in range(1, 31)}
    content = Content({SCORED: rows, PLAIN: rows})
    make_checkpoint(storage, tmp_path, FULL, content, tables=(SCORED, PLAIN))
    return storage


def test_an_export_has_them_in_a_file_of_their_own(
    storage: CheckpointStorage, tmp_path: Path
) -> None:
    folder = export(storage, FULL, tmp_path / "out", rows=RowChoice(statistics=True))
    [path] = folder.glob("*.statistics.safetensors")
    found = load_file(path)
    assert set(found) == {"keys", "last_seen", "frequency", "show", "click"}
    assert (np.diff(found["keys"].astype(object)) > 0).all()
    table = Export.open(folder).table("ads/scored")
    weights = table.lookup(found["keys"])[:, 0]
    np.testing.assert_array_equal(found["show"], -weights)
    bits = (-weights).view(np.uint32).astype(np.int64)
    np.testing.assert_array_equal(found["last_seen"], bits)
    Export.open(folder).verify()


def test_an_export_may_leave_rows_of_a_low_score_out(
    storage: CheckpointStorage, tmp_path: Path
) -> None:
    # Shows and clicks are minus the weight, so the score is minus twice the weight.
    folder = export(storage, FULL, tmp_path / "out", rows=RowChoice(score_at_least=-20.0))
    assert not list(folder.glob("*.statistics.safetensors"))
    opened = Export.open(folder)
    keys = np.array([key * 2**58 + key for key in range(1, 31)], np.uint64)
    kept = opened.table("ads/scored").lookup(keys, unknown="zeros")[:, 0]
    assert np.flatnonzero(kept).tolist() == list(range(10))
    whole = opened.table("ads/plain").lookup(keys, unknown="zeros")[:, 0]
    assert whole.all(), "a table without shows and clicks has all its rows"
