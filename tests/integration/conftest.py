"""What the integration tests share: waiting for something with a limit, and single servers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from backstay.master.job_client import forget_job
from backstay.pserver.ctl.cli import main as pserverctl
from backstay.pserver.local_cluster import LocalCluster
from tests.integration.counting_jobs import CLIENT, JOB
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.kafka.broker import KafkaBroker

WAIT_LIMIT_S = 120.0

Command = Callable[..., "subprocess.CompletedProcess[str]"]
StartServer = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Wait until a condition holds; fail if it does not within the limit."""

    def wait(condition: Callable[[], bool]) -> None:
        wait_until(condition)

    return wait


@pytest.fixture
def plain_environment() -> dict[str, str]:
    """The environment without any setting of ours."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("BACKSTAY_", "PADDLE_", "TRAINING_"))
    }


@pytest.fixture
def command(plain_environment: dict[str, str]) -> Command:
    """Run one of our commands, ``command("pserver", "serve", ...)``, to its end.

    ``pserverctl`` runs in this process: a process of its own would import for half a second.
    """
    modules = {"pserver": "backstay.pserver.serve_cli", "backstay": "backstay.pserver.local_cli"}

    def run(program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        if program == "pserverctl":
            return _run_here(arguments, plain_environment | variables)
        return subprocess.run(
            [sys.executable, "-m", modules[program], *arguments],
            env=plain_environment | variables,
            capture_output=True,
            text=True,
            timeout=WAIT_LIMIT_S,
            check=False,
        )

    return run


def _run_here(
    arguments: Sequence[str], environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    gone = dict.fromkeys(os.environ.keys() - environment.keys())
    words = [str(word) for word in arguments]
    done = CliRunner().invoke(pserverctl, words, env={**environment, **gone})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(words, done.exit_code, done.stdout, done.stderr)


@pytest.fixture
def start_server(tmp_path: Path, plain_environment: dict[str, str]) -> Iterator[StartServer]:
    """Start ``pserver serve`` with some arguments; it is killed at the end of the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        with (tmp_path / f"server-{len(started)}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "backstay.pserver.serve_cli", "serve", *arguments],
                env=plain_environment | variables,
                stdout=log,
                stderr=log,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def endpoints(one_server: LocalCluster) -> Iterator[list[str]]:
    """Of a server that knows nothing of the job ``JOB``."""
    yield one_server.endpoints
    forget_job(one_server.endpoints, JOB, config=CLIENT)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """A broker of Kafka for the tests of one file."""
    # The client is an extra.
    from tests.kafka.broker import KafkaBroker

    with KafkaBroker(tmp_path_factory.mktemp("kafka")) as started:
        yield started
