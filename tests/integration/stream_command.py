"""``backstay train`` over data without an end, as a process, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from backstay._proto.v1 import job_pb2
from backstay.errors import BackstayError
from backstay.master.job_client import JobClient
from tests.waiting import wait_until

__all__ = ["LIMIT_S", "Command", "caught_up", "trained_here", "until"]

LIMIT_S = 120.0


class Command:
    """``backstay train`` as a process."""

    def __init__(self, folder: Path, endpoints: list[str]) -> None:
        self._folder = folder
        self._log = folder / "said"
        self._endpoints = ",".join(endpoints)

    def _run(self, *words: str) -> dict[str, Any]:
        given = {n: text for n, text in os.environ.items() if not n.startswith("BACKSTAY_")}
        given["BACKSTAY_ENDPOINT"] = self._endpoints
        return {
            "args": [sys.executable, "-m", "backstay.cli", *words],
            "cwd": self._folder,
            "env": given,
        }

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                **self._run("train", "job.yaml", "--json"), stdout=subprocess.PIPE, stderr=log
            )

    def ended(self) -> tuple[int, dict[str, Any]]:
        output, _ = self._process.communicate(timeout=LIMIT_S)
        return self._process.returncode, json.loads(output)

    def jobs(self, *words: str) -> str:
        done = subprocess.run(
            **self._run("jobs", *words),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        said: str = done.stdout + done.stderr
        return said

    def child(self, word: str) -> psutil.Process:
        """Return a process of the job whose command line has a word."""

        def found() -> psutil.Process | None:
            for one in psutil.Process(self._process.pid).children(recursive=True):
                try:
                    words = one.cmdline()
                except psutil.Error:
                    continue
                if any(word in each for each in words):
                    return one
            return None

        return wait_until(found, self.said, limit_s=LIMIT_S)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def said(self) -> str:
        return self._log.read_text()[-4000:]


def until(client: JobClient, command: Command, holds: Any) -> job_pb2.JobStatus:
    """Wait until the status of the job is as it should be."""
    last: list[object] = []

    def reached() -> job_pb2.JobStatus | None:
        try:
            status = client.status()
        except BackstayError as error:
            last[:] = [error]
            return None
        last[:] = [status]
        return status if holds(status) else None

    return wait_until(reached, lambda: f"{last}\n{command.said()}", limit_s=LIMIT_S, pause_s=0.1)


def trained_here(folder: Path) -> dict[str, Any]:
    """Run the job of a folder in one process, and return what it prints at its end."""
    done = subprocess.run(
        [sys.executable, "-m", "backstay.cli", "train", "job.yaml", "--local", "--json"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def caught_up(client: JobClient, command: Command) -> None:
    """Wait until all that is there is done."""
    until(
        client,
        command,
        lambda one: (
            one.state == "running"
            and one.stream.HasField("lag_records")
            and not one.stream.lag_records
            and one.examples > 0
        ),
    )
