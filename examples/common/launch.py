"""Run trainer processes side by side and listen to what they report.

May import backstay's local cluster. It leaves no process behind, whichever way it ends.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any

from backstay.pserver.local_cluster import LocalCluster

__all__ = ["REPORT", "ProcessFailed", "check_servers", "run_trainers"]

ROOT = Path(__file__).resolve().parents[2]
# Begins the lines by which a trainer tells the program that started it how it does.
REPORT = "REPORT "
STDERR_LINES_KEPT = 30
STOP_SECONDS = 5.0
# How often the servers are looked at.
CHECK_SECONDS = 0.5


class ProcessFailed(RuntimeError):
    """A trainer failed or a server died; the message holds the end of what it wrote."""


class _Trainer:
    """One process; its lines go to ``lines`` as (trainer, line), its end as (trainer, None)."""

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        lines: queue.Queue[tuple[int, str | None]],
    ) -> None:
        self.number = number
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, **environment, "PADDLE_TRAINER_ID": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.last_errors: deque[str] = deque(maxlen=STDERR_LINES_KEPT)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, lines), daemon=True),
            threading.Thread(target=self._keep, args=(self.process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: IO[str], lines: queue.Queue[tuple[int, str | None]]) -> None:
        with stream:
            for line in stream:
                lines.put((self.number, line))
        lines.put((self.number, None))

    def _keep(self, stream: IO[str]) -> None:
        with stream:
            self.last_errors.extend(stream)

    def check_result(self) -> None:
        """Wait for the end; raise if it is not a good one."""
        code = self._wait()
        if code != 0:
            how = f"exit status {code}" if code > 0 else f"killed by signal {-code}"
            raise ProcessFailed(
                f"trainer {self.number} failed ({how}); it wrote last:\n"
                + "".join(self.last_errors)
            )

    def stop(self) -> None:
        """End the process if it still runs."""
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._wait()

    def _wait(self) -> int:
        code = self.process.wait()
        for reader in self._readers:
            reader.join()
        return code


def run_trainers(
    command: Sequence[str],
    *,
    trainers: int,
    cluster: LocalCluster,
    on_report: Callable[[dict[str, Any]], None],
    check: Callable[[], None] | None = None,
) -> None:
    """Run ``python *command`` once for each trainer, and return when all have ended well.

    Each finds its place under the names PADDLE_TRAINER_ID, PADDLE_TRAINERS_NUM and
    PADDLE_PSERVERS_IP_PORT_LIST.

    Args:
        command: Arguments of Python, e.g. ["-m", "examples.census.train"].
        trainers: How many processes.
        cluster: The servers, running.
        on_report: Called with what each ``REPORT {json}`` line says.
        check: Called twice a second, and when a trainer ends; what it raises ends the run.
            Default: ``check_servers``.

    Raises:
        ProcessFailed: A trainer ended with an error, or a server died; the trainers are stopped.
    """
    environment = {
        "TRAINING_ROLE": "TRAINER",
        "PADDLE_TRAINERS_NUM": str(trainers),
        "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(cluster.endpoints),
        # Small matrices: two trainers on two cores only disturb each other with more.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    check_now = check or (lambda: check_servers(cluster))
    lines: queue.Queue[tuple[int, str | None]] = queue.Queue()
    running: dict[int, _Trainer] = {}
    checked = time.monotonic()
    try:
        for number in range(trainers):
            with stops_held_back():
                running[number] = _Trainer(number, command, environment, lines)
        while running:
            # Also while the trainers have a lot to say: they outlive a server.
            if time.monotonic() - checked >= CHECK_SECONDS:
                check_now()
                checked = time.monotonic()
            try:
                number, line = lines.get(timeout=CHECK_SECONDS)
            except queue.Empty:
                continue
            if line is None:
                check_now()  # the cause, if a server has died: name it first
                running[number].check_result()
                del running[number]
            elif line.startswith(REPORT):
                on_report(json.loads(line[len(REPORT) :]))
    finally:
        for trainer in running.values():
            trainer.stop()


@contextmanager
def stops_held_back() -> Iterator[None]:
    """Let SIGTERM and Ctrl-C wait for the end of the block.

    A handler that raises while a process is being started would leave one behind that nobody
    knows. Handlers, unlike a mask of signals, are not passed on to it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []

    def hold(number: int, _: FrameType | None) -> None:
        held.append(number)

    before = {number: signal.signal(number, hold) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for stop in held:
            signal.raise_signal(stop)


def check_servers(cluster: LocalCluster, *, but: Collection[str] = ()) -> None:
    """Make sure that all servers run.

    Args:
        cluster: The servers.
        but: The node ids of those that may be down.

    Raises:
        ProcessFailed: One has died; the message holds the end of its log.
    """
    # A copy: one that leaves by a resize is taken off the list by another thread.
    for server in list(cluster.servers):
        if not server.is_running and server.node_id not in but:
            raise ProcessFailed(
                f"server {server.node_id} at {server.control_address} has died (exit status "
                f"{server.process.returncode}); it wrote last:\n{server.log_tail()}"
            )
