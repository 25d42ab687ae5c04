"""The memory that a node uses at most, from what the system says."""

from __future__ import annotations

import pytest

from backstay.config import MEMORY_LIMIT_MIN_BYTES
from backstay.pserver.memory_limit import chosen_limit, find_limit, limit_files

GIB = 2**30
MEMORY = f"MemTotal:       {16 * 2**20} kB\nMemFree:        12 kB\n"
V1_NONE = "9223372036854771712\n"


def test_each_group_above_may_limit_a_process() -> None:
    assert limit_files("0::/jobs/a\n") == (
        "/sys/fs/cgroup/jobs/a/memory.max",
        "/sys/fs/cgroup/jobs/memory.max",
        "/sys/fs/cgroup/memory.max",
    )
    assert limit_files("9:name=systemd:/\n4:cpu,memory:/a\n") == (
        "/sys/fs/cgroup/memory/a/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    )
    assert limit_files("") == ()


@pytest.mark.parametrize(
    ("groups", "memory", "limit", "reason"),
    [
        ({}, MEMORY, 16 * GIB * 8 // 10, "the machine has 17,179,869,184"),
        ({"a": "max\n", "b": V1_NONE}, MEMORY, 16 * GIB * 8 // 10, "the machine has"),
        ({"a": f"{4 * GIB}\n"}, MEMORY, 4 * GIB * 8 // 10, "a allows 4,294,967,296"),
        ({"a": f"{4 * GIB}", "b": f"{2 * GIB}"}, MEMORY, 2 * GIB * 8 // 10, "b allows"),
        ({"a": f"{64 * GIB}"}, MEMORY, 16 * GIB * 8 // 10, "the machine has"),
        ({"a": f"{2 * GIB}"}, "", 2 * GIB * 8 // 10, "a allows"),
        ({}, "", 0, "no limit"),
        ({"a": "what?"}, "nothing", 0, "no limit"),
    ],
)
def test_it_is_four_fifths_of_the_least_that_is_allowed(
    groups: dict[str, str], memory: str, limit: int, reason: str
) -> None:
    chosen = chosen_limit(None, groups, memory)
    assert chosen.limit_bytes == limit
    assert reason in chosen.reason
    assert not chosen.is_small


def test_what_is_set_counts() -> None:
    assert chosen_limit(GIB, {"a": "1"}, MEMORY).limit_bytes == GIB
    unlimited = chosen_limit(0, {"a": "1"}, MEMORY)
    assert (unlimited.limit_bytes, unlimited.reason) == (0, "no limit, as set")


def test_too_little_memory_is_said() -> None:
    chosen = chosen_limit(None, {"a": str(64 * 2**20)}, MEMORY)
    assert chosen.is_small
    assert chosen.limit_bytes == MEMORY_LIMIT_MIN_BYTES
    assert "a allows 67,108,864" in chosen.reason


def test_this_process_has_a_limit() -> None:
    chosen = find_limit(None)
    assert chosen.limit_bytes >= MEMORY_LIMIT_MIN_BYTES
