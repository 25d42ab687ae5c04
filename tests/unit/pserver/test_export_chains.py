"""When the next element of a running export begins a chain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backstay.checkpoint.manifest import ExportChoice, Manifest
from backstay.consensus.records.exports import ExportRecord
from backstay.job_spec import ExportsSpec, ExportTopicSpec
from backstay.pserver.exports.exporter import why_a_new_chain
from backstay.tables import Expiry, Lifetime, PullFunction, Score, TableSpec
from tests.unit.serving.elements import base

SPEC = ExportsSpec(url="/served", tables=("*",), score_at_least=0.5)
RECORD = ExportRecord(name="serve", run="r", spec=SPEC, started="2026-11-26")

TOPIC = ExportTopicSpec(name="clicks", brokers=("a:1",))


def scored(click_coefficient: float = 1.0, score_below: float = 0.1) -> TableSpec:
    score = Score(click_coefficient=click_coefficient)
    lifetime = Lifetime(score=score, expiry=Expiry(score_below=score_below))
    return TableSpec.sparse("t", dim=2, lifetime=lifetime)


def scaled(weights: Any, *, factor: float = 1.0) -> Any:
    return weights * factor


def newest(spec: TableSpec) -> Manifest:
    choice = ExportChoice(("t",), score_at_least=SPEC.score_at_least)
    return replace(base(), choice=choice, tables=(spec,))


def why(element: Manifest | None, spec: TableSpec, record: ExportRecord = RECORD) -> str:
    return why_a_new_chain(element, record, {spec.name: spec}, "ab", 0)


@pytest.mark.parametrize("least", [0.5, None])
def test_an_increment_builds_on_rows_of_the_same_choice(least: float | None) -> None:
    spec, record = (
        scored(click_coefficient=1.0),
        replace(RECORD, spec=replace(SPEC, score_at_least=least)),
    )
    assert why(newest(spec), spec, record) == ""
    other = scored(click_coefficient=2.0)
    wanted = "" if least is None else "the rows of table t have another score"
    assert why(newest(spec), other, record) == wanted
    expires = scored(score_below=0.2)
    assert why(newest(spec), expires, record) == "", "no other rows are chosen"


def test_a_topic_has_what_the_function_on_pull_makes_of_all_rows() -> None:
    def table(factor: float) -> TableSpec:
        return TableSpec.sparse("t", dim=2, pull=PullFunction.of(scaled, factor=factor))

    record = replace(RECORD, spec=replace(SPEC, topic=TOPIC))
    assert why(newest(table(2.0)), table(2.0), record) == ""
    said = "a pull of table t goes through another function"
    assert why(newest(table(2.0)), table(3.0), record) == said
    # Who reads the folder computes it.
    assert why(newest(table(2.0)), table(3.0)) == ""


def test_what_cannot_be_built_on_is_named() -> None:
    spec = scored()
    assert why(None, spec) == "the export was started"
    assert why(newest(spec), spec, replace(RECORD, run="s")) == "the export was started"
    assert why(replace(newest(spec), generation=1), spec).startswith("rows were restored or lost")
    assert why(newest(spec), replace(spec, name="u")) == "there are other tables"
    wider = TableSpec.sparse("t", dim=3, lifetime=spec.lifetime)
    assert why(newest(spec), wider) == "table t is another one"
