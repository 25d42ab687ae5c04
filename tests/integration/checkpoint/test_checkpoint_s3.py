"""A cluster whose checkpoints are behind a URL: on a real S3 server on loopback."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import s3fs

from backstay.checkpoint.storage import CheckpointStorage
from backstay.checkpoint.verification import verify
from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import Adagrad, TableSpec
from backstay.trainer import Client
from tests.s3 import s3_server

KEYS = np.arange(3000, dtype=np.uint64)
URL = "s3://bucket/ads"


@pytest.mark.slow
def test_a_cluster_saves_to_s3_and_another_one_begins_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server(tmp_path) as options:
        s3fs.S3FileSystem(**options).mkdir("bucket")
        # Where the nodes' own packages look for them.
        monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint_url"])
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
        settings = {"slot_count": 64, "checkpoint_url": URL}
        with (
            LocalCluster(2, settings=settings) as cluster,
            Client(cluster.endpoints) as client,
        ):
            spec = TableSpec.sparse("t", dim=4, optimizer=Adagrad(0.1))
            table = client.create_table(spec)
            client.push(table, KEYS, np.outer(KEYS % 7, [1, 2, 3, 4]))
            full = client.checkpoints.save()
            client.push(table, KEYS[:10], np.ones((10, 4)))
            more = client.checkpoints.save()
            assert (full.kind, more.kind, more.rows) == ("full", "incremental", 10)
            before = client.pull(table, KEYS)
        assert verify(CheckpointStorage(URL), more.id).ok
        with (
            LocalCluster(3, settings={**settings, "restore": "latest"}) as cluster,
            Client(cluster.endpoints) as client,
        ):
            assert np.array_equal(client.pull("t", KEYS), before)
