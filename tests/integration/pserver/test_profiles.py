"""A cluster with a profile, as a user starts it: what is kept, and what is shown."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np

from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import TableSpec
from backstay.trainer import Client

Command = Callable[..., "subprocess.CompletedProcess[str]"]
EMBEDDING = TableSpec.sparse("emb", dim=4)
KEYS = np.arange(64)


def test_a_short_profile_keeps_each_slot_once_and_goes_on_from_its_checkpoint(
    tmp_path: Path, command: Command
) -> None:
    settings = {"profile": "short", "slot_count": 16}
    with LocalCluster(2, directory=tmp_path, settings=settings) as cluster:
        shown = command("pserverctl", "--endpoint", cluster.endpoints[0], "config", "show")
        assert "replicas                  1" in shown.stdout
        asked = command(
            "pserverctl", "--endpoint", cluster.endpoints[0], "config", "show", "--json"
        )
        report = json.loads(asked.stdout)
        source_of = {one["name"]: one["source"] for one in report["fixed"] + report["settings"]}
        assert source_of["replicas"] == source_of["checkpoint_every_s"] == "profile short"
        assert source_of["slot_count"] == "fixed"
        assert source_of["checkpoint_keep_last"] == "default"
        with Client(cluster.endpoints) as client:
            table = client.create_table(EMBEDDING)
            client.push(table, KEYS, np.ones((64, 4), np.float32))
            rows = client.pull(table, KEYS)
            client.checkpoints.save()
    assert list((tmp_path / "checkpoints").iterdir())
    with (
        LocalCluster(2, directory=tmp_path, settings=settings) as cluster,
        Client(cluster.endpoints) as client,
    ):
        assert (client.pull(client.table("emb"), KEYS) == rows).all()
