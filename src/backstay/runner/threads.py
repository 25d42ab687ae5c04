"""How many threads each process of a job computes with.

A framework uses all cores. Processes that share the cores then wait for each other's threads in
every operation: on two busy cores a job of one process takes several times as long. One share of
the cores stays free for reading and for the servers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from backstay.job_spec import JobSpec

__all__ = ["Threads", "chosen_threads", "usable_cores"]

# Whichever the user has set, the frameworks go by it.
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_PADDLE = re.compile(r"^\s*(?:import|from)\s+paddle\b", re.MULTILINE)
_QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")


class Threads(NamedTuple):
    """What the processes of a job compute with.

    Attributes:
        environment: Variables for them; empty: they are left as they are.
        text: The same for people.
    """

    environment: dict[str, str]
    text: str


def chosen_threads(
    spec: JobSpec, environment: Mapping[str, str], *, processes: int, cores: int
) -> Threads:
    """Return how many threads each process is to have, unless the user has said so.

    Args:
        spec: The job; ``workers.env`` counts as the user's word.
        environment: Of this process.
        processes: How many compute at the same time on this machine.
        cores: That they may use.
    """
    for name in VARIABLES:
        said = spec.workers.env.get(name) or environment.get(name)
        if said:
            return Threads({}, f"{said} threads a process ({name})")
    if _is_paddle(spec):
        return Threads({}, "1 thread a process (Paddle's default; OMP_NUM_THREADS sets another)")
    count = max(1, cores // (processes + 1))
    shared = f"{cores} cores, {processes} process{'es' if processes != 1 else ''}"
    plural = "s" if count != 1 else ""
    return Threads(
        {VARIABLES[0]: str(count)},
        f"{count} thread{plural} a process ({shared}; OMP_NUM_THREADS sets another number)",
    )


def usable_cores() -> int:
    """Return how many cores this process may use: of its affinity, and of its container's quota."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        cores = os.cpu_count() or 1
    try:
        quota, period = _QUOTA_FILE.read_text(encoding="ascii").split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # there is none
        return cores


def _is_paddle(spec: JobSpec) -> bool:
    """Return whether the model is Paddle's, which says itself how many threads it takes."""
    if spec.framework != "auto":
        return spec.framework == "paddle"
    try:
        text = Path(spec.model).read_text(encoding="utf-8", errors="replace")
    except OSError:
        # Loading the file raises the error.
        return False
    return _PADDLE.search(text) is not None
