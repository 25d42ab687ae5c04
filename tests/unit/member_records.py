"""Records of members, as tests of a node and of its mirror want them."""

from __future__ import annotations

from dataclasses import replace

from backstay.consensus.records import MemberRecord


def member(index: int, **changes: object) -> MemberRecord:
    record = MemberRecord(
        node_id=f"ps-{index}",
        instance=11 + index,
        incarnation=1,
        status="serving",
        start_time=1795392000.0,
        sync=True,
        data_address=f"127.0.0.1:{7100 + index}",
        control_address=f"127.0.0.1:{7000 + index}",
        host="here",
        lease=5,
        version="1",
    )
    return replace(record, **changes)  # type: ignore[arg-type]
