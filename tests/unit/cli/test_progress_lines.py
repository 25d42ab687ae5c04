"""The lines of a job that runs, where there is no terminal."""

from __future__ import annotations

from io import StringIO
from typing import cast

from rich.console import Console

from backstay._proto.v1 import job_pb2
from backstay.cli.progress import Display
from backstay.exit_codes import ExitCode
from backstay.job_engine.launch import ExitReason, WorkerExit
from backstay.logs import TEXT_FORMAT, message_of
from backstay.runner.show import Servers
from backstay.runner.supervisor import _ExitPrinter


def line_of(status: job_pb2.JobStatus) -> str:
    console = Console(file=StringIO(), width=200)
    with Display("clicks", console=console) as shown:
        shown.update(status, Servers(3, 3))
    return cast(StringIO, console.file).getvalue()


def test_a_job_without_a_round_is_in_no_pass() -> None:
    status = job_pb2.JobStatus(
        job="clicks", state="running", kind=job_pb2.TASK_KIND_TRAINING, passes=2, examples=16_000
    )
    assert line_of(status).startswith("no task now, examples 16,000 ")
    status.round = 2
    status.tasks.CopyFrom(job_pb2.TaskCounts(total=4, done=1))
    assert line_of(status).startswith("pass 2 of 2: tasks 1/4, examples 16,000 ")


def test_what_a_worker_ended_with_is_said_without_the_marks_of_its_log() -> None:
    words = "torch.optim.Adadelta does not run on the servers: SGD does"
    values = {"asctime": "2026-11-23 12:00:56,206", "levelname": "ERROR", "name": "__main__"}
    line = TEXT_FORMAT % {**values, "message": words}
    assert message_of(line) == words
    # What a program of its own printed is as it is.
    assert message_of(words) == words
    said: list[str] = []
    log = f"Traceback\n{line}"
    _ExitPrinter(said.append)(WorkerExit("w-0", ExitReason.FAILED, ExitCode.WRONG_SETTING, log))
    assert said == [f"worker w-0 ended with exit code {ExitCode.WRONG_SETTING}: {words}"]
