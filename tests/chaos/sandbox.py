"""Namespaces of this run's own: network, processes, mounts.

The run starts itself again inside them. Whatever it makes there, interfaces, rules, processes,
goes with it, however it ends: the kernel removes a process namespace with its first process, and
a network namespace with its last.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

__all__ = ["NEEDED", "command", "enter", "is_inside", "why_not"]

_MARK = "CHAOS_SANDBOX"
NEEDED = ("setpriv", "unshare", "nsenter", "ip", "nft", "iptables", "tc")


def is_inside() -> bool:
    """Whether this process is the one started in the namespaces."""
    return os.environ.get(_MARK) == "1"


def why_not() -> str:
    """Return why namespaces cannot be made here; empty if they can."""
    path = _path()
    missing = [name for name in NEEDED if shutil.which(name, path=path) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    probe = "ip link add probe type bridge && nft add table inet probe"
    done = subprocess.run(
        [*command(), "sh", "-c", probe],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env=os.environ | {"PATH": path},
    )
    return "" if done.returncode == 0 else f"not permitted: {done.stderr.strip()}"


def enter(arguments: list[str]) -> int:
    """Run ``python -m tests.chaos`` with these arguments inside; return its exit code."""
    process = subprocess.Popen(
        [*command(), sys.executable, "-m", "tests.chaos", *arguments],
        env=os.environ | {_MARK: "1", "PATH": _path()},
        # Ctrl-C reaches this process; it is passed on once, and not twice.
        start_new_session=True,
    )

    def pass_on(number: int, frame: object) -> None:
        # unshare itself ignores it.
        for child in _children(process.pid):
            os.kill(child, signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    return process.wait()


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(child) for child in text.split()]


def command() -> list[str]:
    """Return what is put before a command to run it in namespaces of its own."""
    # Each ends with its parent, even one that is killed: this process, unshare, the first inside.
    words = ["setpriv", "--pdeathsig", "KILL", "unshare"]
    words += ["--net", "--pid", "--mount-proc", "--fork", "--kill-child"]
    if os.geteuid() != 0:
        words += ["--user", "--map-root-user"]
    return [*words, "--"]


def _path() -> str:
    return os.environ.get("PATH", os.defpath) + os.pathsep + "/usr/sbin" + os.pathsep + "/sbin"
