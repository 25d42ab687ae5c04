"""Commands that are run at the end of each pass or period, beside the job that goes on.

They run one after the other in a thread. When passes end faster than their commands, those of the
newest one are run. A command that fails is said, and changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from backstay._proto.v1 import job_pb2
from backstay.errors import JobError
from backstay.job_spec import JobSpec
from backstay.runner.hooks import run_hooks

__all__ = ["PassHooks"]


class PassHooks:
    """Runs these commands for one job, as its status tells; for use by one thread.

    Args:
        spec: The job.
        env: Variables of the commands.
        say: Says something to people; called in any thread.
        output: The file that takes what the commands print; None: standard error.
        is_new: Whether the job begins; of one that goes on, the passes before are none of ours.
    """

    def __init__(
        self,
        spec: JobSpec,
        env: Mapping[str, str],
        say: Callable[[str], None],
        output: Path | None = None,
        *,
        is_new: bool,
    ) -> None:
        self._hooks = spec.hooks
        # Then a pass ends with a checkpoint, and its commands may use it.
        self._saves = spec.checkpoint.every == "pass"
        self._env = {**env, "BACKSTAY_JOB": spec.name}
        self._say = say
        self._output = output
        # The last pass whose end was seen; None: the first look tells.
        self._seen: int | None = 0 if is_new else None
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def look(self, status: job_pb2.JobStatus) -> None:
        """Run the commands if a pass has ended since the last look.

        They wait for the checkpoint of its end, but not for longer than the next pass lasts.
        """
        if not self._hooks.each_pass:
            return
        over = status.passes_over
        if self._saves:
            over = min(over, max(status.passes_saved, over - 1))
        if self._seen is None or over < self._seen:
            # A job that went back comes by these passes again.
            self._seen = over
        if over > self._seen and not self._is_busy():
            self._seen = over
            told = {"BACKSTAY_JOB_PASS": str(over), "BACKSTAY_JOB_CHECKPOINT": status.checkpoint}
            self._thread = threading.Thread(target=self._run, args=(told,))
            self._thread.start()

    def end(self, status: job_pb2.JobStatus | None) -> None:
        """Wait for commands that run, and run those of the last pass if they did not yet."""
        self._wait()
        if status is not None and self._seen is not None:
            self.look(status)
            self._wait()

    def stop(self) -> None:
        """End the command that runs."""
        self._stopped.set()
        self._wait()

    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _run(self, told: Mapping[str, str]) -> None:
        try:
            run_hooks(
                self._hooks.each_pass,
                {**self._env, **told},
                timeout_s=self._hooks.timeout_s,
                stopped=self._stopped.is_set,
                output=self._output,
            )
        except JobError as error:
            self._say(f"pass {told['BACKSTAY_JOB_PASS']}: {error}; the job goes on")
