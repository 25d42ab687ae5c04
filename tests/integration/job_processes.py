"""A job of the tests: servers, its job master and its workers, all of them real processes.

The worker under test may also run in this process (``Worker`` in a thread or the main one).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from backstay._proto.v1 import job_pb2
from backstay.errors import BackstayError
from backstay.job_spec import JobSpec
from backstay.master.job_client import JobClient
from backstay.pserver.local_cluster import LocalCluster
from tests.waiting import wait_until

__all__ = ["JobProcesses"]

WAIT_LIMIT_S = 120.0
PAUSE_S = 0.05
OVER = ("done", "stopped", "failed")


class JobProcesses:
    """A job master beside a cluster, and workers as they are asked for. A context manager.

    Attributes:
        spec: The job.
        client: For its status and orders.
    """

    def __init__(
        self, cluster: LocalCluster, spec: JobSpec, folder: Path, **variables: str
    ) -> None:
        self.spec = spec
        self._cluster = cluster
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("BACKSTAY_")},
            **cluster.environment(),
            "BACKSTAY_ENDPOINT": ",".join(cluster.endpoints),
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        self.client = JobClient(cluster.endpoints, spec.name, config=cluster.client_config())

    @property
    def endpoints(self) -> list[str]:
        """Of the servers."""
        return self._cluster.endpoints

    def __enter__(self) -> JobProcesses:
        spec_file = self._folder / "job.json"
        spec_file.write_text(self.spec.to_json(), encoding="utf-8")
        self.start("master", "-m", "backstay.cli", "master", str(spec_file))
        try:
            self._first_status()
        except BaseException:
            self._end(with_logs=True)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(with_logs=error is not None)

    def _end(self, *, with_logs: bool) -> None:
        self.client.close()
        for process in self._processes.values():
            process.kill()
            process.wait()
        if with_logs:
            for name in self._processes:
                print(f"---- {name}\n{self.log(name)}")  # noqa: T201 (pytest shows it)

    def start(self, name: str, *arguments: str, **variables: str) -> None:
        """Start a Python program; its output goes to a log of that name."""
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, *arguments],
                env={**self._environment, **variables},
                stdout=log,
                stderr=log,
            )

    def start_worker(self, worker_id: str, **variables: str) -> None:
        """Start a worker process."""
        module = ["-m", "backstay.trainer.worker.cli"]
        self.start(
            worker_id, *module, "--job", self.spec.name, "--worker-id", worker_id, **variables
        )

    def log(self, name: str) -> str:
        """Return what a process wrote."""
        return (self._folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def code(self, name: str) -> int:
        """Wait for the end of a process; return its exit code."""
        return self._processes[name].wait(WAIT_LIMIT_S)

    def kill(self, name: str) -> None:
        """End a process by SIGKILL."""
        self._processes[name].kill()
        self._processes[name].wait()

    def _first_status(self) -> None:
        """Wait for the job master."""

        def answers() -> bool:
            try:
                self.client.status()
            except BackstayError:
                assert self._processes["master"].poll() is None, self.log("master")
                return False
            return True

        wait_until(answers, lambda: self.log("master"), limit_s=WAIT_LIMIT_S, pause_s=PAUSE_S)

    def over(self) -> job_pb2.JobStatus:
        """Wait for the end of the job; return its status."""
        return self.until(lambda status: status.state in OVER)

    def until(self, holds: Callable[[job_pb2.JobStatus], bool]) -> job_pb2.JobStatus:
        """Wait until the job's status is as it should be; return it."""
        last: list[object] = ["no status came"]

        def reached() -> job_pb2.JobStatus | None:
            try:
                status = self.client.status()
            except BackstayError as error:
                last.append(error)
                return None
            last.append(status)
            return status if holds(status) else None

        return wait_until(reached, lambda: last[-1], limit_s=WAIT_LIMIT_S, pause_s=PAUSE_S)
