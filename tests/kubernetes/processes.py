"""The cluster's processes, each with all its children in a cgroup of its own.

A cgroup's members cannot leave it, so nothing is left over when a test dies: who runs is read
from the kernel, and no file of process ids can be wrong. Works with both versions of cgroups.
Imports the standard library only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

__all__ = [
    "NODE_CGROUP",
    "hierarchies",
    "kill",
    "kill_all",
    "kill_pod",
    "pids",
    "remove_cgroups",
    "start",
]

CGROUPS = Path("/sys/fs/cgroup")
# Each node's Pods are in one named after the node, which kubelet fills.
NODE_CGROUP = "backstay-kubernetes-{}"
PROCESSES = "backstay-kubernetes-processes"
# What the one process of a Pod's sandbox is called.
PAUSE = "pause"
KILL_LIMIT_S = 20.0
POLL_PAUSE_S = 0.02


def hierarchies() -> list[Path]:
    """Return the roots of all cgroups: one of version 2, or one for each controller."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return [path for path in CGROUPS.iterdir() if path.is_dir() and path.name != "unified"]


def start(name: str, arguments: Sequence[str | Path], log: Path) -> None:
    """Start a process that outlives this one; its output is added to the log."""
    cgroup = _cgroup(name)
    cgroup.mkdir(parents=True, exist_ok=True)
    # The shell enters the cgroup before it becomes the program: no child can be outside.
    enter = 'echo $$ >"$0" && exec setsid --fork "$@"'
    with log.open("ab") as output:
        subprocess.run(
            ["sh", "-c", enter, str(cgroup / "cgroup.procs"), *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            check=True,
        )


def pids(name: str) -> list[int]:
    """Return the processes of this name, its children among them; none if it does not run."""
    return _members(_cgroup(name))


def kill(name: str) -> None:
    """Kill it and its children (SIGKILL)."""
    _kill(_cgroup(name))


def kill_all() -> None:
    """Kill every process of the cluster, those of Pods included."""
    for tree in _trees(_process_hierarchy()):
        for cgroup in _below(tree):
            _kill(cgroup)


def kill_pod(uid: str) -> int:
    """Kill the processes of a Pod's containers, as a crash does; return how many there were.

    The Pod keeps its address: the process that holds it is spared.
    """
    killed = 0
    for tree in _trees(_process_hierarchy()):
        for cgroup in _below(tree):
            if f"pod{uid}" not in cgroup.parts:
                continue
            for pid in _members(cgroup):
                if _name_of(pid) not in ("", PAUSE):
                    _signal(pid, signal.SIGKILL)
                    killed += 1
    return killed


def remove_cgroups() -> None:
    """Remove the cgroups, which must have no members."""
    # runc makes some in the unified hierarchy, too.
    for hierarchy in {*hierarchies(), CGROUPS / "unified"}:
        for tree in _trees(hierarchy):
            for cgroup in _below(tree):
                cgroup.rmdir()


def _process_hierarchy() -> Path:
    everywhere = hierarchies()
    return everywhere[0] if everywhere == [CGROUPS] else CGROUPS / "pids"


def _cgroup(name: str) -> Path:
    return _process_hierarchy() / PROCESSES / name


def _trees(hierarchy: Path) -> list[Path]:
    return sorted(hierarchy.glob(NODE_CGROUP.format("*")))


def _below(tree: Path) -> list[Path]:
    """The folder and all in it, the deepest first."""
    return [Path(folder) for folder, _, _ in os.walk(tree, topdown=False)]


def _members(cgroup: Path) -> list[int]:
    try:
        return [int(line) for line in (cgroup / "cgroup.procs").read_text().split()]
    except OSError:  # there is no such cgroup
        return []


def _kill(cgroup: Path) -> None:
    """Kill the members until there are none: a process may have forked meanwhile."""
    deadline = time.monotonic() + KILL_LIMIT_S
    while members := _members(cgroup):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {members} of {cgroup} do not die")
        for pid in members:
            _signal(pid, signal.SIGKILL)
        time.sleep(POLL_PAUSE_S)


def _name_of(pid: int) -> str:
    """Return the name of a process's program; empty: it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
