"""What the end of a pass asks of the servers, and thresholds that are refused before."""

from __future__ import annotations

from typing import Any, cast

import pytest

from backstay.cluster.upkeep import Expired, Thresholds, end_pass, expire_now
from backstay.errors import ConfigError
from backstay.tables import Expiry, Lifetime, Score, TableSpec

SPEC = TableSpec.sparse(
    "t",
    2,
    lifetime=Lifetime(
        expiry=Expiry(score_below=0.1, unseen_seconds=1_000), score=Score(1.0, 1.0, decay=0.5)
    ),
)


class SlowServers:
    """Servers whose decays and expiries take 12 seconds each."""

    def __init__(self) -> None:
        self.now_s = 1_000.5
        # For each expiry by last seen: how long ago a row was seen last that it leaves alone.
        self.kept_since: list[float] = []

    def decay(self, table: str, *, period: int) -> int:
        self.now_s += 12
        return 1

    def expire(self, table: str, *, unseen_seconds: int | None = None) -> Expired:
        if unseen_seconds is not None:
            self.kept_since.append(self.now_s - unseen_seconds)
        self.now_s += 12
        return Expired(0, 0, 0, 0, 1)


def test_the_end_of_a_pass_spares_rows_of_the_pass_however_long_it_takes() -> None:
    servers, since_s = SlowServers(), 997
    end_pass(servers, [SPEC, SPEC], period=1, unseen_since_s=since_s, now=lambda: servers.now_s)
    assert len(servers.kept_since) == 2
    # Clocks of servers may differ by a second, and count whole ones.
    assert all(since_s - 4 <= kept <= since_s - 2 for kept in servers.kept_since)


@pytest.mark.parametrize("seconds", [-1, 0, 2**31, 1.5, True])
def test_seconds_that_are_none_are_refused_before_anything_goes(seconds: Any) -> None:
    with pytest.raises(ConfigError, match=r"unseen_seconds is .*; allowed: an integer from 1 to"):
        expire_now(cast(Any, None), SPEC, Thresholds(unseen_seconds=seconds))
