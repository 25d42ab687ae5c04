"""Commands and clients whose servers were never there: they end, and say which addresses.

Nothing listens at two of the addresses; one takes connections and says nothing.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backstay.cluster.directory import reach
from backstay.config import ClientConfig
from backstay.errors import NeverReached
from backstay.exit_codes import ExitCode
from backstay.job_spec import DataSpec, JobSpec
from backstay.trainer import Client

LIMIT_S = 120.0
HOUR_MS = 3_600_000
NOBODY = "127.0.0.1:1,127.0.0.1:2"
MODEL = """\
import torch

def custom_model(): return torch.nn.Linear(1, 1)
def loss(labels, predictions): return ((labels - predictions) ** 2).mean()
def optimizer(parameters): return torch.optim.SGD(parameters, lr=0.1)
def feed(records, mode, metadata): return torch.zeros(len(records), 1), torch.zeros(len(records), 1)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("torch")
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "data.csv").write_text("x\n1\n2\n")
    data = "".join(f"{use}: data.csv\n" for use in ("training", "validation", "prediction"))
    (tmp_path / "job.yaml").write_text(f"name: tiny\nmodel: model.py\noutput: out\n{data}")
    return tmp_path


@pytest.fixture
def silent() -> Iterator[str]:
    """Yield an address that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", *words]


@pytest.mark.parametrize("kind", ["train", "evaluate", "predict"])
def test_a_job_with_wrong_addresses_ends_with_a_code_of_its_own(kind: str, folder: Path) -> None:
    words = ("backstay.cli", kind, "job.yaml", "--endpoint", NOBODY)
    done = subprocess.run(
        command(*words, "--first-contact-timeout-ms", "300"),
        cwd=folder, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == ExitCode.NEVER_REACHED, done.stderr
    for part in ("127.0.0.1:1", "127.0.0.1:2", "connection refused", "first_contact_timeout_ms"):
        assert part in done.stderr
    # Nothing was begun.
    assert not list(folder.rglob("job.json"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_for_a_first_answer(
    number: signal.Signals, folder: Path, silent: str
) -> None:
    words = ("backstay.cli", "train", "job.yaml", "--endpoint", silent)
    with subprocess.Popen(
        command(*words, "--first-contact-timeout-ms", str(HOUR_MS)),
        cwd=folder, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "500"},
    ) as process:  # fmt: skip
        try:
            assert process.stderr is not None
            # Its first try has found no server.
            while "trying for" not in (line := process.stderr.readline()):
                assert line, "it has ended"
            process.send_signal(number)
            assert process.wait(LIMIT_S) == ExitCode.STOPPED
        finally:
            process.kill()


def test_the_processes_of_a_job_give_up_unless_told_to_wait(tmp_path: Path) -> None:
    spec = JobSpec(name="tiny", model="m.py", training=DataSpec(paths=("x.csv",)))
    (tmp_path / "job.json").write_text(spec.to_json())
    for words in (
        ("backstay.cli", "master", str(tmp_path / "job.json")),
        ("backstay.trainer.worker.cli", "--job", "tiny", "--worker-id", "w-0"),
    ):
        done = subprocess.run(
            command(*words, "--endpoint", NOBODY, "--first-contact-timeout-ms", "300"),
            capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        assert done.returncode == 1
        assert "127.0.0.1:2 (connection refused)" in done.stderr


def test_a_client_gives_up_before_its_deadline() -> None:
    config = ClientConfig(first_contact_timeout_ms=200, deadline_ms=HOUR_MS)
    with pytest.raises(NeverReached, match=r"127\.0\.0\.1:1 \(connection refused\)"):
        Client(NOBODY, config=config)
    with pytest.raises(NeverReached, match=r"127\.0\.0\.1:2 \(connection refused\)"):
        reach(NOBODY, config)


def test_zero_means_that_servers_are_known_to_be_there() -> None:
    reach(NOBODY, ClientConfig(first_contact_timeout_ms=0))
    # A client still has its deadline.
    with pytest.raises(NeverReached):
        Client(NOBODY, config=ClientConfig(first_contact_timeout_ms=0, deadline_ms=200))
