"""Checkpoints on disks that are full or read-only: a program, for a mount namespace of its own.

::

    unshare --mount --user --map-root-user python -m tests.integration.checkpoint_disks full DIR

What it mounts goes with its namespace, however it ends.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from backstay.errors import CheckpointUnavailable
from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer import Client
from tests.integration.checkpoint_load import (
    Load,
    Saving,
    check_all,
    counted,
    ended_ids,
    fill,
    loading,
    pushing,
    settings,
)

# A full checkpoint of the load takes about 200 KB, so one fits and two do not.
SMALL, LARGE = "320k", "2m"


def mount(folder: Path, options: str) -> None:
    """Change how the disk is mounted."""
    command = ["mount", "-t", "tmpfs", "-o", options, "backstay-test", str(folder)]
    subprocess.run(command, check=True, timeout=30)


def refused(endpoint: str, load: Load, wanted: str) -> None:
    """Ask for a checkpoint that cannot be written; it must be said why, and pushes go on."""
    failure = Saving(endpoint, load, kind="full").failure()
    assert isinstance(failure, CheckpointUnavailable), failure
    assert wanted in str(failure), failure
    load.wait_for(3)


def full(folder: Path, endpoint: str, load: Load) -> str:
    """A disk without room for a second checkpoint; then one that leftovers have filled."""
    first = Saving(endpoint, load).result().id
    refused(endpoint, load, "No space left on device")
    assert ended_ids(folder) == [first]
    check_all(folder)
    mount(folder, f"remount,size={LARGE}")
    left = folder / "ckpt-000002-abcdef"
    left.mkdir()
    taken = sum(path.stat().st_size for path in folder.glob("*/*"))
    (left / "part-0-0000.safetensors.tmp").write_bytes(bytes(2 * 2**20 - taken - 100_000))
    second = Saving(endpoint, load, kind="full").result().id
    assert ended_ids(folder) == [first, second]
    check_all(folder)
    return second


def read_only(folder: Path, endpoint: str, load: Load) -> str:
    """A disk that is read-only for a while."""
    mount(folder, f"remount,size={LARGE}")
    first = Saving(endpoint, load).result().id
    mount(folder, "remount,ro")
    refused(endpoint, load, "Read-only file system")
    assert ended_ids(folder) == [first]
    mount(folder, "remount,rw")
    second = Saving(endpoint, load).result()
    assert second.base == first
    check_all(folder)
    # To read is enough for a restore.
    mount(folder, "remount,ro")
    return second.id


SCENARIOS: Mapping[str, Callable[[Path, str, Load], str]] = {"full": full, "read_only": read_only}


def main(name: str, folder: Path) -> None:
    """Run one scenario; a failure is an exception."""
    mount(folder, f"size={SMALL}")
    with (
        LocalCluster(2, settings=settings(folder)) as cluster,
        Client(cluster.endpoints) as client,
    ):
        fill(client)
        with pushing(cluster.endpoints) as load:
            last = SCENARIOS[name](folder, cluster.endpoints[0], load)
        assert counted(client) == [load.acknowledged]
    with loading(folder, last) as client:
        assert 1 <= counted(client)[0] <= load.acknowledged


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
