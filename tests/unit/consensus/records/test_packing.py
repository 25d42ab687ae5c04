"""Large records fit into one value of a coordination store; damaged ones are refused."""

from __future__ import annotations

import base64
import json
import zlib
from random import Random

import pytest

from backstay.consensus.records import ClusterConfig
from backstay.consensus.records.packing import PACKED_OVER_BYTES, UNPACKED_BYTES_MAX, pack, unpack
from backstay.consensus.store import VALUE_BYTES_MAX
from backstay.errors import InvalidRequest
from backstay.pserver.controller import ClusterRecords, decide
from tests.unit.member_records import member

LONG = json.dumps([Random(number).random() for number in range(10_000)])


def test_short_texts_stay_as_they_are() -> None:
    text = "x" * PACKED_OVER_BYTES
    assert pack(text) == text
    assert unpack(text) == text


def test_long_texts_come_back() -> None:
    assert len(pack(LONG)) < len(LONG)
    assert unpack(pack(LONG)) == LONG


def test_the_routing_of_a_thousand_nodes_fits_into_one_value() -> None:
    members = {
        f"ps-{number:04}": member(
            number,
            node_id=f"ps-{number:04}",
            instance=2**62 + number * 1_000_003,
            data_address=f"pserver-{number:04}.backstay.training.svc:7100",
            control_address=f"pserver-{number:04}.backstay.training.svc:7000",
            host=f"machine-{number:04}",
        )
        for number in range(1000)
    }
    config = ClusterConfig("large", 65_536, 3, 1000, "0")
    routing = decide(ClusterRecords(config, members)).routing
    assert routing is not None
    text = routing.to_json()
    assert len(text) > VALUE_BYTES_MAX
    assert len(pack(text)) < VALUE_BYTES_MAX * 0.8


def packed(**changes: object) -> str:
    return json.dumps({**json.loads(pack(LONG)), **changes}, separators=(",", ":"))


@pytest.mark.parametrize(
    "broken",
    [
        pack(LONG)[:-10],
        '{"packed":"zlib+base64"}',
        packed(packed="zstd"),
        packed(bytes=len(LONG) - 1),
        packed(bytes=len(LONG) + 1),
        packed(bytes=-1),
        packed(bytes=UNPACKED_BYTES_MAX + 1),
        packed(bytes="7"),
        packed(data=3),
        packed(data="?"),
        packed(data="ä"),
        packed(data=base64.b64encode(b"no zlib").decode()),
        packed(data=base64.b64encode(zlib.compress(LONG.encode())[:-4]).decode()),
        packed(data=base64.b64encode(zlib.compress(b"\xff" * len(LONG))).decode()),
        # A bomb: far more than it names.
        packed(bytes=10, data=base64.b64encode(zlib.compress(b"0" * 10_000_000)).decode()),
    ],
)
def test_damaged_ones_are_refused(broken: str) -> None:
    with pytest.raises(InvalidRequest, match="packed record"):
        unpack(broken)
