"""A real S3 server for tests, on a free loopback port: moto's, as a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from backstay.pserver.free_ports import free_ports
from tests.processes import takes_connections
from tests.waiting import wait_until

START_LIMIT_S = 120.0


@contextmanager
def s3_server(folder: Path) -> Iterator[dict[str, Any]]:
    """Run one, and yield the options with which s3fs reaches it."""
    port = free_ports(1)[0]
    log = folder / "s3.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=output,
            stderr=output,
        )
    try:
        wait_until(
            lambda: takes_connections(port) or process.poll() is not None,
            lambda: log.read_text(errors="replace")[-2000:],
            limit_s=START_LIMIT_S,
        )
        assert process.poll() is None, log.read_text(errors="replace")[-2000:]
        yield {
            "key": "tester",
            "secret": "of-no-worth",
            "endpoint_url": f"http://127.0.0.1:{port}",
            "client_kwargs": {"region_name": "eu-west-1"},
            # Clients are otherwise kept, and with them connections to servers that are gone.
            "skip_instance_cache": True,
        }
    finally:
        process.kill()
        process.wait()
