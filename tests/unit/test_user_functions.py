"""User functions: what is traced, what is refused and where, and that the servers take it."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backstay import _native
from backstay.errors import ConfigError
from backstay.tables import (
    AdmissionFunction,
    AdmitByScore,
    Capacity,
    Expiry,
    Lifetime,
    PullFunction,
    Score,
    ScoreFunction,
    State,
    TableSpec,
    UserOptimizer,
    per_element,
    per_row,
)
from backstay.tables.part import in_json
from tools.make_user_function_vectors import CASES, PATH, adagrad, clipped_by_norm, soft, text

ROOT = Path(__file__).parents[2]


def clip(weights: Any, *, limit: float = 1.0) -> Any:
    return np.clip(weights, -limit, limit)


def worth(time: Any, last_seen: Any, show: Any, click: Any, *, day: float = 86_400.0) -> Any:
    return (click + 0.1 * (show - click)) * np.exp((last_seen - time) / day)


def admitted(frequency: Any, show: Any) -> Any:
    return (frequency >= 3) | ~(show < 2)


def rooted(show: Any, *, least: float = 3.0) -> Any:
    return np.sqrt(show - least)


LIFETIMES = {
    "scored": Lifetime(expiry=Expiry(score_below=0.5), score=ScoreFunction.of(worth, day=60.0)),
    "fading": Lifetime(
        AdmitByScore(2.0),
        capacity=Capacity(640, evict="least_frequent"),
        score=Score(function=ScoreFunction.of(rooted), decay=0.5, decay_every_seconds=60),
    ),
    "admitted": Lifetime(AdmissionFunction.of(admitted), "zeros"),
    "both": Lifetime(
        AdmissionFunction.of(lambda time, last_seen: time - last_seen < 60),
        expiry=Expiry(score_below=1.0),
        score=ScoreFunction.of(rooted),
    ),
}
SPECS = [
    *(TableSpec.sparse(name, 4, lifetime=lifetime) for name, lifetime in LIFETIMES.items()),
    *(
        TableSpec.sparse("t", 4, optimizer=UserOptimizer.of(function, **settings))
        for function, settings, _ in CASES
    ),
    TableSpec.sparse("p", 4, pull=PullFunction.of(clip, limit=0.5)),
    TableSpec.dense("d", (4, 4), pull=PullFunction.of(lambda weights: weights * 2)),
]


def test_the_vectors_are_those_of_today() -> None:
    assert PATH.read_text() == text()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_description_goes_and_comes(spec: TableSpec) -> None:
    assert TableSpec.from_json(spec.to_json()) == spec
    assert hash(TableSpec.from_json(spec.to_json())) == hash(spec)
    canonical = _native.canonical_table(spec.to_json())
    assert json.loads(canonical) == json.loads(spec.to_json())
    assert TableSpec.from_json(canonical) == spec


def test_the_signature_is_the_description() -> None:
    made = UserOptimizer.of(clipped_by_norm, learning_rate=0.5, limit=3)
    assert (made.name, made.learning_rate) == ("clipped_by_norm", 0.5)
    assert made.settings == {"momentum": 0.9, "limit": 3.0}
    assert made.states == (State("velocity"), State("count", "row"))
    assert TableSpec.sparse("t", 16, optimizer=made).state_elements == 17
    assert UserOptimizer.of(soft, learning_rate=1).states == (State("scale", "row", 1.0),)


def test_learning_rate_is_0_01_without_any() -> None:
    def plain(weights: Any, gradient: Any, *, learning_rate: float) -> Any:
        return weights - learning_rate * gradient

    def own(weights: Any, gradient: Any, *, learning_rate: float = 0.5) -> Any:
        return weights - learning_rate * gradient

    assert UserOptimizer.of(plain).learning_rate == 0.01
    assert UserOptimizer.of(own).learning_rate == 0.5


def test_equal_operations_are_one_node() -> None:
    def twice(weights: Any) -> Any:
        return (weights * 2 + 1) * (weights * 2 + 1)

    nodes = json.loads(PullFunction.of(twice).expression)["nodes"]
    assert [name for node in nodes for name in node] == [
        "input",
        "constant",
        "mul",
        "constant",
        "add",
        "mul",
    ]


def test_in_place_operators_make_new_values() -> None:
    def in_place(weights: Any) -> Any:
        before = weights
        weights *= 2
        weights += before
        return weights

    def plain(weights: Any) -> Any:
        return weights * 2 + weights

    assert PullFunction.of(in_place).expression == PullFunction.of(plain).expression


def test_score_and_admission() -> None:
    score = ScoreFunction.of(worth)
    assert score.settings == {"day": 86_400.0}
    assert json.loads(AdmissionFunction.of(admitted).expression)["nodes"][-1] == {"or": [3, 6]}
    with pytest.raises(
        ConfigError, match="returned admitted is a number for the row; allowed: a mask"
    ):
        AdmissionFunction.of(lambda show: show)
    with pytest.raises(ConfigError, match="no input 'weights'; there are time, last_seen"):
        ScoreFunction.of(lambda weights: np.sum(weights))


def test_rows_and_counters_keep_what_the_functions_use() -> None:
    specs = {name: TableSpec.sparse(name, 4, lifetime=one) for name, one in LIFETIMES.items()}
    kept = {name: spec.statistics for name, spec in specs.items()}
    assert kept == {
        "scored": ("last_seen", "show", "click"),
        "fading": ("frequency", "show"),
        "admitted": (),
        "both": ("show",),
    }
    counted = {name: spec.companion_shape for name, spec in specs.items()}
    # A counter of "both" has when it was counted, and a word, for there is no row without one.
    assert counted == {"scored": None, "fading": (1, 1), "admitted": (2, 1), "both": (1, 1)}
    for name, spec in specs.items():
        assert spec.takes_counts
        assert spec.has_score == (name != "admitted")
    assert not TableSpec.sparse(
        "t", 4, lifetime=Lifetime(AdmissionFunction.of(lambda frequency: frequency > 1))
    ).takes_counts


def test_a_function_is_kept_as_a_score() -> None:
    function = ScoreFunction.of(worth)
    expiry = Expiry(score_below=0.5)
    assert Lifetime(expiry=expiry, score=function) == Lifetime(
        expiry=expiry, score=Score(function=function)
    )
    written = json.loads(SPECS[0].to_json())["lifetime"]["score"]
    assert written.keys() == {"function", "decay", "decay_every_seconds"}


@pytest.mark.parametrize(
    ("lifetime", "says"),
    [
        ({"score": {"function": "SEEN", "decay": 0.5}}, "neither show nor click"),
        ({"score": {"function": "SEEN", "click_coefficient": 1.0}}, "one of the two"),
        ({"score": {"function": "TIME"}}, "depends on last_seen, frequency, show or click"),
        ({"score": {"function": "MASK"}}, "a mask for the row"),
        ({"admission": {"function": "MASK"}}, "depends on last_seen, frequency, show or click"),
        ({"admission": {"function": "SEEN"}}, "a number for the row"),
        ({"expiry": {"norm_below": 1.0}, "score": {"function": "SEEN"}}, "nothing uses a score"),
    ],
)
@pytest.mark.parametrize("read", [TableSpec.from_json, _native.canonical_table])
def test_functions_that_do_not_suit_a_lifetime_are_refused(
    read: Callable[[str], object], lifetime: dict[str, Any], says: str
) -> None:
    nodes: dict[str, list[Any]] = {
        "SEEN": [{"input": "last_seen"}],
        "TIME": [{"input": "time"}],
        "MASK": [{"input": "time"}, {"constant": 1.0}, {"greater": [0, 1]}],
    }
    text = json.dumps({"expiry": {"score_below": 1.0}} | lifetime)
    for name, taken in nodes.items():
        function = {"name": "f", "expression": {"nodes": taken, "results": [len(taken) - 1]}}
        text = text.replace(f'"{name}"', json.dumps(function))
    with pytest.raises(ConfigError, match=re.escape(says)):
        read(
            '{"name": "t", "kind": {"sparse": {"dim": 2}}, "optimizer": {"sgd": {}}, '
            f'"lifetime": {text}}}'
        )


def test_coefficients_and_a_function_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="one of the two"):
        Score(click_coefficient=1.0, function=ScoreFunction.of(rooted))
    with pytest.raises(ConfigError, match="neither show nor click"):
        Score(decay=0.5, function=ScoreFunction.of(lambda frequency: frequency))
    with pytest.raises(ConfigError, match=r"Score\.function is"):
        Score(function=rooted)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="depends on last_seen"):
        Lifetime(AdmissionFunction.of(lambda time: time > 1))


def test_a_score_is_numpys() -> None:
    spec = TableSpec.sparse("t", 4, lifetime=LIFETIMES["scored"])
    shows = np.array([1.5, 2.0, 100.0] * 50, np.float32)
    clicks, seen = shows / 3, np.arange(150, dtype=np.uint32) + 1_800_000_000
    words = np.stack([seen, shows.view(np.uint32), clicks.view(np.uint32)], axis=1)
    found = _native.row_scores(spec.to_json(), 1_800_000_200, words)
    columns = [column.astype(np.float64) for column in (seen, shows, clicks)]
    wanted = worth(1_800_000_200.0, *columns, day=60.0)
    np.testing.assert_allclose(found, wanted, rtol=1e-15)
    rooted_spec = TableSpec.sparse("t", 4, lifetime=LIFETIMES["both"])
    few = np.array([[2.0], [3.0], [7.0]], np.float32).view(np.uint32)
    assert _native.row_scores(rooted_spec.to_json(), 0, few).tolist() == [-math.inf, 0.0, 2.0]
    with pytest.raises(ConfigError, match="has no score"):
        _native.row_scores(TableSpec.sparse("t", 4).to_json(), 0, few)


def _refusal(function: Callable[..., Any], kind: Any = PullFunction) -> str:
    with pytest.raises(ConfigError) as raised:
        kind.of(function)
    return str(raised.value)


def _with_branch(weights: Any) -> Any:
    doubled = weights * 2
    if doubled > 1:  # here
        return doubled
    return weights


def _with_loop(weights: Any) -> Any:
    total = 0.0
    for value in weights:  # here
        total += value
    return weights * total


def _with_math(weights: Any) -> Any:
    return math.exp(weights)  # here


def _with_index(weights: Any) -> Any:
    return weights[0] + weights  # here


def _with_unknown_function(weights: Any) -> Any:
    return np.cumsum(weights)  # here


def _with_unknown_ufunc(weights: Any) -> Any:
    return np.sin(weights)  # here


def _with_option(weights: Any) -> Any:
    return weights - np.sum(weights, axis=0)  # here


def _with_wrong_shape(weights: Any) -> Any:
    total = np.sum(weights)
    return weights / np.max(total)  # here


def _with_mask_arithmetic(weights: Any) -> Any:
    return weights + np.sqrt(weights > 0)  # here


def _with_two_masks(weights: Any) -> Any:
    return weights * ((weights > 0) + (weights < 1))  # here


def _with_number_as_mask(weights: Any) -> Any:
    return np.where(weights, 1.0, 0.0)  # here


def _with_text(weights: Any) -> Any:
    return weights + "1"  # here


def _with_array(weights: Any) -> Any:
    return weights + np.ones(3)  # here


def _with_infinity(weights: Any) -> Any:
    return np.minimum(weights, np.inf)  # here


def _with_attribute(weights: Any) -> Any:
    return weights.reshape(-1)  # here


def _with_error(weights: Any) -> Any:
    rates: dict[str, float] = {}
    return weights * rates["rate"]  # here


def _with_endless_loop(weights: Any) -> Any:
    while True:
        weights = weights + np.sum(weights)  # here


def _with_chained_comparison(weights: Any) -> Any:
    return np.where(0 < weights < 1, weights, 0.0)  # here


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_with_branch, "if, while, and, or, not"),
        (_with_loop, "a loop over a value"),
        (_with_math, "a function of math"),
        (_with_index, "an index cannot run"),
        (_with_unknown_function, "np.cumsum of 1 values cannot run on the servers; allowed: + - *"),
        (_with_unknown_ufunc, "np.sin cannot run on the servers; allowed: + - *"),
        (_with_option, "np.sum with axis"),
        (_with_wrong_shape, "max of a number for the row; allowed: a number for each element"),
        (_with_mask_arithmetic, "sqrt of a mask; allowed: numbers"),
        (_with_two_masks, "Join masks with & and |"),
        (_with_number_as_mask, "where on a number; allowed: a mask"),
        (_with_text, "str"),
        (_with_array, "a ndarray where a number or an input is needed"),
        (_with_infinity, "the constant inf; allowed: up to 1e30"),
        (_with_attribute, "a value has no .reshape"),
        (_with_error, "KeyError: 'rate'"),
        (_with_endless_loop, "operations one behind the other"),
        (_with_chained_comparison, "if, while, and, or, not"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_cannot_run_is_refused_with_its_line(
    function: Callable[..., Any], message: str
) -> None:
    source, first = inspect.getsourcelines(function)
    line = first + next(at for at, one in enumerate(source) if "# here" in one)
    refused = _refusal(function)
    assert message in refused
    name = function.__name__
    assert refused.startswith(f"user function {name}, test_user_functions.py, line {line}: ")


def test_the_line_is_that_of_a_helper_too() -> None:
    def helper(value: Any) -> Any:
        return np.sin(value)  # here

    def outer(weights: Any) -> Any:
        return helper(weights) * 2

    source, first = inspect.getsourcelines(helper)
    line = first + next(at for at, one in enumerate(source) if "# here" in one)
    assert f"line {line}: np.sin" in _refusal(outer)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda values: values, "no input 'values'; there are weights, gradient; a state has"),
        (lambda weights, *rest: weights, "it takes *rest; name each parameter"),
        (lambda weights, *, rate: weights, "the setting 'rate' has neither a value nor a default"),
        (lambda weights, *, rate="a": weights, "the default of the setting 'rate' is no number"),
        (lambda weights, a=per_element(): weights, "it returns 1 values; expected weights, a"),
        (lambda weights: (weights, weights), "it returns 2 values; expected weights"),
        (lambda weights: weights > 0, "returned weights is a mask for each element of the row"),
        (lambda weights: None, "a NoneType where a number or an input is needed"),
        (
            lambda weights, a=per_row(): (weights, weights),
            "the returned a is a number for each element of the row; allowed: a number for the row",
        ),
        (lambda weights, time=per_row(): (weights, time), "'time' names two things, or is taken"),
    ],
)
def test_bad_functions_are_named(function: Callable[..., Any], message: str) -> None:
    assert message in _refusal(function, UserOptimizer)


def test_bad_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="has no setting 'epsylon'; it has epsilon"):
        UserOptimizer.of(adagrad, epsylon=1)
    with pytest.raises(ConfigError, match="epsilon is nan"):
        UserOptimizer.of(adagrad, learning_rate=1, epsilon=math.nan)
    with pytest.raises(ConfigError, match=r"UserOptimizer.learning_rate is -1"):
        UserOptimizer.of(adagrad, learning_rate=-1)
    with pytest.raises(ConfigError, match="is no Python function"):
        UserOptimizer.of(np.sqrt)
    with pytest.raises(ConfigError, match=r"TableSpec.pull is .*; allowed: a PullFunction"):
        TableSpec.sparse("t", 4, pull=clip)  # type: ignore[arg-type]


def test_too_many_nodes_are_refused() -> None:
    def wide(weights: Any) -> Any:
        parts = [weights * float(number) for number in range(256)]
        return parts[0]

    assert "more than 256 operations" in _refusal(wide)


NODES = [{"input": "weights"}, {"setting": "limit"}, {"minimum": [0, 1]}]


@pytest.mark.parametrize(
    ("nodes", "results", "message"),
    [
        ([*NODES[:2], {"import": "os"}], [0], "unknown variant `import`, expected one of `input`"),
        ([*NODES[:2], {"neg": 0, "abs": 0}], [0], "expected map with a single key"),
        ([*NODES[:2], {"add": [0]}], [0], "invalid length 1"),
        ([*NODES[:2], {"add": [0, -1]}], [0], "integer `-1`, expected u32"),
        ([*NODES[:2], {"neg": True}], [0], "boolean `true`, expected u32"),
        ([*NODES[:2], {"neg": 2}], [0], "uses a node that does not stand before it"),
        ([{"input": "secret"}], [0], "no input 'secret'; there are weights"),
        ([{"setting": "secret"}], [0], "no setting 'secret'; there are limit"),
        ([{"constant": "x"}], [0], 'string "x", expected f64'),
        (NODES, [7], "result weights is node 7"),
        (NODES, [], "it returns 0 values; expected weights"),
        (NODES, "2", 'string "2", expected a sequence'),
        ([], [0], "result weights is node 0"),
        ([{"constant": 0.0}] * 257, [0], "more than 256 operations"),
    ],
)
def test_hostile_expressions_are_refused(
    nodes: list[dict[str, Any]], results: Any, message: str
) -> None:
    spec = json.loads(SPECS[-2].to_json())
    spec["pull"]["expression"] = {"nodes": nodes, "results": results}
    with pytest.raises(ConfigError) as raised:
        TableSpec.from_json(json.dumps(spec))
    assert message in str(raised.value)


def test_the_guide_runs() -> None:
    page = (ROOT / "docs/guide/user-functions.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    made: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "the guide", "exec"), made)
    specs = [one for one in made.values() if isinstance(one, TableSpec)]
    assert [spec.name for spec in specs] == ["clicks", "bounded"]
    specs.append(TableSpec.sparse("clipped", 16, optimizer=made["optimizer"]))
    specs.append(TableSpec.sparse("kept", 16, lifetime=made["lifetime"]))
    assert specs[-1].statistics == ("last_seen", "show", "click")
    for spec in specs:
        _native.canonical_table(spec.to_json())


def test_the_reference_has_the_form_and_every_operation() -> None:
    page = (ROOT / "docs/reference/tables.md").read_text(encoding="utf-8")
    section = page.split("\n## User functions\n")[1].split("\n## ")[0]
    shown = re.search(r"^```json\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert shown
    made = UserOptimizer.of(adagrad, learning_rate=0.05)
    assert json.loads(shown[1]) == in_json(made)
    with pytest.raises(ConfigError, match="unknown variant") as raised:
        _native.FunctionBuilder("pull", [], []).operation("", [0])
    names = re.findall(r"`(\w+)`", str(raised.value))
    operations = set(names) - {"input", "setting", "constant"}
    assert {"add", "where", "sum"} <= operations
    for name in operations:
        assert f"`{name}`" in section, name
    assert "256 nodes, 128 of them one behind the other, 16,384" in section
