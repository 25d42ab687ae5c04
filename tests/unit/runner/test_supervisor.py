"""What ``backstay train`` says of a job that it looks on at."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from backstay._proto.v1 import job_pb2
from backstay.cli.progress import Display
from backstay.exit_codes import ExitCode
from backstay.job_spec import DataSpec, JobSpec
from backstay.runner.last_status import NewestCheckpoint
from backstay.runner.metrics_log import MetricsLog
from backstay.runner.stop_signals import StopSignals
from backstay.runner.supervisor import Supervisor

# A process that gets Ctrl-C twice.
TWICE = """
import os, signal, sys
from backstay.runner.stop_signals import StopSignals
with StopSignals(last_words=lambda: "goes on from 7"):
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    sys.exit(1)
"""


def spec_of(tmp_path: Path, **data: Any) -> JobSpec:
    data = data or {"training": DataSpec(paths=("a.csv",))}
    return JobSpec(name="tiny", model="m.py", log_dir=str(tmp_path), **data)


class Ended:
    """A job master whose job is over at the first look."""

    exit_code = None

    def status(self) -> job_pb2.JobStatus:
        return job_pb2.JobStatus(
            job="tiny", state="done", master_instance=1, table_notes=["table 't' goes on"]
        )


def test_the_notes_of_a_job_that_is_over_at_the_first_look_are_said(
    tmp_path: Path, capsys: Any
) -> None:
    job: Any = Ended()
    servers: Any = None
    supervisor = Supervisor(spec_of(tmp_path), Display("tiny", console=Console()))
    with MetricsLog(tmp_path, tensorboard=False) as metrics:
        end = supervisor._watch(job, servers, job, metrics, StopSignals())
    assert end == ("done", "")
    assert "table 't' goes on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("own", "fresh", "data", "newest", "words"),
    [
        (True, False, "training", "ckpt-7", "the job goes on from checkpoint ckpt-7"),
        (True, True, "training", "", "no checkpoint was written yet: the job begins anew"),
        (True, False, "validation", "ckpt-7", "the same command begins anew"),
        (False, False, "training", "", "the same command goes on with the job"),
        (False, True, "training", "", "the same command without --fresh goes on with the job"),
    ],
)
def test_the_last_words_say_where_the_job_goes_on(
    tmp_path: Path, own: bool, fresh: bool, data: str, newest: str, words: str
) -> None:
    spec = spec_of(tmp_path, **{data: DataSpec(paths=("a.csv",))})
    supervisor = Supervisor(spec, Display("tiny", console=Console()), fresh=fresh)
    supervisor._has_own_servers = own
    supervisor._newest = NewestCheckpoint(newest, "folder") if newest else None
    assert words in supervisor._last_words()


def test_a_second_ctrl_c_ends_the_process_whatever_reads_its_stderr() -> None:
    command = [sys.executable, "-c", TWICE]
    read = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert (read.returncode, read.stderr.strip()) == (ExitCode.STOPPED, "goes on from 7")
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as stderr:
        os.close(reader)
        assert subprocess.run(command, stderr=stderr).returncode == ExitCode.STOPPED
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "wb") as stderr:
        os.set_blocking(writer, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writer, bytes(4096))
        os.set_blocking(writer, True)
        assert subprocess.run(command, stderr=stderr, timeout=60).returncode == ExitCode.STOPPED
