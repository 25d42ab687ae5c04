"""Checks of a job in a process of their own: a model file brings its framework, and runs code.

The command that asks stays small and imports no framework. Errors come back as what they are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from backstay import errors, lifeline
from backstay.errors import BackstayError, JobError
from backstay.job_check.check import Checked, check_job
from backstay.job_check.dry_run import DryRun, dry_run
from backstay.job_spec import JobSpec

__all__ = ["check_job_apart", "dry_run_apart"]

# A model file may fetch something when it is loaded; for ever is a fault.
LIMIT_S = 600.0
LOOK_PAUSE_S = 0.05
GRACE_S = 1.0
STDERR = 2
SPEC_FILE = "spec.json"
ANSWER_FILE = "answer.json"
OUTPUT_FILE = "output"
LAST_WORDS_BYTES_MAX = 4096


def check_job_apart(spec: JobSpec, stopped: Callable[[], bool]) -> Checked:
    """Check a job's model file and data in another process.

    What the model file prints is kept back, for the error of a process that dies.

    Args:
        spec: The job.
        stopped: Whether the user wants the job to stop: the check is broken off then.

    Raises:
        ConfigError: The model file, an option or the data is wrong.
        DataError: The data cannot be read.
        JobError: The process died, took too long, or was stopped.
    """
    return Checked.from_mapping(_ask("check", spec, stopped, shown=False))


def dry_run_apart(spec: JobSpec, *, local: bool = False) -> DryRun:
    """Find out in another process what a job would do; see ``dry_run`` and ``check_job_apart``.

    What the model file prints goes to standard error.
    """
    kind = "dry-run-local" if local else "dry-run"
    return DryRun.from_mapping(_ask(kind, spec, lambda: False, shown=True))


def _ask(kind: str, spec: JobSpec, stopped: Callable[[], bool], *, shown: bool) -> Any:
    with TemporaryDirectory(prefix="backstay-check-") as name:
        folder = Path(name)
        (folder / SPEC_FILE).write_text(spec.to_json(), encoding="utf-8")
        with (folder / OUTPUT_FILE).open("ab") as output:
            process, line = lifeline.start(
                [sys.executable, "-m", "backstay.job_check.process", kind, name],
                # The same as in a worker.
                env={**os.environ, **spec.workers.env},
                log=STDERR if shown else output,
            )
        try:
            code = _wait(process, stopped)
        finally:
            process.kill()
            process.wait()
            line.close()
        answer_file = folder / ANSWER_FILE
        if not answer_file.exists():
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            wrote = lifeline.last_words(folder / OUTPUT_FILE, LAST_WORDS_BYTES_MAX)
            raise JobError(
                f"the process that loads {spec.model} to check it ended by {how} before it had an "
                f"answer; it wrote:\n{wrote or 'nothing, or what stands above'}"
            )
        return _answer(json.loads(answer_file.read_text(encoding="utf-8")))


def _wait(process: subprocess.Popen[bytes], stopped: Callable[[], bool]) -> int:
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        try:
            return process.wait(LOOK_PAUSE_S)
        except subprocess.TimeoutExpired:
            if stopped():
                raise JobError("stopped while the model file was checked") from None
            if time.monotonic() > deadline_s:
                raise JobError(f"checking the model file took longer than {LIMIT_S:g} s") from None


def _answer(document: Mapping[str, Any]) -> Any:
    """Return the result, or raise the error that the other process met."""
    if "error" not in document:
        return document["result"]
    kind = getattr(errors, document["error"], JobError)
    raise kind(document["text"])


def main(kind: str, folder: Path) -> None:
    """Do it, in the process that was started for it."""
    lifeline.attach(grace_s=GRACE_S)
    spec = JobSpec.from_json((folder / SPEC_FILE).read_text(encoding="utf-8"))
    answer: dict[str, Any]
    try:
        local = kind == "dry-run-local"
        found = check_job(spec) if kind == "check" else dry_run(spec, local=local)
        answer = {"result": found.to_mapping()}
    except BackstayError as error:
        answer = {"error": type(error).__name__, "text": str(error)}
    part = folder / f"{ANSWER_FILE}.part"
    part.write_text(json.dumps(answer), encoding="utf-8")
    part.rename(folder / ANSWER_FILE)
    sys.stdout.flush()
    # Whatever threads the user's file has started: this process has done its work.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
