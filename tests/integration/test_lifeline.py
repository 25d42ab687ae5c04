"""The line between a process and its parent, with real processes."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from backstay import lifeline
from tests.waiting import wait_until

LIMIT_S = 120.0


def wait_for(word: str, log: Path) -> None:
    wait_until(lambda: word in log.read_text(), log.read_text, limit_s=LIMIT_S)


# As servers do: the first SIGTERM begins to stop, a second one ends the process at once.
STOPPING = """
import asyncio, signal
from backstay import lifeline

async def run(parent):
    loop, told = asyncio.get_running_loop(), asyncio.Event()

    def stop():
        loop.remove_signal_handler(signal.SIGTERM)
        print("stopping", flush=True)
        told.set()

    loop.add_signal_handler(signal.SIGTERM, stop)
    parent.stop_by(lambda: loop.call_soon_threadsafe(told.set), grace_s=60)
    print("up", flush=True)
    await told.wait()
    await asyncio.sleep(0.5)
    print("stopped in good order", flush=True)

asyncio.run(run(lifeline.attach(grace_s=60)))
"""


@pytest.mark.parametrize("told_before", [True, False])
def test_a_process_stops_in_good_order_when_its_parent_goes(
    tmp_path: Path, told_before: bool
) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        process, line = lifeline.start([sys.executable, "-c", STOPPING], log=file, env=os.environ)
    try:
        wait_for("up", log)
        if told_before:
            process.send_signal(signal.SIGTERM)
            wait_for("stopping", log)
        line.close()
        assert process.wait(LIMIT_S) == 0, log.read_text()
        assert "stopped in good order" in log.read_text()
    finally:
        line.close()
        process.kill()
        process.wait()
