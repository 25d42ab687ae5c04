"""What ``pserverctl top`` makes of two looks at the counters."""

from __future__ import annotations

from typing import Any

import pytest

from backstay.pserver.ctl.rates import (
    RATES,
    NodeSample,
    Sample,
    TableUsage,
    quantile_ms,
    rates_between,
)
from backstay.pserver.ctl.showing import count_text, size_text


def sample(
    uptime_ms: int,
    *,
    instance: int = 1,
    rows: int = 0,
    fast: int = 0,
    slow: int = 0,
    **counted: int,
) -> NodeSample:
    """A node that has counted so much, with pushes in two buckets of its histogram."""
    buckets = [0] * 20
    buckets[1], buckets[10] = fast, slow
    stats: dict[str, Any] = dict.fromkeys(RATES.values(), 0) | {
        "memory": {"rows": 90 * rows, "streams": 10 * rows},
        "connections_open": 3,
        "stale_slots": 0,
        "staleness_sum": 0,
        "replication": {"pending": 2, "commit": {"buckets": buckets}},
    }
    return NodeSample(instance, uptime_ms, stats | counted, {"emb": TableUsage(rows, 100 * rows)})


def only(before: NodeSample | None, after: NodeSample | None) -> Any:
    errors = {} if after is not None else {"ps-0": "no pserver answers at h:1"}
    return rates_between(Sample({"ps-0": before}), Sample({"ps-0": after}, errors))


def test_staleness_is_the_mean_of_what_was_measured_between() -> None:
    before = sample(10_000, stale_slots=100, staleness_sum=1000)
    after = sample(12_000, stale_slots=164, staleness_sum=1160)
    assert only(before, after)["nodes"][0]["staleness"] == 2.5
    assert (
        only(before, sample(12_000, stale_slots=100, staleness_sum=1000))["nodes"][0]["staleness"]
        is None
    )


def test_rates_are_what_was_counted_by_the_time_that_passed_at_the_node() -> None:
    before = sample(10_000, rows=50, pushes_applied=100, keys_pushed=9000, bytes_sent=7)
    after = sample(
        12_500, rows=100, fast=90, slow=10, pushes_applied=200, keys_pushed=10_000, bytes_sent=5007
    )
    report = only(before, after)
    node = report["nodes"][0]
    assert (node["state"], node["interval_s"]) == ("ok", 2.5)
    assert node["pushes_per_s"] == 40
    assert node["keys_pushed_per_s"] == 400
    assert node["bytes_out_per_s"] == 2000
    assert node["pulls_per_s"] == 0
    assert (node["rows"], node["memory_bytes"]) == (100, 10_000)
    assert (node["connections"], node["pending_pushes"]) == (3, 2)
    # 90 of 100 pushes took 16 to 32 microseconds, the others 8.2 to 16.4 ms.
    assert node["push_p50_ms"] == pytest.approx(0.025, abs=0.001)
    assert node["push_p99_ms"] == pytest.approx(15.565, abs=0.001)
    assert report["tables"] == [
        {"name": "emb", "rows": 100, "bytes": 10_000, "rows_per_s": 20, "bytes_per_s": 2000}
    ]


def test_nothing_pushed_has_no_times() -> None:
    node = only(sample(0, fast=5), sample(1000, fast=5))["nodes"][0]
    assert (node["push_p50_ms"], node["push_p99_ms"], node["pushes_per_s"]) == (None, None, 0)


@pytest.mark.parametrize(
    ("before", "after", "state"),
    [
        # Counters that went down are of another process; so is one that is younger than before.
        (sample(9000, pushes_applied=500), sample(300, instance=2, pushes_applied=3), "restarted"),
        (sample(9000, pushes_applied=500), sample(10_000, instance=2), "restarted"),
        (sample(9000), sample(9000), "restarted"),
        (None, sample(1000, pushes_applied=3), "new"),
        (sample(9000), None, "silent"),
        (None, None, "silent"),
    ],
)
def test_a_node_without_a_look_to_compare_with_has_no_rates(
    before: NodeSample | None, after: NodeSample | None, state: str
) -> None:
    report = only(before, after)
    node = report["nodes"][0]
    assert node["state"] == state
    assert {node[name] for name in RATES} == {None}
    assert {report["total"][name] for name in RATES} == {None}
    if after is None:
        assert node["error"] == "no pserver answers at h:1"
        assert (node["rows"], report["total"]["rows"], report["tables"]) == (None, None, [])
    else:
        assert (node["connections"], report["total"]["connections"]) == (3, 3)
        assert report["tables"][0]["rows_per_s"] is None


def test_totals_and_tables_leave_out_what_is_not_known() -> None:
    before = Sample(
        {
            "ps-0": sample(1000, rows=10, pushes_applied=10),
            "ps-1": sample(1000, rows=500, pushes_applied=10),
            "ps-2": sample(1000, rows=7),
        }
    )
    after = Sample(
        {
            "ps-0": sample(2000, rows=30, pushes_applied=25),
            "ps-1": sample(100, instance=9, rows=2, pushes_applied=1),
            "ps-2": None,
            "ps-3": sample(50, rows=4),
        },
        {"ps-2": "gone"},
    )
    report = rates_between(before, after)
    assert [node["state"] for node in report["nodes"]] == ["ok", "restarted", "silent", "new"]
    assert report["total"]["pushes_per_s"] == 15
    assert report["total"]["rows"] == 36
    # A node that lost its rows with its process did not remove them from the table.
    assert report["tables"][0]["rows"] == 36
    assert report["tables"][0]["rows_per_s"] == 20


def test_rows_that_were_removed_are_a_rate_below_zero() -> None:
    report = only(sample(0, rows=100), sample(1000, rows=40))
    assert report["tables"][0]["rows_per_s"] == -60


def test_quantiles_of_a_histogram() -> None:
    assert quantile_ms([0] * 20, 0.5) is None
    assert quantile_ms([10, *[0] * 19], 0.5) == 0.008
    assert quantile_ms([10, *[0] * 19], 1.0) == 0.016
    # The last bucket has no end: its beginning.
    assert quantile_ms([*[0] * 19, 4], 0.99) == 16 * 2**18 / 1000
    assert quantile_ms([0, 1, 1, *[0] * 17], 0.5) == 0.032


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"), (1.5, "1.5"), (0.12345, "0.123"), (12.6, "13"), (9999, "9999"),
        (10_000, "10 k"), (1_057_493, "1057 k"), (23_000_000, "23 M"), (-60, "-60"),
        (5e12, "5000 G"),
    ],
)  # fmt: skip
def test_counts_for_people(count: float, text: str) -> None:
    assert count_text(count) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (-2048, "-2 KiB"), (2**50, "1024 TiB")],
)
def test_sizes_for_people(size: float, text: str) -> None:
    assert size_text(size) == text
