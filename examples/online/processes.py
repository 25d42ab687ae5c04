"""The processes of the demo that backstay does not start: the website, and the broker's death.

May import the broker of the tests. Every wait has a limit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from examples.common.launch import ProcessFailed, stops_held_back
from tests.kafka.broker import KafkaBroker

__all__ = ["Outage", "Website"]

ROOT = Path(__file__).resolve().parents[2]
STOP_SECONDS = 90.0
ERROR_LINES_KEPT = 20


class Website:
    """``website.py`` as a process. A context manager."""

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        """Prepare.

        Args:
            arguments: Of its command.
            folder: For its log.
        """
        self._command = [sys.executable, "-m", "examples.online.website", *arguments]
        self._log = folder / "website.err"
        self._process: subprocess.Popen[str] | None = None
        self._last: dict[str, Any] = {}
        self._is_told_to_stop = False
        self._reader = threading.Thread(target=self._read, daemon=True)

    @property
    def models(self) -> list[str]:
        """Which models predict now: ``follower``, ``frozen``."""
        return list(self._last.get("models", []))

    @property
    def trouble(self) -> str:
        """Why there is no model yet; empty: all is well."""
        return str(self._last.get("trouble", ""))

    @property
    def auc(self) -> dict[str, float]:
        """Of each model, in the last window."""
        return dict(self._last.get("auc", {}))

    def check(self) -> None:
        """Fail if it has ended.

        Raises:
            ProcessFailed: It has.
        """
        assert self._process is not None
        if not self._is_told_to_stop and self._process.poll() is not None:
            raise ProcessFailed(f"the website has ended:\n{self._last_errors()}")

    def open(self) -> None:
        """Have the visits begin."""
        self._say("open")

    def freeze(self) -> None:
        """Have it keep the model as it is now, beside the one that it follows."""
        self._say("freeze")

    def stop(self) -> dict[str, Any]:
        """End it when all is written; return what it says at last.

        Raises:
            ProcessFailed: It does not end, or something was not written.
        """
        assert self._process is not None
        self._say("stop")
        self._is_told_to_stop = True
        try:
            code = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise ProcessFailed("the website does not end") from error
        self._reader.join()
        failed = self._last.get("failed", "it said nothing")
        if code != 0 or failed:
            raise ProcessFailed(
                f"the website ended with exit status {code}: {failed}\n{self._last_errors()}"
            )
        return self._last

    def __enter__(self) -> Website:
        with self._log.open("w", encoding="utf-8") as errors, stops_held_back():
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                # So small a model gains nothing by more threads.
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._reader.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _say(self, order: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self.check()
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._last = json.loads(line)

    def _last_errors(self) -> str:
        lines = self._log.read_text(encoding="utf-8").splitlines()
        return "\n".join(lines[-ERROR_LINES_KEPT:])


class Outage:
    """One death of the broker, and its return with the data that it had."""

    def __init__(self, broker: KafkaBroker, tell: Callable[[str], None]) -> None:
        self.seconds: float | None = None
        self._broker = broker
        self._tell = tell
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="broker", daemon=True)

    @property
    def is_busy(self) -> bool:
        """Whether the broker is away."""
        return self._thread.is_alive()

    def begin(self) -> None:
        """Kill it, with a signal that nothing can catch; returns at once."""
        self._tell("the broker is killed (SIGKILL); clicks wait at the website")
        self._thread.start()

    def check(self) -> None:
        """Fail if it does not come back.

        Raises:
            ProcessFailed: It does not.
        """
        if self._error is not None:
            raise ProcessFailed(f"the broker did not come back: {self._error}") from self._error

    def wait(self) -> None:
        """Wait until it is back; its start has a limit of its own."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        begun_s = time.monotonic()
        try:
            self._broker.kill()
            self._broker.start()
        except Exception as error:  # noqa: BLE001
            # Whatever it is: ``check`` raises it in the main thread.
            self._error = error
            return
        self.seconds = time.monotonic() - begun_s
        self._tell(f"the broker answers again, {self.seconds:.1f} s after the kill")
