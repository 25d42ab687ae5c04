"""A network of namespaces can be made again as soon as the one before it is closed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos import sandbox

ROOT = Path(__file__).resolve().parents[2]
# As the stages of a run do it: the processes of the hosts are killed, the network is closed, and
# the next network has hosts at the same places.
NETWORKS = """
import subprocess
from tests.chaos.network import Namespaces

for _ in range(3):
    network = Namespaces()
    hosts = [network.add_host(f"host-{number}") for number in range(6)]
    processes = [subprocess.Popen([*host.prefix, "cat"], stdin=subprocess.PIPE) for host in hosts]
    for process in processes:
        process.kill()
        process.wait()
    network.close()
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True)
    # Some kernels have links of their own in every namespace.
    print([name for line in links.stdout.splitlines() if (name := line.split()[0])[0] in "bv"])
"""


def test_nothing_is_left_of_a_closed_network() -> None:
    reason = sandbox.why_not()
    if reason:
        pytest.skip(f"no namespaces here: {reason}")
    done = subprocess.run(
        [*sandbox.command(), sys.executable, "-c", NETWORKS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["[]"] * 3), done.stderr
