"""The cluster's settings: what is allowed, their record, and changing it without overwriting."""

from __future__ import annotations

import json

import pytest

from backstay.consensus import ClusterMirror
from backstay.consensus.records.settings import ClusterSettings, SettingsRecord
from backstay.consensus.store import RangeResult
from backstay.errors import ConfigError, InvalidRequest, SettingsChanged, StoreUnavailable
from backstay.pserver.ctl.config import parse_assignments
from backstay.pserver.membership.record_watch import RecordWatch
from backstay.pserver.requests.settings import SettingsAt, SettingsKeeper
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.memory_nodes import KEYS, run

SET = ClusterSettings(checkpoint_url="s3://b/p", checkpoint_every_s=600, moves_at_once=8)


def test_the_record_leads_back() -> None:
    assert ClusterSettings.from_json(SET.to_json()) == SET
    assert ClusterSettings.from_json(ClusterSettings().to_json()) == ClusterSettings()


def test_a_setting_that_is_younger_than_the_record_has_its_default() -> None:
    document = json.loads(SET.to_json())
    del document["settings"]["moves_at_once"]
    again = ClusterSettings.from_json(json.dumps(document))
    assert again.moves_at_once == ClusterSettings().moves_at_once
    assert again.checkpoint_every_s == 600


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[", "Invalid JSON"),
        ("[]", "Input should be an object"),
        ('{"format":1}', "settings: Field required"),
        ('{"format":2,"settings":{}}', "format 1 only"),
        ('{"format":1,"settings":{"moves":1}}', "knows no setting 'moves'"),
        ('{"format":1,"settings":{"moves_at_once":"8"}}', "'8' is not an integer"),
        ('{"format":1,"settings":{"moves_at_once":true}}', "True is not an integer"),
        ('{"format":1,"settings":{"moves_at_once":0}}', "0 is out of range"),
    ],
)
def test_a_record_that_cannot_be_right_is_refused(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^cluster settings: .*{says}"):
        ClusterSettings.from_json(text)


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ({"moves_at_once": "0"}, r"moves_at_once: 0 is out of range; allowed is 1 to 65536"),
        ({"moves_at_once": "many"}, r"moves_at_once: 'many' is not an integer"),
        ({"checkpoint_keep_last": ""}, r"checkpoint_keep_last: '' is not an integer"),
        ({"move_at_once": "8"}, r"move_at_once: no such setting; did you mean 'moves_at_once'\?"),
        ({"on_slot_loss": "panic"}, r"on_slot_loss: 'panic' is not one of restore, restore-lost,"),
        ({"checkpoint_url": "points"}, r"checkpoint_url: 'points' is neither an absolute path"),
        ({"checkpoint_every_s": "600"}, r"checkpoint_every_s: 600 needs checkpoint_url, which is"),
    ],
)
def test_a_wrong_change_names_setting_value_and_what_is_allowed(
    texts: dict[str, str], says: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{says}"):
        ClusterSettings().changed(texts)


@pytest.mark.parametrize("url", ["", "/srv/checkpoints", "s3://bucket/path", "hdfs://host:1/p"])
def test_places_for_checkpoints(url: str) -> None:
    assert ClusterSettings().changed({"checkpoint_url": url}).checkpoint_url == url


def test_a_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="holds a password") as raised:
        ClusterSettings().changed({"checkpoint_url": "s3://me:s3cr3t@bucket/path"})
    assert "s3cr3t" not in str(raised.value)


def test_a_change_leaves_the_others_as_they_are() -> None:
    changed = SET.changed({"checkpoint_every_s": "60", "on_slot_loss": "wait"})
    assert changed == ClusterSettings(
        checkpoint_url="s3://b/p", checkpoint_every_s=60, moves_at_once=8, on_slot_loss="wait"
    )


def test_a_record_of_before_lost_slots_waited_has_the_default() -> None:
    old = SET.to_json().replace('"on_slot_loss":"restore"', '"on_slot_loss":"empty"')
    assert "empty" in old
    assert ClusterSettings.from_json(old) == SET


def test_arguments_of_config_set() -> None:
    assert parse_assignments(["a=1", "b=", "c=x=y"]) == {"a": "1", "b": "", "c": "x=y"}
    for wrong, says in (
        ([], "at least one"),
        (["a"], "'a' is not of the form"),
        (["=1"], "'=1' is not"),
        (["a=1", "a=2"], "a is given twice"),
    ):
        with pytest.raises(ConfigError, match=says):
            parse_assignments(wrong)


def test_of_two_who_saw_the_same_one_is_refused_and_told() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        keeper = SettingsKeeper(MemoryStore(backend), KEYS)
        assert await keeper.read() == (SettingsRecord(ClusterSettings()), 0)
        first = await keeper.change({"moves_at_once": "8"}, 0)
        assert first.settings == ClusterSettings(moves_at_once=8)
        assert first.revision > 0
        says = f"changed since revision 0, they are at {first.revision} now"
        with pytest.raises(SettingsChanged, match=says):
            await keeper.change({"checkpoint_keep_last": "5"}, 0)
        second = await keeper.change({"checkpoint_keep_last": "5"}, first.revision)
        assert second.settings == ClusterSettings(moves_at_once=8, checkpoint_keep_last=5)
        assert second.revision > first.revision
        assert await keeper.read() == second
        # The same once more, as after an answer that got lost.
        assert await keeper.change({"checkpoint_keep_last": "5"}, first.revision) == second

    run(scenario)


def test_nothing_is_written_if_one_value_is_wrong() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        keeper = SettingsKeeper(MemoryStore(backend), KEYS)
        with pytest.raises(ConfigError, match="checkpoint_keep_last"):
            await keeper.change({"moves_at_once": "8", "checkpoint_keep_last": "-1"}, 0)
        with pytest.raises(ConfigError, match="nothing to change"):
            await keeper.change({}, 0)
        assert await keeper.read() == (SettingsRecord(ClusterSettings()), 0)

    run(scenario)


def test_a_writer_that_comes_between_reading_and_writing_is_seen() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        other = SettingsKeeper(MemoryStore(backend), KEYS)

        class Overtaken(SettingsKeeper):
            async def read(self) -> SettingsAt:
                seen = await super().read()
                if seen.revision == 0:
                    await other.change({"moves_at_once": "9"}, 0)
                return seen

        keeper = Overtaken(MemoryStore(backend), KEYS)
        with pytest.raises(SettingsChanged, match="since revision 0"):
            await keeper.change({"moves_at_once": "8"}, 0)
        assert (await other.read()).settings.moves_at_once == 9

    run(scenario)


def test_every_node_sees_a_change_and_the_defaults_without_a_record() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        store, mirror = MemoryStore(backend), ClusterMirror(KEYS)
        assert mirror.snapshot().settings == ClusterSettings()
        async with RecordWatch(MemoryStore(backend), KEYS, mirror):
            await SettingsKeeper(store, KEYS).change({"moves_at_once": "8"}, 0)
            while mirror.snapshot().settings.moves_at_once != 8:
                await mirror.newer_than(mirror.snapshot().revision)
        mirror.load(KEYS.settings, RangeResult((), 99))
        assert mirror.snapshot().settings == ClusterSettings()

    run(scenario)


def test_a_store_that_is_away_is_told() -> None:
    async def scenario(backend: MemoryBackend) -> None:
        keeper = SettingsKeeper(MemoryStore(backend), KEYS)
        backend.set_outage(True)
        with pytest.raises(StoreUnavailable):
            await keeper.read()

    run(scenario)
