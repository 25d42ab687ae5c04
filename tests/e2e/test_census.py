"""The demo, short: quality beside plain Paddle, its last line, and how it fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("paddle")

pytestmark = pytest.mark.paddle
ROOT = Path(__file__).resolve().parents[2]
PASSES = 3
# The sampling error of one AUC here is 0.003; this is the project's own promise.
AUC_TOLERANCE = 0.003


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_demo_is_as_good_as_plain_paddle() -> None:
    passes = f"--passes={PASSES}"
    alone = run("-m", "examples.census.train", "--local", passes)
    last = run("examples/census/demo.py", passes).splitlines()[-1]
    assert last.startswith("DEMO ")
    figures: dict[str, Any] = json.loads(last[len("DEMO ") :])
    assert figures["auc"] > float(alone.split()[2].rstrip(",")) - AUC_TOLERANCE
    assert figures["examples"] == PASSES * 29_304
    assert (figures["servers"], figures["trainers"]) == (3, 2)
    # Two sparse tables and a dense one, in batches of 256.
    assert figures["pushes_acknowledged"] >= 3 * figures["examples"] // 256
    for name in ("logloss", "seconds", "examples_per_s"):
        assert figures[name] > 0


def children_of(pid: int) -> dict[int, str]:
    """The command line of each child process."""
    commands = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            commands[int(child)] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
        except FileNotFoundError:  # it ended meanwhile
            continue
    return commands


@contextmanager
def running_demo() -> Iterator[tuple[subprocess.Popen[str], list[int], list[int]]]:
    """Yield a demo that would run for long, and the ids of its servers and trainers."""
    demo = subprocess.Popen(
        [sys.executable, "examples/census/demo.py", "--passes=100000"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with demo:
        try:
            deadline = time.monotonic() + 60
            trainers: list[int] = []
            while len(trainers) < 2:
                assert demo.poll() is None, "the demo ended early"
                assert time.monotonic() < deadline
                time.sleep(0.05)
                commands = children_of(demo.pid)
                trainers = [pid for pid, line in commands.items() if "census.train" in line]
            servers = [pid for pid, line in commands.items() if "pserver" in line]
            assert len(servers) == 3
            yield demo, servers, trainers
        finally:
            demo.kill()


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="finds processes in /proc, which is not here"
)


@needs_proc
@pytest.mark.parametrize(
    ("victim", "message"),
    [("server", "has died"), ("trainer", "killed by signal 9"), ("demo", "")],
)
def test_a_death_ends_the_demo_and_all_its_processes(victim: str, message: str) -> None:
    with running_demo() as (demo, servers, trainers):
        if victim == "demo":
            demo.send_signal(signal.SIGTERM)
        else:
            os.kill(servers[1] if victim == "server" else trainers[1], signal.SIGKILL)
        _, errors = demo.communicate(timeout=60)
        assert demo.returncode not in (0, None)
        assert message in errors
        for pid in servers + trainers:
            assert not Path(f"/proc/{pid}").exists()


def test_reader() -> None:
    from examples.census.reader import DEEP_FIELDS, NUMBERS, WIDE_FIELDS, load

    splits = load()
    assert [len(split) for split in splits] == [29_304, 3_257, 16_281]
    training, _, test = splits
    assert training.keys.shape[1] == len(WIDE_FIELDS) > len(DEEP_FIELDS)
    assert abs(training.numbers.mean(axis=0)).max() < 1e-4
    assert training.numbers.shape[1] == len(NUMBERS)
    assert training.labels.mean() == pytest.approx(0.241, abs=0.002)
    assert test.labels.mean() == pytest.approx(0.236, abs=0.001)
