"""A real S3 server for tests, on a free loopback port: moto's, as a process of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from backstay.pserver.free_ports import free_ports

START_LIMIT_S = 30.0
POLL_PAUSE_S = 0.05


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
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                text = log.read_text(errors="replace")[-2000:]
                assert process.poll() is None, f"moto ends: {text}"
                assert time.monotonic() < deadline, f"moto does not start: {text}"
                time.sleep(POLL_PAUSE_S)
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
