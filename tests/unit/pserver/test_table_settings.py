"""What a name of a setting means, what changes, and who decides of two that declare at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from backstay import _native
from backstay.consensus.records import TableRecord
from backstay.consensus.records.keys import Keys
from backstay.errors import BackstayError, ConfigError, TableConflict, UnknownTable
from backstay.pserver.ctl.tables import parse_assignments
from backstay.pserver.tables.creation import Declarer, TableCreation, TableKeeper, settings_of
from backstay.pserver.tables.registry import TableRegistry
from backstay.pserver.tables.settings import settings_changed, with_assignments
from backstay.tables import (
    FTRL,
    SGD,
    Adam,
    AdmissionFunction,
    Capacity,
    Expiry,
    Lifetime,
    Optimizer,
    RMSProp,
    ScoreFunction,
    TableSpec,
)
from tests.memory_store import MemoryStore

KEYS = Keys("c")


def spec(optimizer: Optimizer | None = None, dim: int = 4) -> str:
    chosen = optimizer or Adam(0.1)
    text = TableSpec.sparse("emb", dim, optimizer=chosen).to_json()
    return _native.canonical_table(text)


# -- names ---------------------------------------------------------------------------------


def test_settings_are_set_by_name() -> None:
    changed = with_assignments(
        spec(), {"learning_rate": 0.01, "non_finite": {"clip": {"limit": 5}}}
    )
    assert settings_changed(spec(), _native.canonical_table(changed)) == (
        "learning_rate: 0.1 -> 0.01",
        "non_finite: refuse -> clip:5.0",
    )


def test_what_is_done_about_stale_gradients_is_set_by_name() -> None:
    changed = _native.canonical_table(with_assignments(spec(), {"compensation": "scale"}))
    assert settings_changed(spec(), changed) == ("compensation: ignore -> scale",)
    back = _native.canonical_table(with_assignments(changed, {"compensation": "ignore"}))
    assert back == spec()
    assert parse_assignments(("compensation=scale",)) == {"compensation": "scale"}
    wrong = "compensation of table 'emb' cannot be \"sclae\": .*, expected one of ignore, scale"
    with pytest.raises(ConfigError, match=wrong):
        with_assignments(spec(), {"compensation": "sclae"})
    ftrl = spec(optimizer=FTRL(0.1))
    with pytest.raises(ConfigError, match='"ignore" or delay_compensated with the optimizer ftrl'):
        _native.canonical_table(with_assignments(ftrl, {"compensation": "scale"}))


@pytest.mark.parametrize("name", ["learning_rate", "beta1"])
def test_a_value_of_a_wrong_kind_is_told_with_its_setting(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_assignments(spec(), {"epsilon": 1e-6, name: "abc"})
    assert str(caught.value) == (
        f'{name} of table \'emb\' cannot be "abc": invalid type: string "abc", expected a number'
    )


def test_an_unknown_setting_is_told_with_those_that_there_are() -> None:
    with pytest.raises(
        ConfigError, match="has no setting 'learning_rte'; did you mean learning_rate"
    ):
        with_assignments(spec(), {"learning_rte": 1})
    with pytest.raises(
        ConfigError, match=r"\(adam\) .* It has learning_rate, beta1, beta2, epsilon"
    ):
        with_assignments(spec(), {"rho": 1})


@pytest.mark.parametrize("name", ["dim", "storage", "initializer", "optimizer", "seed", "dtype"])
def test_what_rows_are_made_for_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(TableConflict, match="its rows are made for it") as refused:
        with_assignments(spec(), {name: 1})
    assert "\n" not in str(refused.value)
    assert not refused.value.retry_safe


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (("learning_rate=0.01",), {"learning_rate": 0.01}),
        (("learning_rate=1e-3", "nesterov=True"), {"learning_rate": 0.001, "nesterov": True}),
        (("non_finite=clip:5",), {"non_finite": {"clip": {"limit": 5}}}),
        (("non_finite=refuse",), {"non_finite": "refuse"}),
        (("epsilon=tiny",), {"epsilon": "tiny"}),
    ],
)
def test_words_become_settings(words: tuple[str, ...], settings: Mapping[str, Any]) -> None:
    assert parse_assignments(words) == settings


@pytest.mark.parametrize("words", [("x",), ("=1",), ("x=",), ("x=1", "x=2")])
def test_words_that_are_none_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        parse_assignments(words)


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "3"])
def test_settings_that_are_no_object_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        settings_of(text)


def lifetime(**parts: Any) -> str:
    made = Lifetime(expiry=Expiry(unseen_seconds=60), **parts)
    return _native.canonical_table(TableSpec.sparse("emb", 4, lifetime=made).to_json())


def test_a_lifetime_is_set_by_the_names_of_its_parts() -> None:
    before = lifetime(capacity=Capacity(rows=2**20))
    changed = with_assignments(
        before, {"expiry.norm_below": 0.5, "capacity.rows": 2**21, "learning_rate": 0.5}
    )
    assert settings_changed(before, _native.canonical_table(changed)) == (
        "learning_rate: 0.01 -> 0.5",
        "expiry.norm_below: null -> 0.5",
        "capacity.rows: 1048576 -> 2097152",
    )


def test_a_part_of_a_lifetime_of_which_nothing_is_left_goes() -> None:
    before = lifetime(capacity=Capacity(rows=2**20))
    changed = json.loads(with_assignments(before, {"expiry.unseen_seconds": None}))
    assert changed["lifetime"]["expiry"] is None
    # The capacity goes by what was seen last, so rows keep that, and the change is allowed.
    assert json.loads(_native.table_with_settings(before, json.dumps(changed))) == json.loads(
        _native.canonical_table(json.dumps(changed))
    )


def test_a_lifetime_that_is_not_there_cannot_be_set() -> None:
    with pytest.raises(TableConflict, match="'emb' has no lifetime"):
        with_assignments(spec(), {"expiry.norm_below": 0.5})
    with pytest.raises(ConfigError, match=r"has no setting 'expiry\.norm'") as refused:
        with_assignments(spec(), {"expiry.norm": 0.5})
    assert "capacity.rows" not in str(refused.value)


@pytest.mark.parametrize("name", ["admission", "capacity.evict", "score.click_coefficient"])
def test_what_statistics_are_made_for_is_refused(name: str) -> None:
    with pytest.raises(TableConflict, match="its rows are made for it"):
        with_assignments(lifetime(), {name: 1})


def test_the_settings_of_a_lifetimes_functions_are_refused_by_name() -> None:
    score = ScoreFunction.of(lambda show, *, day: show / day, day=2.0)
    admission = AdmissionFunction.of(lambda frequency, *, least=3: frequency >= least)
    made = Lifetime(admission, expiry=Expiry(score_below=0.5), score=score)
    before = _native.canonical_table(TableSpec.sparse("emb", 4, lifetime=made).to_json())
    for name in ("score.day", "admission.least"):
        with pytest.raises(TableConflict, match=f"{name} of table 'emb' cannot be changed"):
            with_assignments(before, {name: 1})
    for name in ("score.function", "admission.function"):
        with pytest.raises(TableConflict, match="its rows are made for it"):
            with_assignments(before, {name: 1})
    changed = with_assignments(before, {"score.decay": 0.5})
    assert settings_changed(before, changed) == ("score.decay: 1.0 -> 0.5",)
    assert json.loads(_native.table_with_settings(before, changed)) == json.loads(changed)


# -- one record, several nodes -------------------------------------------------------------


@dataclass
class Node:
    """A node's part in creating and changing tables, on a real store and a real data plane."""

    creation: TableCreation
    registry: TableRegistry
    keeper: TableKeeper


@dataclass
class Nodes:
    """Two nodes that share a store; each tells the other at once, as their calls would."""

    store: MemoryStore = field(default_factory=MemoryStore)

    def __post_init__(self) -> None:
        self.made: dict[str, Node] = {}
        members = {
            number: SimpleNamespace(instance=number, node_id=name, control_address=name)
            for number, name in ((1, "a"), (2, "b"))
        }
        view = SimpleNamespace(snapshot=lambda: SimpleNamespace(members=members))
        for name in ("a", "b"):
            registry = TableRegistry(
                canonical=_native.canonical_table,
                fits=lambda spec_json: _native.check_table(spec_json, 64),
                id_of=_native.table_id,
                with_settings=_native.table_with_settings,
                max_tables=10,
            )
            keeper = TableKeeper(registry, lambda spec_json, revision: None)
            creation = TableCreation(
                store=self.store,
                keys=KEYS,
                view=view,
                node_id=name,
                registry=registry,
                keeper=keeper,
                calls=self,  # type: ignore[arg-type]
                deadline_ms=1000,
            )
            self.made[name] = Node(creation, registry, keeper)

    async def apply_table(self, address: str, spec_json: str, revision: int) -> None:
        self.made[address].keeper.apply(spec_json, revision)

    async def record(self) -> TableRecord:
        found = await self.store.get(KEYS.table("emb"))
        assert found is not None
        return TableRecord.from_json(found.value)

    def rates(self) -> list[float]:
        specs = [json.loads(node.registry.get("emb").spec_json) for node in self.made.values()]
        return [one["optimizer"]["adam"]["learning_rate"] for one in specs]


def job(start: int) -> Declarer:
    return Declarer(job=5, start=start)


async def declare(node: Node, rate: float, start: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    outcome = await node.creation.create(
        spec(Adam(rate)), other_settings="update", declarer=job(start)
    )
    return outcome.changed, outcome.kept


def test_a_change_reaches_every_node_as_a_revision() -> None:
    async def scenario() -> None:
        nodes = Nodes()
        a, b = nodes.made["a"], nodes.made["b"]
        await a.creation.create(spec())
        outcome = await b.creation.set("emb", {"learning_rate": 0.01}, dry_run=True)
        assert (outcome.changed, nodes.rates()) == (("learning_rate: 0.1 -> 0.01",), [0.1, 0.1])
        outcome = await b.creation.set("emb", {"learning_rate": 0.01})
        assert (outcome.table.revision, nodes.rates()) == (2, [0.01, 0.01])
        assert (await a.creation.set("emb", {"learning_rate": 0.01})).changed == ()
        assert (await nodes.record()).revision == 2
        # What comes late of an older revision changes nothing.
        a.keeper.apply(spec(), 1)
        assert nodes.rates() == [0.01, 0.01]

    asyncio.run(scenario())


def test_two_changes_at_once_both_count() -> None:
    async def scenario() -> None:
        nodes = Nodes()
        await nodes.made["a"].creation.create(spec())
        await asyncio.gather(
            nodes.made["a"].creation.set("emb", {"learning_rate": 0.01}),
            nodes.made["b"].creation.set("emb", {"epsilon": 0.5}),
        )
        record = await nodes.record()
        adam = json.loads(record.spec_json)["optimizer"]["adam"]
        assert (record.revision, adam["learning_rate"], adam["epsilon"]) == (3, 0.01, 0.5)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("optimizer", "settings", "error", "text"),
    [
        (RMSProp(), {"momentum": 0.5}, TableConflict, "rmsprop.momentum: 0.0 there, 0.5 asked for"),
        (RMSProp(), {"centered": True}, TableConflict, "centered: false there, true asked for"),
        (Adam(), {"beta1": 1.5}, ConfigError, "optimizer.adam.beta1 is 1.5; allowed"),
        (Adam(), {"epsilon": "tiny"}, ConfigError, "invalid type"),
        (Adam(), {"rho": 1}, ConfigError, "has no setting 'rho'"),
    ],
)
def test_what_cannot_be_set_is_refused_and_changes_nothing(
    optimizer: Optimizer, settings: Mapping[str, Any], error: type[BackstayError], text: str
) -> None:
    async def scenario() -> None:
        nodes = Nodes()
        creation = nodes.made["a"].creation
        await creation.create(spec(optimizer))
        before = await nodes.record()
        for dry_run in (True, False):
            with pytest.raises(error, match=text) as refused:
                await creation.set("emb", settings, dry_run=dry_run)
            assert "\n" not in str(refused.value)
        assert await nodes.record() == before
        with pytest.raises(UnknownTable):
            await creation.set("nope", settings)

    asyncio.run(scenario())


def test_a_declaration_with_other_settings_is_refused_kept_or_taken_over() -> None:
    async def scenario() -> None:
        nodes = Nodes()
        a, b = nodes.made["a"].creation, nodes.made["b"].creation
        await a.create(spec())
        with pytest.raises(TableConflict, match=r"tables set emb learning_rate=0\.2"):
            await b.create(spec(Adam(0.2)))
        outcome = await b.create(spec(Adam(0.2)), other_settings="keep")
        assert (outcome.kept, nodes.rates()) == (("learning_rate: 0.1 -> 0.2",), [0.1, 0.1])
        outcome = await b.create(spec(Adam(0.2)), other_settings="update")
        assert (outcome.changed, outcome.kept) == (("learning_rate: 0.1 -> 0.2",), ())
        assert nodes.rates() == [0.2, 0.2]
        for way in ("refuse", "keep", "update"):
            with pytest.raises(TableConflict, match="optimizer: adam there, sgd asked for"):
                await a.create(spec(SGD(0.2)), other_settings=way)

    asyncio.run(scenario())


def test_a_job_declares_once_for_each_start() -> None:
    async def scenario() -> None:
        nodes = Nodes()
        a, b = nodes.made["a"], nodes.made["b"]
        assert await declare(a, 0.1, 1) == ((), ())
        # The job goes on with another file: the first worker sets it, a late one with the old
        # file does not flip it back, nor does one of an earlier start.
        assert await declare(b, 0.01, 2) == (("learning_rate: 0.1 -> 0.01",), ())
        assert await declare(a, 0.01, 2) == ((), ())
        assert await declare(a, 0.1, 2) == ((), ("learning_rate: 0.01 -> 0.1",))
        assert await declare(a, 0.1, 1) == ((), ("learning_rate: 0.01 -> 0.1",))
        assert nodes.rates() == [0.01, 0.01]
        # What somebody sets by hand outlives workers, and starts with the same file.
        await a.creation.set("emb", {"learning_rate": 0.5})
        assert await declare(b, 0.01, 2) == ((), ("learning_rate: 0.5 -> 0.01",))
        assert await declare(b, 0.01, 3) == ((), ("learning_rate: 0.5 -> 0.01",))
        assert nodes.rates() == [0.5, 0.5]
        # A start with a new file wins again; so does a job that began anew under the name.
        assert (await declare(b, 0.2, 4))[0] == ("learning_rate: 0.5 -> 0.2",)
        other = Declarer(job=6, start=1)
        outcome = await a.creation.create(spec(), other_settings="update", declarer=other)
        assert outcome.changed == ("learning_rate: 0.2 -> 0.1",)

    asyncio.run(scenario())


def test_two_first_workers_with_two_files_leave_one_setting() -> None:
    async def scenario() -> None:
        nodes = Nodes()
        a, b = nodes.made["a"], nodes.made["b"]
        await declare(a, 0.1, 1)
        first, second = await asyncio.gather(declare(a, 0.2, 2), declare(b, 0.3, 2))
        assert bool(first[0]) != bool(second[0])
        assert bool(first[1]) != bool(second[1])
        assert nodes.rates() in ([0.2, 0.2], [0.3, 0.3])

    asyncio.run(scenario())


def test_a_restore_leaves_the_settings_of_tables_that_are_there() -> None:
    async def scenario() -> None:
        nodes = Nodes()
        a = nodes.made["a"]
        await a.creation.create(spec())
        assert (await a.creation.have(spec(Adam(0.7)))).revision == 1
        assert a.keeper.have(spec(Adam(0.7))).spec_json == spec()
        with pytest.raises(TableConflict, match="4 there, 8 asked for"):
            a.keeper.have(spec(dim=8))
        # A node that has not heard of it yet takes the record's settings when it does.
        fresh = Nodes().made["a"]
        assert fresh.keeper.have(spec(Adam(0.7))).revision == 0
        assert fresh.keeper.apply_records({"emb": await nodes.record()}) == []
        assert fresh.registry.get("emb").spec_json == spec()

    asyncio.run(scenario())
