"""The unit of a pserver without systemd: its commands and variables, on a real etcd."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backstay.pserver.free_ports import free_ports
from tests.etcd import EtcdCluster

pytestmark = pytest.mark.slow

SYSTEMD = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
MODULES = {"pserver": "backstay.pserver.serve_cli", "pserverctl": "backstay.pserver.ctl.cli"}
STOP_LIMIT_S = 90.0
NODES = 3


def command_of(key: str, instance: str) -> list[str]:
    """A command of the unit, run from this checkout."""
    text = (SYSTEMD / "pserver@.service").read_text(encoding="utf-8")
    found = re.search(rf"^{key}=-?/opt/backstay/bin/(\w+) (.*)$", text, re.MULTILINE)
    assert found is not None
    return [sys.executable, "-m", MODULES[found[1]], *shlex.split(found[2].replace("%i", instance))]


@pytest.fixture
def variables(plain_environment: dict[str, str], tmp_path: Path) -> Iterator[list[dict[str, str]]]:
    """Of each node: the environment file, with addresses of this machine in place of 10.0.0.x."""
    text = (SYSTEMD / "pserver.env").read_text(encoding="utf-8")
    given = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    with EtcdCluster(tmp_path) as etcd:
        nodes = []
        for control, data in zip(*[iter(free_ports(2 * NODES))] * 2, strict=True):
            own = {
                "BACKSTAY_STORE_ENDPOINTS": ",".join(etcd.endpoints),
                "BACKSTAY_LISTEN_CONTROL": f"127.0.0.1:{control}",
                "BACKSTAY_LISTEN_DATA": f"127.0.0.1:{data}",
                "BACKSTAY_METRICS": "127.0.0.1:0",
                "BACKSTAY_ADVERTISE_HOST": "127.0.0.1",
                "BACKSTAY_ENDPOINT": f"127.0.0.1:{control}",
            }
            assert own.keys() <= given.keys()
            nodes.append(plain_environment | given | own)
        yield nodes


def test_nodes_of_the_unit_form_a_cluster_and_stop_one_after_the_other(
    variables: list[dict[str, str]], tmp_path: Path
) -> None:
    started = []
    try:
        for number, environment in enumerate(variables):
            with (tmp_path / f"ps-{number}.log").open("wb") as log:
                command = command_of("ExecStart", f"ps-{number}")
                started.append(subprocess.Popen(command, env=environment, stderr=log))
        ready = [sys.executable, "-m", MODULES["pserverctl"], "status", "--wait", "60"]
        done = subprocess.run(
            ready, env=variables[0], capture_output=True, text=True, timeout=STOP_LIMIT_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        for number, (process, environment) in enumerate(zip(started, variables, strict=True)):
            # As systemd stops one: the command of ExecStop, then SIGTERM. The last one waits in
            # vain for the others' copies, and would take a minute.
            if number < NODES - 1:
                stop = [*command_of("ExecStop", f"ps-{number}"), "--json"]
                done = subprocess.run(
                    stop, env=environment, capture_output=True, text=True, timeout=STOP_LIMIT_S
                )
                assert done.returncode == 0, done.stdout + done.stderr
                assert json.loads(done.stdout)["slots_short_of_copies"] == 0
                assert len(json.loads(done.stdout)["nodes"]) == NODES - number
            process.send_signal(signal.SIGTERM)
            assert process.wait(STOP_LIMIT_S) == 0, (tmp_path / f"ps-{number}.log").read_text()
    finally:
        for process in started:
            process.kill()
            process.wait()
