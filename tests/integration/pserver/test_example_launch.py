"""A dead server is named, and a stop leaves no process behind."""

from __future__ import annotations

import signal

import pytest

from backstay.pserver.local_cluster import LocalCluster
from examples.common.launch import ProcessFailed, check_servers, stops_held_back


def test_a_dead_server_is_named_unless_it_may_be_down() -> None:
    with LocalCluster(servers=2) as cluster:
        check_servers(cluster)
        cluster.kill(1)
        with pytest.raises(ProcessFailed, match=r"server ps-1 .*has died \(exit status -9\)"):
            check_servers(cluster)
        with pytest.raises(ProcessFailed, match="server ps-1 "):
            check_servers(cluster, but={"ps-0"})
        check_servers(cluster, but={"ps-1"})


def test_a_stop_waits_until_a_started_process_is_known() -> None:
    class Stopped(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stopped

    known = []

    def start() -> None:
        with stops_held_back():
            signal.raise_signal(signal.SIGTERM)
            known.append("process")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(Stopped):
            start()
        assert known == ["process"]
        assert signal.getsignal(signal.SIGTERM) is stop
    finally:
        signal.signal(signal.SIGTERM, before)
