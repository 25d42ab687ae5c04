"""The compose files without docker: their commands and variables, on a network of their own.

All machines or containers of a file are addresses of one network namespace. So what listens on
0.0.0.0 there listens on its own address here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.etcd import require_etcd

pytestmark = pytest.mark.slow

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
MODULES = {"pserver": "backstay.pserver.serve_cli", "pserverctl": "backstay.pserver.ctl.cli"}
ADDRESSES = [f"10.0.0.{number}" for number in range(1, 5)]
MACHINES = 3
START_LIMIT_S = 60
# What docker's network calls the containers of compose.yaml.
NAMES = {"ps-0": ADDRESSES[0], "ps-1": ADDRESSES[1], "ps-2": ADDRESSES[2], "etcd": ADDRESSES[3]}


class Service(NamedTuple):
    """A service of a compose file, on one machine."""

    name: str
    address: str
    command: list[str]
    environment: dict[str, str]
    grace_s: int


def filled_in(text: str, variables: Mapping[str, str]) -> str:
    """Return a compose file with the operator's variables in it."""
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"\$\{(\w+):\?[^}]*\}", lambda found: variables[found[1]], text)


def on(address: str, environment: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Return the variables of a service on a machine with this address."""
    found = {}
    for name, value in environment.items():
        host = r"^(ps-\d)$" if name == "BACKSTAY_ADVERTISE_HOST" else r"\b(ps-\d|etcd)(?=:\d)"
        text = re.sub(host, lambda one: NAMES[one[1]], str(value))
        text = text.replace("0.0.0.0", address).replace("127.0.0.1", address)
        found[name] = text.replace("/var/lib/etcd", str(folder))
    return found


def services_of(name: str, folder: Path) -> list[Service]:
    """Return all services of a cluster that a compose file makes."""
    variables = {f"ADDRESS_{number}": ADDRESSES[number] for number in range(MACHINES)}
    variables["BACKSTAY_TOKEN"] = "of-the-operator"
    text = (DEPLOY / name).read_text(encoding="utf-8")
    machines = range(1) if name == "compose.yaml" else range(MACHINES)
    services = []
    for number in machines:
        own = {"NUMBER": str(number), "ADDRESS": ADDRESSES[number]}
        document = yaml.safe_load(filled_in(text, variables | own))
        for service, given in document["services"].items():
            address = NAMES[service] if name == "compose.yaml" else ADDRESSES[number]
            environment = on(address, given["environment"], folder / f"etcd-{number}")
            grace_s = int(given.get("stop_grace_period", "10s").removesuffix("s"))
            full = f"{service}-{number}"
            services.append(Service(full, address, given["command"], environment, grace_s))
    return services


def program(command: list[str]) -> list[str]:
    """Return a command of the image, run from this checkout."""
    first, *words = command
    return [sys.executable, "-m", MODULES[first], *words] if first in MODULES else command


@pytest.fixture
def prefix() -> Iterator[list[str]]:
    """What runs a command on a network of its own, which has the addresses."""
    require_etcd()
    if os.geteuid() or not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("a network namespace needs root, unshare, nsenter and ip")
    # It does nothing but keep the namespace, until its input closes.
    with subprocess.Popen(
        ["unshare", "--net", "--", "sh", "-c", "echo up; exec cat >/dev/null"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as keeper:
        assert keeper.stdout is not None
        if keeper.stdout.readline() != b"up\n":
            pytest.skip("this machine makes no network namespaces")
        inside = ["nsenter", f"--net=/proc/{keeper.pid}/ns/net", "--"]
        for words in ("link set lo up", *(f"address add {one}/32 dev lo" for one in ADDRESSES)):
            subprocess.run([*inside, "ip", *words.split()], check=True)
        yield inside


@pytest.mark.parametrize("name", ["compose.yaml", "compose.machine.yaml"])
def test_the_services_form_a_cluster_and_stop_in_good_order(
    name: str, prefix: list[str], plain_environment: dict[str, str], tmp_path: Path
) -> None:
    services = services_of(name, tmp_path)
    started: dict[str, subprocess.Popen[bytes]] = {}

    def environment_of(service: Service) -> dict[str, str]:
        return plain_environment | service.environment

    # etcd comes first, as depends_on says where there is one.
    for service in sorted(services, key=lambda one: not one.name.startswith("etcd")):
        with (tmp_path / f"{service.name}.log").open("wb") as log:
            started[service.name] = subprocess.Popen(
                [*prefix, *program(service.command)],
                env=environment_of(service),
                stdout=log,
                stderr=log,
            )
    pservers = [one for one in services if "BACKSTAY_NODE_ID" in one.environment]
    try:
        ask = [*prefix, *program(["pserverctl", "status", "--wait", str(START_LIMIT_S), "--json"])]
        done = subprocess.run(
            ask, env=environment_of(pservers[-1]), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        report = json.loads(done.stdout)
        assert len(report["nodes"]) == len(pservers) == MACHINES
        assert report["replicas"] == 2
        for service in pservers:
            process = started[service.name]
            process.send_signal(signal.SIGTERM)
            log_file = tmp_path / f"{service.name}.log"
            # With another code docker would start it again.
            assert process.wait(service.grace_s) == 0, log_file.read_text()
    finally:
        for process in started.values():
            process.kill()
            process.wait()
