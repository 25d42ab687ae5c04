"""Table descriptions: limits, JSON round trips, and agreement with the native module."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backstay import _native, tables
from backstay.errors import ConfigError
from backstay.tables import (
    FTRL,
    SGD,
    Adadelta,
    Adagrad,
    AdagradDecay,
    Adam,
    Adamax,
    AdamW,
    AdaptiveRevision,
    AdmitAfter,
    AdmitByScore,
    AdmitWithProbability,
    AMSGrad,
    Capacity,
    Clip,
    Constant,
    DelayCompensated,
    Dense,
    Expiry,
    GroupFTRL,
    Lifetime,
    Momentum,
    Normal,
    Refuse,
    RMSProp,
    RowWiseAdagrad,
    Score,
    Sparse,
    TableSpec,
    TruncatedNormal,
    Uniform,
    Xavier,
    Zeros,
)
from backstay.tables.part import Part, in_json, kinds_of

ROOT = Path(__file__).parents[2]
# test_user_functions.py has the users' own.
OPTIMIZERS: dict[str, Any] = {
    name: kind for name, kind in kinds_of("optimizer").items() if name != "user"
}
# Each optimizer that the servers have, with the settings of its vectors.
VECTORS = json.loads((ROOT / "tests/vectors/optimizers.json").read_text())["cases"]
SPECS = [
    TableSpec.sparse("emb", 16),
    TableSpec.dense("fc/w.0", (784, 10), initializer=Xavier(784, 10)),
    TableSpec.dense("b", [3], block_elements=2, initializer=Zeros(), storage="bfloat16"),
    TableSpec.sparse("a-b_c", 65_536, storage="float16", seed=2**64 - 1),
    TableSpec.sparse("i1", 1, initializer=Constant(-0.1)),
    TableSpec.sparse("i2", 1, initializer=Normal()),
    TableSpec.sparse("i3", 1, initializer=TruncatedNormal(0.5, 1e-7)),
    TableSpec.sparse("i4", 1, initializer=Xavier(3, 4, 2.0, "normal")),
    TableSpec.sparse("i5", 1, initializer=Uniform(-1 / 3, 1 / 3)),
    TableSpec.sparse("o1", 1, optimizer=FTRL(0.05, l1=1.0, l2=2)),
    TableSpec.sparse("o2", 1, optimizer=AdamW(3e-4, weight_decay=0.1, steps="global")),
    TableSpec.sparse("n1", 1, non_finite=Clip(10)),
    TableSpec.sparse("n2", 1, non_finite=Refuse()),
    TableSpec.sparse("l1", 1, lifetime=Lifetime(AdmitAfter(2), "zeros")),
    TableSpec.sparse("l2", 1, lifetime=Lifetime(AdmitAfter(100, 65_536), expiry=Expiry(5))),
    TableSpec.sparse("l3", 1, lifetime=Lifetime(AdmitWithProbability(0.1))),
    TableSpec.sparse("l4", 1, lifetime=Lifetime(AdmitByScore(2), score=Score(0.5, 3, 0.9, 60))),
    TableSpec.sparse("l5", 1, lifetime=Lifetime(expiry=Expiry(9, 0.5, 1e-3, 60))),
    TableSpec.sparse("l6", 1, lifetime=Lifetime(capacity=Capacity(16, evict="least_frequent"))),
    TableSpec.sparse("l7", 1, lifetime=Lifetime(capacity=Capacity(bytes=1 << 30))),
    TableSpec.sparse("s1", 1, compensation="scale"),
    TableSpec.dense("s2", (3,), compensation="scale"),
    TableSpec.sparse("s3", 1, compensation=DelayCompensated(0.04)),
    TableSpec.dense("s4", (3,), compensation=DelayCompensated(2, adaptive=True)),
    TableSpec.sparse("s5", 3, optimizer=Adagrad(0.1), compensation=AdaptiveRevision()),
    TableSpec.sparse("l8", 1, lifetime=Lifetime(capacity=Capacity(99, evict="lowest_score"))),
]

# Policies that contradict themselves, as JSON; both languages refuse them, naming this.
CONTRADICTIONS = [
    ("{}", "lifetime"),
    ('{"unadmitted": "zeros", "expiry": {"norm_below": 1}}', "unadmitted"),
    ('{"admission": {"after": {"occurrences": 1}}}', "occurrences"),
    ('{"admission": {"after": {"occurrences": 65536}}}', "occurrences"),
    ('{"admission": {"after": {"occurrences": 101, "filter_bytes": 65536}}}', "occurrences"),
    ('{"admission": {"after": {"occurrences": 2, "filter_bytes": 65535}}}', "filter_bytes"),
    ('{"admission": {"probability": {"probability": 1}}}', "probability"),
    ('{"admission": {"probability": {"probability": 0}}}', "probability"),
    ('{"admission": {"score": {"at_least": 0}}}', "at_least"),
    ('{"admission": {"score": {"at_least": 2}}, "expiry": {"score_below": 3}}', "score_below"),
    ('{"expiry": {}}', "xpiry"),
    ('{"expiry": {"every_seconds": 5}}', "threshold"),
    ('{"expiry": {"unseen_seconds": 0}}', "unseen_seconds"),
    ('{"expiry": {"unseen_seconds": 2147483648}}', "unseen_seconds"),
    ('{"expiry": {"norm_below": 0}}', "norm_below"),
    ('{"capacity": {}}', "apacity"),
    ('{"capacity": {"rows": 16, "bytes": 1024}}', "apacity"),
    ('{"capacity": {"rows": 15}}', "rows"),
    ('{"capacity": {"bytes": 1023}}', "bytes"),
    ('{"expiry": {"norm_below": 1}, "score": {}}', "score"),
    ('{"expiry": {"score_below": 1}, "score": {"decay": 0}}', "decay"),
    ('{"expiry": {"score_below": 1}, "score": {"click_coefficient": -1}}', "click_coefficient"),
    ('{"expiry": {"score_below": 1}, "score": {"decay": 0.99999999}}', "decay"),
    ('{"expiry": {"score_below": 1}, "score": {"decay_every_seconds": 5}}', "decay_every_seconds"),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_json_round_trip(spec: TableSpec) -> None:
    assert TableSpec.from_json(spec.to_json()) == spec
    assert hash(TableSpec.from_json(spec.to_json())) == hash(spec)


@pytest.mark.parametrize(("lifetime", "field"), CONTRADICTIONS)
@pytest.mark.parametrize("read", [TableSpec.from_json, _native.canonical_table])
def test_policies_that_contradict_themselves_are_refused_by_name(
    read: Callable[[str], object], lifetime: str, field: str
) -> None:
    text = (
        '{"name": "t", "kind": {"sparse": {"dim": 2}}, "optimizer": {"sgd": {}}, '
        f'"lifetime": {lifetime}}}'
    )
    with pytest.raises(ConfigError) as raised:
        read(text)
    assert field in str(raised.value)
    assert "allowed" in str(raised.value)


@pytest.mark.parametrize("read", [TableSpec.from_json, _native.canonical_table])
def test_a_dense_table_has_no_lifetime(read: Callable[[str], object]) -> None:
    text = (
        '{"name": "t", "kind": {"dense": {"shape": [2]}}, "optimizer": {"sgd": {}}, '
        '"lifetime": {"expiry": {"norm_below": 1}}}'
    )
    with pytest.raises(ConfigError, match=r"lifetime is set; allowed: .*one in a dense table"):
        read(text)


def test_a_row_keeps_the_statistics_that_its_policy_uses() -> None:
    statistics = {spec.name: spec.statistics for spec in SPECS if spec.lifetime is not None}
    assert statistics == {
        "l1": (),
        "l2": ("last_seen",),
        "l3": (),
        "l4": ("show", "click"),
        "l5": ("last_seen", "show", "click"),
        "l6": ("frequency",),
        "l7": ("last_seen",),
        "l8": ("show", "click"),
    }
    # SGD keeps nothing.
    assert SPECS[-1].state_elements == 2
    assert "lifetime" not in SPECS[0].to_json()
    # What the core said of a description does not stand in the way of a copy.
    assert copy.deepcopy(SPECS[-1]) == SPECS[-1]


def test_an_unknown_word_for_compensation_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        ConfigError,
        match=r"TableSpec.compensation is 'sclae'; allowed: 'ignore', 'scale', a DelayComp",
    ):
        TableSpec.sparse("t", 1, compensation="sclae")  # type: ignore[arg-type]
    assert "compensation" not in SPECS[0].to_json()


def test_adaptive_revision_with_another_optimizer_is_refused_by_name() -> None:
    words = (
        'table "t": compensation is "adaptive_revision"; allowed: with the optimizer adagrad only; '
        "this table has adam"
    )
    with pytest.raises(ConfigError, match=words):
        TableSpec.sparse("t", 1, optimizer=Adam(), compensation=AdaptiveRevision())
    other = TableSpec.sparse("t", 1, optimizer=Adam()).to_json()[:-1]
    with pytest.raises(ConfigError, match=words):
        _native.canonical_table(f'{other}, "compensation": "adaptive_revision"}}')


@pytest.mark.parametrize("optimizer", [FTRL(0.1), GroupFTRL(0.1)])
@pytest.mark.parametrize("read", [TableSpec.from_json, _native.canonical_table])
def test_a_learning_rate_that_scales_whole_weights_is_not_divided(
    read: Callable[[str], object], optimizer: FTRL | GroupFTRL
) -> None:
    text = TableSpec.sparse("t", 1, optimizer=optimizer).to_json()[:-1]
    words = rf"(?i)'?\"?scale.; allowed.*with the optimizer {type(optimizer).__name__}"
    with pytest.raises(ConfigError, match=words):
        read(f'{text}, "compensation": "scale"}}')
    read(f'{text}, "compensation": {{"delay_compensated": {{"strength": 0.04}}}}}}')


def test_missing_fields_take_their_defaults() -> None:
    text = '{"name": "t", "kind": {"sparse": {"dim": 2}}, "optimizer": {"adam": {}}}'
    assert TableSpec.from_json(text) == TableSpec("t", Sparse(2), Adam())


def test_numpy_numbers_become_pythons() -> None:
    spec = TableSpec.dense("d", (np.int64(2), 3), optimizer=SGD(np.float32(0.5)))  # type: ignore[arg-type]
    assert spec == TableSpec.dense("d", (2, 3), optimizer=SGD(0.5))
    assert json.loads(spec.to_json())["kind"] == {
        "dense": {"shape": [2, 3], "block_elements": 4096}
    }


def test_descriptions_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SPECS[0].seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Sparse(0), "Sparse.dim is 0"),
        (lambda: Sparse(-1), "Sparse.dim is -1"),
        (lambda: Sparse(65_537), "from 1 to 65536"),
        (lambda: Sparse(16.0), "Sparse.dim is 16.0"),  # type: ignore[arg-type]
        (lambda: Sparse(True), "Sparse.dim is True"),
        (lambda: Dense(()), "Dense.shape"),
        (lambda: Dense((0, 2)), "Dense.shape"),
        (lambda: Dense((-2, -2)), "Dense.shape"),
        (lambda: Dense((2**32, 2**32)), "Dense.shape"),
        (lambda: Dense((1,) * 17), "Dense.shape"),
        (lambda: Dense(5), "Dense.shape"),  # type: ignore[arg-type]
        (lambda: Dense((5,), 2**20 + 1), "Dense.block_elements is 1048577"),
        (lambda: SGD(math.nan), "SGD.learning_rate is nan"),
        (lambda: SGD(-0.1), "SGD.learning_rate is -0.1"),
        (lambda: SGD(math.inf), "SGD.learning_rate is inf"),
        (lambda: SGD("0.1"), "SGD.learning_rate is '0.1'"),  # type: ignore[arg-type]
        (lambda: Momentum(0.1, 1.0), "Momentum.momentum is 1.0"),
        (lambda: Momentum(0.1, nesterov=1), "Momentum.nesterov is 1"),  # type: ignore[arg-type]
        (lambda: Adagrad(0.1, 0.0), "Adagrad.epsilon is 0.0"),
        (lambda: Adam(beta2=1.5), "Adam.beta2 is 1.5"),
        (lambda: AdamW(weight_decay=-1), "AdamW.weight_decay is -1"),
        (lambda: RMSProp(rho=-0.5), "RMSProp.rho is -0.5"),
        (lambda: FTRL(0.0), "FTRL.learning_rate is 0.0"),
        (lambda: Adam(steps="all"), "Adam.steps is 'all'; allowed: row, global"),  # type: ignore[arg-type]
        (lambda: Adamax(steps=1), "Adamax.steps is 1"),  # type: ignore[arg-type]
        (lambda: Adamax(epsilon_on_maximum=1), "epsilon_on_maximum is 1"),  # type: ignore[arg-type]
        (lambda: RowWiseAdagrad(0.1, 0.0), "RowWiseAdagrad.epsilon is 0.0"),
        (lambda: Adadelta(rho=1.0), "Adadelta.rho is 1.0"),
        (lambda: AMSGrad(weight_decay=-1), "AMSGrad.weight_decay is -1"),
        (lambda: AdagradDecay(0.1, decay=1.0), "AdagradDecay.decay is 1.0"),
        (lambda: GroupFTRL(0.1, l21=-1.0), "GroupFTRL.l21 is -1.0"),
        (lambda: GroupFTRL(0.0), "GroupFTRL.learning_rate is 0.0"),
        (lambda: FTRL(0.1, learning_rate_power=0.5), "FTRL.learning_rate_power is 0.5"),
        (lambda: Uniform(1.0, -1.0), "Uniform.high is -1.0"),
        (lambda: Normal(0.0, -1.0), "Normal.std is -1.0"),
        (lambda: Xavier(0, 1), "Xavier.fan_in is 0"),
        (lambda: Xavier(1, 1, distribution="x"), "uniform, normal"),  # type: ignore[arg-type]
        (lambda: Clip(0), "Clip.limit is 0"),
        (lambda: TableSpec.sparse("", 1), 'name is ""'),
        (lambda: TableSpec.sparse("a b", 1), 'name is "a b"'),
        (lambda: TableSpec.sparse("a\n", 1), r'name is "a\n"'),
        (lambda: TableSpec.sparse("a" * 201, 1), "allowed: 1 to 200 of A-Z a-z 0-9 _ . / -"),
        (lambda: TableSpec.sparse("t", 1, seed=-1), "TableSpec.seed is -1"),
        (lambda: TableSpec.sparse("t", 1, storage="int8"), "TableSpec.storage"),  # type: ignore[arg-type]
        (lambda: TableSpec("t", SGD(), SGD()), "TableSpec.kind"),  # type: ignore[arg-type]
    ],
)
def test_bad_values_are_named(make: Callable[[], object], field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make()
    assert field in str(raised.value)
    assert "allowed" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[" * 60_000, "not JSON"),
        ("[]", "must be a JSON object"),
        ('{"name": "t"}', "missing"),
        (
            '{"name": "t", "kind": {"sparse": {"dim": 2}}, "optimizer": {"sgd": {}}, "x": 1}',
            "unknown field `x`, expected one of `name`",
        ),
        (
            '{"name": "t", "kind": {"sparse": {"dim": 2}}, "optimizer": {"sgd": {"rate": 1}}}',
            "unknown field `rate`, expected `learning_rate`",
        ),
        (
            '{"name": "t", "kind": {"sparse": {}}, "optimizer": {"sgd": {}}}',
            "missing field `dim`",
        ),
        (
            '{"name": "t", "kind": {"sparse": {"dim": 2}}, "optimizer": {"lamb": {}}}',
            "unknown variant `lamb`, expected one of `sgd`",
        ),
        (
            '{"name": "t", "kind": {"sparse": {"dim": 2}}, "optimizer": {"sgd": {}, "adam": {}}}',
            "expected map with a single key",
        ),
        (
            '{"name": "t", "kind": {"sparse": {"dim": 2}},'
            ' "optimizer": {"sgd": {"learning_rate": NaN}}}',
            "not JSON: expected value at line 1 column 86",
        ),
    ],
)
def test_bad_json_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        TableSpec.from_json(text)
    assert message in str(raised.value)


def test_a_trainer_corrects_global_steps_only() -> None:
    others = [spec.optimizer for spec in SPECS if getattr(spec.optimizer, "steps", "row") == "row"]
    assert {optimizer.correction(step) for optimizer in others for step in (1, 9)} == {1.0}
    # What is left of the moments of a first gradient g: m = 0.5 g and v = 0.75 g * g.
    assert Adam(beta1=0.5, beta2=0.25, steps="global").correction(1) == math.sqrt(0.75) / 0.5
    assert Adamax(beta1=0.5, steps="global").correction(2) == 1.0 / 0.75
    assert Adam(steps="global").correction(10**6) == 1.0


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_native_canonical_form_is_ours(spec: TableSpec) -> None:
    canonical = _native.canonical_table(spec.to_json())
    assert json.loads(canonical) == json.loads(spec.to_json())
    assert TableSpec.from_json(canonical) == spec
    assert _native.canonical_table(canonical) == canonical


def test_every_optimizer_of_the_servers_is_here_with_its_settings() -> None:
    for case in VECTORS:
        ((name, settings),) = case["optimizer"].items()
        spec = TableSpec.sparse("t", 1, optimizer=OPTIMIZERS[name](**settings))
        assert (
            json.loads(spec.to_json())["optimizer"]
            == json.loads(_native.canonical_table(spec.to_json()))["optimizer"]
        )
        assert TableSpec.from_json(spec.to_json()) == spec
        assert type(spec.optimizer).__name__ in tables.__all__
    assert OPTIMIZERS.keys() == {name for case in VECTORS for name in case["optimizer"]}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_native_defaults_are_ours(name: str) -> None:
    needs_a_rate = dataclasses.fields(OPTIMIZERS[name])[0].default is dataclasses.MISSING
    settings = {"learning_rate": 0.1} if needs_a_rate else {}
    text = json.dumps({"name": "t", "kind": {"sparse": {"dim": 2}}, "optimizer": {name: settings}})
    assert TableSpec.from_json(text) == TableSpec("t", Sparse(2), OPTIMIZERS[name](**settings))


@pytest.mark.parametrize(
    ("part", "name", "ours"),
    [
        ("initializer", "normal", Normal()),
        ("initializer", "truncated_normal", TruncatedNormal()),
        ("initializer", "xavier", Xavier(1, 1)),
        ("compensation", "delay_compensated", DelayCompensated(1.0)),
        ("kind", "dense", Dense((1,))),
    ],
)
def test_native_defaults_of_other_parts_are_ours(part: str, name: str, ours: Part) -> None:
    needed = {
        item.name: getattr(ours, item.name)
        for item in dataclasses.fields(ours)  # type: ignore[arg-type]
        if item.default is dataclasses.MISSING
    }
    text = _native.canonical_part(json.dumps({part: {name: needed}}), part, "")
    assert json.loads(text)[part] == json.loads(json.dumps(in_json(ours)))
