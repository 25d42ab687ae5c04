"""A cluster removes the records of the one that it replaces, on a real etcd, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from backstay.config import ServerConfig
from backstay.consensus.store.opening import open_etcd
from backstay.errors import ConfigError
from backstay.pserver import replaced_cluster
from backstay.pserver.local_cluster import LocalCluster
from tests.etcd import EtcdCluster
from tests.integration.counting_jobs import Eventually


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path) as found:
        yield found


def records_of(etcd: EtcdCluster, cluster: str) -> int:
    async def count() -> int:
        store = open_etcd(config_of(etcd, "any"), cluster)
        try:
            return len((await store.range("")).items)
        finally:
            await store.close()

    return asyncio.run(count())


def config_of(etcd: EtcdCluster, cluster: str, replaces: str | None = None) -> ServerConfig:
    return ServerConfig(
        store="etcd",
        store_endpoints=tuple(etcd.endpoints),
        cluster=cluster,
        replaces_cluster=replaces,
    )


def settings(etcd: EtcdCluster, cluster: str, **more: str) -> dict[str, object]:
    return {"store": "etcd", "store_endpoints": list(etcd.endpoints), "cluster": cluster, **more}


def test_new_servers_remove_what_earlier_ones_have_left(
    etcd: EtcdCluster, eventually: Eventually
) -> None:
    for name in ("job-1", "job-10"):
        with LocalCluster(servers=1, settings=settings(etcd, name)):
            pass
        assert records_of(etcd, name) > 0
    others = records_of(etcd, "job-10")
    with LocalCluster(servers=1, settings=settings(etcd, "job-2", replaces_cluster="job-1")):
        eventually(lambda: records_of(etcd, "job-1") == 0)
        assert records_of(etcd, "job-2") > 0
    assert records_of(etcd, "job-10") == others


def test_a_cluster_with_a_node_keeps_its_records(
    etcd: EtcdCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replaced_cluster, "LIMIT_S", 0.2)
    monkeypatch.setattr(replaced_cluster, "LOOK_PAUSE_S", 0.05)
    with LocalCluster(servers=1, settings=settings(etcd, "job-1")):
        asyncio.run(replaced_cluster.remove_replaced(config_of(etcd, "job-2", "job-1")))
        assert records_of(etcd, "job-1") > 0
    assert "the records of cluster 'job-1' stay: 1 of its nodes are registered" in caplog.text


def test_a_cluster_does_not_replace_itself() -> None:
    with pytest.raises(ConfigError, match="replaces_cluster: 'a' is this cluster itself"):
        ServerConfig(cluster="a", replaces_cluster="a")
    with pytest.raises(ConfigError, match="replaces_cluster: needs store = etcd"):
        ServerConfig(cluster="a", replaces_cluster="b")
