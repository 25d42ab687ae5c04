"""Which tables a node takes in, and what it says about refused ones."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from backstay import _native
from backstay.errors import ConfigError, LimitExceeded, TableConflict, UnknownTable
from backstay.pserver.tables.registry import SPEC_BYTES_MAX, TableRegistry, differences
from backstay.tables import SGD, Adagrad, Capacity, Lifetime, TableSpec


def registry(max_tables: int = 10) -> TableRegistry:
    return TableRegistry(
        canonical=_native.canonical_table,
        fits=lambda spec_json: _native.check_table(spec_json, 64),
        id_of=_native.table_id,
        with_settings=_native.table_with_settings,
        max_tables=max_tables,
    )


def sparse(name: str = "emb", dim: int = 4, rate: float = 0.1) -> str:
    return TableSpec.sparse(name, dim, optimizer=Adagrad(rate)).to_json()


def test_a_table_is_known_after_it_was_added_not_after_it_was_checked() -> None:
    tables = registry()
    table = tables.check(sparse())
    assert len(tables) == 0
    tables.add(table)
    assert tables.get("emb") == table
    assert table.id == _native.table_id("emb")


def test_the_same_settings_pass_again_however_they_are_written() -> None:
    tables = registry()
    tables.add(tables.check(sparse()))
    spelled_otherwise = json.dumps(dict(reversed(json.loads(sparse()).items())), indent=3)
    assert tables.check(spelled_otherwise) == tables.get("emb")


def test_a_conflict_shows_each_difference() -> None:
    tables = registry()
    tables.add(tables.check(sparse()))
    with pytest.raises(TableConflict) as refused:
        tables.check(sparse(dim=8, rate=0.2))
    message = str(refused.value)
    assert "table 'emb' exists with other settings" in message
    assert "kind.sparse.dim: 4 there, 8 asked for" in message
    # What could be changed is not what stands in the way.
    assert "learning_rate" not in message
    assert "another name" in message
    with pytest.raises(TableConflict) as refused:
        tables.check(sparse(rate=0.2))
    message = str(refused.value)
    assert "optimizer.adagrad.learning_rate: 0.1 there, 0.2 asked for" in message
    assert "pserverctl tables set emb learning_rate=0.2, or update_settings=True" in message
    assert "\n" not in message
    with pytest.raises(TableConflict, match="optimizer: adagrad there, sgd asked for"):
        tables.check(TableSpec.sparse("emb", 4, optimizer=SGD(0.1)).to_json())


def test_what_the_cluster_cannot_have_is_refused_before_anything_is_written() -> None:
    tables = registry()
    spec = TableSpec.sparse("emb", 4, lifetime=Lifetime(capacity=Capacity(rows=2_000)))
    table = tables.check(spec.to_json())
    tables.add(table)
    small = replace(spec, lifetime=Lifetime(capacity=Capacity(rows=100)))
    refused = "rows is 100; allowed: at least 1024 in a cluster of 64 slots"
    with pytest.raises(ConfigError, match=refused):
        tables.changed(table, small.to_json())
    with pytest.raises(ConfigError, match=refused):
        registry().check(small.to_json())


def test_a_twin_of_another_tables_id_is_refused() -> None:
    tables = TableRegistry(
        canonical=_native.canonical_table,
        fits=lambda spec_json: _native.check_table(spec_json, 64),
        id_of=lambda _: 7,
        with_settings=_native.table_with_settings,
        max_tables=10,
    )
    tables.add(tables.check(sparse("a")))
    with pytest.raises(TableConflict, match="'b' would have the same id as 'a'; rename it"):
        tables.check(sparse("b"))


def test_there_is_a_limit_to_tables_and_to_a_description() -> None:
    tables = registry(max_tables=1)
    tables.add(tables.check(sparse("a")))
    assert tables.check(sparse("a")) == tables.get("a")
    with pytest.raises(LimitExceeded, match="max_tables is 1"):
        tables.check(sparse("b"))
    with pytest.raises(LimitExceeded, match=f"at most {SPEC_BYTES_MAX}"):
        tables.check(" " * (SPEC_BYTES_MAX + 1))


@pytest.mark.parametrize("name", ["", "a b", "naïve", "x" * 201, "a\n", "a:b"])
def test_a_name_outside_the_rules_is_refused(name: str) -> None:
    spec = {**json.loads(sparse()), "name": name}
    with pytest.raises(ConfigError, match="name"):
        registry().check(json.dumps(spec))


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"name": "a"}', "\ud7ff"])
def test_what_is_no_description_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        registry().check(text)


def test_an_unknown_table_is_named() -> None:
    with pytest.raises(UnknownTable, match=r"no table 'nope'; create it first .* knows no tables"):
        registry().get("nope")


def test_an_unknown_table_comes_with_similar_names_else_with_the_first_ones() -> None:
    tables = registry(max_tables=20)
    for name in ("emb", "bias", *(f"w{index}" for index in range(6))):
        tables.add(tables.check(sparse(name)))
    with pytest.raises(UnknownTable, match=r"\(this node knows: emb and 7 more\)"):
        tables.get("embb")
    with pytest.raises(UnknownTable, match=r"knows: bias, emb, w0, w1, w2 and 3 more"):
        tables.get("zzzzzz")


def test_tables_come_sorted_by_name() -> None:
    tables = registry()
    for name in ("b", "a/z", "a"):
        tables.add(tables.check(sparse(name)))
    assert [table.name for table in tables] == ["a", "a/z", "b"]


def test_differences_are_found_at_any_depth() -> None:
    assert differences({"a": {"b": [1]}}, {"a": {"b": [1]}}) == []
    there, asked = ({"own": {"expression": nodes, "name": "f"}} for nodes in ([1], [2]))
    assert differences(there, asked) == ["own: another function"]
    assert differences({"a": 1}, {"b": 2}) == [
        "a: 1 there, nothing asked for",
        "b: nothing there, 2 asked for",
    ]
