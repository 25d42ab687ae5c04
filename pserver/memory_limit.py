"""How much memory a node uses at most, if its setting does not say.

``chosen_limit`` decides from texts; ``find_limit`` reads them. A process may use what its control
group allows, or any group above it, else what the machine has. It takes a part of that: the rest
is for the system and for what comes and goes between two looks at the memory. This module imports
the standard library and ``backstay.config`` only.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from backstay.config import MEMORY_LIMIT_MIN_BYTES

__all__ = ["MemoryLimit", "chosen_limit", "find_limit", "limit_files"]

SHARE_PERCENT = 80
GROUPS = PurePosixPath("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MEMORY = Path("/proc/meminfo")
# In version 1 of control groups "no limit" is a number as large as this, or larger.
UNLIMITED_BYTES = 1 << 60


class MemoryLimit(NamedTuple):
    """The most memory that a node uses, and why.

    Attributes:
        limit_bytes: 0: there is no limit.
        reason: For the log.
        is_small: It is below what a node needs; the system may end the process.
    """

    limit_bytes: int
    reason: str
    is_small: bool = False


def limit_files(membership: str) -> tuple[str, ...]:
    """Return the files that may limit the memory of a process, by its ``/proc/PID/cgroup``.

    In a container the path may be that of the host, of which only the root is seen: so each group
    above counts, too, up to the root.
    """
    files: list[str] = []
    for line in membership.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            root, name = GROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = GROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = PurePosixPath("/") / path
        groups = (group, *group.parents)
        files.extend(str(root / one.relative_to("/") / name) for one in groups)
    return tuple(dict.fromkeys(files))


def chosen_limit(setting: int | None, groups: Mapping[str, str], memory: str) -> MemoryLimit:
    """Return the limit of a node.

    Args:
        setting: ``memory_limit_bytes``; None: it is not set.
        groups: The text of each file of ``limit_files`` that there is.
        memory: The text of ``/proc/meminfo``; empty: there is none.
    """
    if setting is not None:
        return MemoryLimit(setting, "as set" if setting else "no limit, as set")
    allowed = [(size, f"{path} allows {size:,}") for path, size in _group_limits(groups.items())]
    found = re.search(r"^MemTotal:\s+(\d+) kB$", memory, re.MULTILINE)
    if found is not None:
        size = int(found[1]) * 1024
        allowed.append((size, f"the machine has {size:,}"))
    if not allowed:
        return MemoryLimit(0, "no limit: the system does not say how much memory there is")
    size, why = min(allowed)
    limit = size * SHARE_PERCENT // 100
    if limit < MEMORY_LIMIT_MIN_BYTES:
        return MemoryLimit(
            MEMORY_LIMIT_MIN_BYTES, f"{why}, which is too little for a node", is_small=True
        )
    return MemoryLimit(limit, f"{SHARE_PERCENT}% of memory: {why}")


def _group_limits(files: Iterable[tuple[str, str]]) -> Iterable[tuple[str, int]]:
    for path, text in files:
        # "max" of version 2 is no number.
        if text.strip().isdigit() and 0 < int(text) < UNLIMITED_BYTES:
            yield path, int(text)


def find_limit(setting: int | None) -> MemoryLimit:
    """Return the limit of this process, as ``chosen_limit`` decides it."""
    groups: dict[str, str] = {}
    for file in limit_files(_text(MEMBERSHIP)):
        if text := _text(Path(file)):
            groups[file] = text
    return chosen_limit(setting, groups, _text(MEMORY))


def _text(path: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8")
    return ""
