"""Where the exports of a run go: a folder of limited size, or an S3 server on a host of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import s3fs

from tests.chaos.network import Network
from tests.chaos.processes import Process

__all__ = ["FolderSink", "S3Sink", "Sink"]

MIB = 1 << 20
SIZE_MIB = 48
S3_PORT = 9000
BUCKET = "served"
START_LIMIT_S = 60.0


class Sink(Protocol):
    """What faults need of it."""

    def url(self, job: str) -> str:
        """Return where a job's export goes."""

    def away(self, job: str) -> None:
        """Let nobody reach it."""

    def back(self, job: str) -> None:
        """End that."""

    def close(self) -> None:
        """End it."""


class FolderSink:
    """A folder; on a small file system of its own, if mounts are this run's own."""

    def __init__(self, folder: Path, *, mounts: bool) -> None:
        """Make it."""
        self.folder = folder / "served"
        self.folder.mkdir()
        self.is_mounted = mounts
        if mounts:
            options = f"size={SIZE_MIB}m,mode=755"
            command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.folder)]
            subprocess.run(command, check=True)

    def url(self, job: str) -> str:
        """Return where a job's export goes."""
        return str(self.folder / job)

    def fill(self) -> None:
        """Leave no byte free, whatever is removed meanwhile."""
        for number in range(1000):
            ballast = self.folder / f"ballast-{number}"
            try:
                with ballast.open("wb", buffering=0) as file:
                    while file.write(bytes(MIB // 16)):
                        pass
            except OSError:
                if ballast.exists() and not ballast.stat().st_size:
                    return
                continue

    def drain(self) -> None:
        """Give the room back."""
        for ballast in self.folder.glob("ballast-*"):
            ballast.unlink()

    def away(self, job: str) -> None:
        """Put a file in the place of the folder."""
        (self.folder / job).rename(self.folder / f"{job}.away")
        (self.folder / job).write_text("")

    def back(self, job: str) -> None:
        """Put the folder there again."""
        (self.folder / job).unlink()
        (self.folder / f"{job}.away").rename(self.folder / job)

    def close(self) -> None:
        """Unmount it."""
        if self.is_mounted:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=False)


class S3Sink:
    """moto's server; all processes of the run find it by their environment."""

    def __init__(self, folder: Path, network: Network) -> None:
        """Start it."""
        host = network.add_host("s3")
        self._host, self._network = host, network
        command = [sys.executable, "-m", "moto.server", "-H", host.address, "-p", str(S3_PORT)]
        self._server = Process(
            host, ["setpriv", "--pdeathsig", "KILL", *command], folder / "s3.log"
        )
        self._server.start()
        os.environ["AWS_ENDPOINT_URL"] = f"http://{host.address}:{S3_PORT}"
        os.environ["AWS_ACCESS_KEY_ID"] = "tester"
        os.environ["AWS_SECRET_ACCESS_KEY"] = "of-no-worth"
        os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
        deadline_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline_s:
            with suppress(OSError):
                s3fs.S3FileSystem(skip_instance_cache=True).mkdir(BUCKET)
                return
            time.sleep(0.2)
        raise RuntimeError(f"no S3 server: {self._server.log_tail()}")

    def url(self, job: str) -> str:
        """Return where a job's export goes."""
        return f"s3://{BUCKET}/{job}"

    def away(self, job: str) -> None:
        """Refuse all connections; without a network of the run's own, stop its clock."""
        del job
        if self._network.has_faults:
            self._network.apply(self._host, ["meta l4proto tcp reject with tcp reset"])
        else:
            self._server.pause()

    def back(self, job: str) -> None:
        """Let it answer again."""
        del job
        if self._network.has_faults:
            self._network.heal(self._host)
        else:
            self._server.resume()

    def close(self) -> None:
        """End it."""
        if self._server.is_running:
            self._server.kill()
