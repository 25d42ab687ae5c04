"""Profiles decide copies and checkpoints, and only what is not set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backstay.config import ServerConfig
from backstay.consensus.records.settings import ClusterSettings, SettingsRecord
from backstay.errors import ConfigError
from backstay.job_spec import JobSpec
from backstay.master.job_file import load_job
from backstay.pserver.local_cluster import LocalCluster
from backstay.pserver.membership.cluster_config import join_or_create
from backstay.pserver.requests.settings import SettingsKeeper
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.memory_nodes import KEYS, run

URL = "/srv/points"


def server(**explicit: object) -> ServerConfig:
    return ServerConfig.load(environment={}, explicit=explicit)


@pytest.mark.parametrize(
    ("profile", "nodes", "replicas", "every_s", "restore"),
    [
        (None, 3, 2, 0, "no"),
        ("test", 3, 1, 0, "no"),
        ("short", 3, 1, 600, "latest"),
        ("long", 1, 2, 600, "latest"),
        ("long", 3, 2, 600, "latest"),
        ("long", 4, 3, 600, "latest"),
    ],
)
def test_what_each_profile_decides_for_a_new_cluster(
    profile: str | None, nodes: int, replicas: int, every_s: int, restore: str
) -> None:
    config = server(profile=profile, initial_nodes=nodes, checkpoint_url=URL)
    assert config.replicas_wanted == replicas
    assert config.checkpoint_every_s_wanted == every_s
    assert config.restore_wanted == restore
    assert config.restores_lost_slots == (profile in ("short", "long"))


def test_whatever_is_set_wins_over_the_profile(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('[server]\nprofile = "long"\ncheckpoint_every_s = 60\n')
    loaded = ServerConfig.load_with_sources(
        file=file,
        environment={"BACKSTAY_REPLICAS": "3", "BACKSTAY_PROFILE": "test"},
        explicit={"checkpoint_url": URL, "initial_nodes": 2},
    )
    assert loaded.config.replicas_wanted == 3
    assert loaded.config.checkpoint_every_s_wanted == 60
    shown = loaded.describe().splitlines()
    assert f"profile = long  [file {file}]" in shown
    assert "replicas = 3  [environment BACKSTAY_REPLICAS]" in shown
    assert f"checkpoint_every_s = 60  [file {file}]" in shown
    assert "restore = latest  [profile long]" in shown
    assert (
        "restore = no  [argument]"
        in ServerConfig.load_with_sources(
            file=file, environment={}, explicit={"checkpoint_url": URL, "restore": "no"}
        ).describe()
    )


@pytest.mark.parametrize(
    ("explicit", "says"),
    [
        ({"profile": "lang"}, "profile: 'lang' is not one of test, short, long; did you mean"),
        ({"profile": "short"}, r"profile: 'short' writes checkpoints.* set checkpoint_url"),
        ({"profile": "long"}, r"profile: 'long' writes checkpoints.* set checkpoint_url"),
        ({"checkpoint_every_s": 5}, "checkpoint_every_s: 5 needs checkpoint_url"),
    ],
)
def test_a_profile_that_cannot_be_says_what_to_set(explicit: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        server(**explicit)


def test_a_profile_without_its_checkpoints_needs_no_folder() -> None:
    config = server(profile="short", checkpoint_every_s=0)
    assert (config.restore_wanted, config.restores_lost_slots) == ("no", False)


def test_a_cluster_keeps_where_its_values_came_from() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store = MemoryStore(backend)
        wanted = server(profile="short", checkpoint_url=URL, cluster=KEYS.cluster)
        assert (await join_or_create(store, KEYS, wanted)).replicas == 1
        # Another node of the cluster need not name the profile, and may name it, too.
        for same in (server(cluster=KEYS.cluster), wanted):
            await join_or_create(store, KEYS, same)
        keeper = SettingsKeeper(store, KEYS)
        found = await keeper.read()
        names = ("replicas", "checkpoint_url", "checkpoint_every_s", "on_slot_loss")
        assert [found.record.source_of(name) for name in names] == [
            "profile short",
            "set",
            "profile short",
            "profile short",
        ]
        assert found.settings.on_slot_loss == "restore"
        assert found.record.source_of("moves_at_once") == "default"
        changed = await keeper.change({"checkpoint_every_s": "60"}, found.revision)
        assert changed.record.source_of("checkpoint_every_s") == "set"
        assert changed.record.source_of("replicas") == "profile short"
        assert SettingsRecord.from_json(changed.record.to_json()) == changed.record

    run(scenario)


def test_a_record_without_a_profile_is_as_it_was() -> None:
    """So that nodes of the version before can read it."""
    assert "sources" not in ClusterSettings(checkpoint_url=URL).to_json()


def job(**fields: Any) -> JobSpec:
    return JobSpec.from_mapping({"name": "a", "model": "m.py", "training": "a.csv", **fields})


@pytest.mark.parametrize(
    ("fields", "replicas", "every"),
    [
        ({}, 2, "pass"),
        ({"profile": "test"}, 1, "none"),
        ({"profile": "short"}, 1, "pass"),
        ({"profile": "long"}, 2, "pass"),
        ({"profile": "long", "servers": {"local": 4}}, 3, "pass"),
        ({"profile": "test", "checkpoint": "pass"}, 1, "pass"),
        ({"profile": "test", "checkpoint": {"every_tasks": 5}}, 1, "none"),
        ({"profile": "long", "servers": {"replicas": 1}}, 1, "pass"),
    ],
)
def test_what_each_profile_decides_for_a_job(
    fields: dict[str, Any], replicas: int, every: str
) -> None:
    spec = job(**fields)
    assert (spec.servers.replicas, spec.checkpoint.every) == (replicas, every)
    assert JobSpec.from_json(spec.to_json()) == spec


def test_a_flag_wins_over_the_profile_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: a\nmodel: m.py\ntraining: a.csv\nprofile: test\n")
    spec = load_job(file, {"servers.replicas": 3}, folder=tmp_path)
    assert (spec.servers.replicas, spec.checkpoint.every) == (3, "none")
    spec = load_job(file, {"profile": "short"}, folder=tmp_path)
    assert (spec.servers.replicas, spec.checkpoint.every) == (1, "pass")
    file.write_text("name: a\nmodel: m.py\ntraining: a.csv\nprofile: lang\n")
    with pytest.raises(ConfigError, match=r"line 4: profile: 'lang' is not one of .* mean 'long'"):
        load_job(file, {}, folder=tmp_path)


def test_a_local_cluster_needs_a_folder_and_servers_for_its_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"profile: 'short' writes .* \(--log-dir\)"):
        LocalCluster(2, settings={"profile": "short"})
    with pytest.raises(ConfigError, match="start at least 2 servers"):
        LocalCluster(1, directory=tmp_path, settings={"profile": "long"})
    LocalCluster(1, settings={"profile": "test"})
    monkeypatch.setenv("BACKSTAY_PROFILE", "short")
    with pytest.raises(ConfigError, match="profile: 'short' writes"):
        LocalCluster(2)
    monkeypatch.setenv("BACKSTAY_CHECKPOINT_URL", URL)
    LocalCluster(2)
