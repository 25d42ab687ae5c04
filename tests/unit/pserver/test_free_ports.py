"""Ports for servers that come back: below the range that the system gives away, and free."""

from __future__ import annotations

import socket

import pytest

from backstay.pserver import free_ports as module
from backstay.pserver.free_ports import free_ports


def test_ports_differ_and_are_below_those_that_the_system_gives_away() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    assert all(20_000 <= port < 32_000 for port in ports)


def test_ports_that_are_taken_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = free_ports(1)
    monkeypatch.setattr(module, "FIRST", first)
    monkeypatch.setattr(module, "COUNT", 1)
    assert free_ports(1) == [first]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        with pytest.raises(OSError, match=f"fewer than 1 of the ports from {first} to {first} are"):
            free_ports(1)
