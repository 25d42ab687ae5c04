"""A running export behind a URL: on a real S3 server on loopback."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import s3fs

from backstay.checkpoint.manifest import kind_of
from backstay.checkpoint.storage import ExportFolder
from backstay.pserver.local_cluster import LocalCluster
from backstay.serving import Follower
from backstay.tables import Adagrad, TableSpec
from backstay.trainer import Client
from tests.integration.exporting import same_rows, settled, start_export, stop_export
from tests.s3 import s3_server

KEYS = np.arange(3000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
URL = "s3://bucket/served"
SLOTS = 64


@pytest.mark.slow
def test_a_follower_has_the_rows_that_servers_export_to_s3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server(tmp_path) as options:
        s3fs.S3FileSystem(**options).mkdir("bucket")
        # Where the nodes' own packages look for them.
        monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint_url"])
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
        settings = {"slot_count": SLOTS, "checkpoint_url": str(tmp_path / "ckpt")}
        with (
            LocalCluster(2, settings=settings) as cluster,
            Client(cluster.endpoints) as client,
        ):
            table = client.create_table(TableSpec.sparse("t", dim=4, optimizer=Adagrad(0.1)))
            client.push(table, KEYS, np.outer(KEYS % 7, [1, 2, 3, 4]))
            start_export(cluster, URL)
            with Follower(URL, options=options, poll_s=0.1, wait_s=60.0) as follower:
                settled(follower)
                assert same_rows(client, follower, tmp_path) == SLOTS
                client.push(table, KEYS[:10], np.ones((10, 4)))
                assert client.delete(table, KEYS[5:20]) == 15
                settled(follower)
                assert same_rows(client, follower, tmp_path) == SLOTS
                assert len(follower.table("t")) == len(KEYS) - 15
                assert follower.status.trouble == ""
            stop_export(cluster)
        there = ExportFolder(URL, options)
        finished = [name for name in there.names() if there.is_finished(name)]
        assert {kind_of(name) for name in finished} == {"full", "delta"}
        # Nobody needs the servers to begin with what they left.
        with Follower(URL, options=options) as late:
            assert len(late.table("t")) == len(KEYS) - 15
