"""The contract of an adapter: layers and optimizer of each framework, against real servers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from backstay import tables
from backstay.errors import ConfigError, InvalidRequest, NonFiniteGradient, TableConflict
from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer import Client
from backstay.trainer.adapter.session import Session, init
from tests.frameworks import EACH, EACH_IN_SLOW, Kit

BIG = 2**63 - 5  # an id that no weight matrix has room for


@pytest.fixture
def session(three_servers: LocalCluster, own_name: str) -> Iterator[Session]:
    """A session whose tables no other test has seen."""
    with init(three_servers.endpoints, trainer_id=0, trainers_num=1, job=own_name) as opened:
        yield opened


def rows_of(session: Session, layer: Any, ids: Any) -> Any:
    return session.client.pull(layer.table_name, np.asarray(ids, np.int64))


def wrapped(kit: Kit, *modules: Any, rate: Any = 0.5, steps_in_flight: int = 0) -> Any:
    optimizer = kit.sgd(*modules, rate=rate)
    return kit.adapter.DistributedOptimizer(optimizer, steps_in_flight=steps_in_flight)


# -- lookups and gradients ---------------------------------------------------------------------


@EACH
def test_rows_are_pulled_and_gradients_pushed(kit: Kit, session: Session) -> None:
    layer = kit.adapter.Embedding(None, 3)
    optimizer = wrapped(kit, layer)
    ids = np.array([[BIG, -1], [7, BIG]])
    before = rows_of(session, layer, ids)
    output = layer(kit.tensor(ids))
    np.testing.assert_array_equal(kit.numbers(output), before)
    assert tuple(output.shape) == (2, 2, 3)
    (output * kit.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])).sum().backward()
    # In the order of the ids as unsigned numbers: 7, BIG, -1.
    assert layer.handle.grad.tolist() == [[3.0] * 3, [5.0] * 3, [2.0] * 3]
    optimizer.step()
    # The id that came twice has the sum of both gradients.
    np.testing.assert_allclose(
        rows_of(session, layer, [BIG, -1, 7]),
        before.reshape(-1, 3)[:3] - 0.5 * np.array([[5.0], [2.0], [3.0]], np.float32),
        rtol=1e-6,
    )


@EACH
def test_ids_of_any_kind(kit: Kit, session: Session) -> None:
    layer = kit.adapter.Embedding(None, 2)
    wrapped(kit, layer)
    expected = kit.numbers(layer(kit.tensor([1, 2])))
    for ids in (
        [1, 2],
        np.array([1, 2], np.uint64),
        np.array([1, 2], np.int32),
        kit.library.to_tensor([1, 2], dtype="int32")
        if kit.name == "paddle"
        else kit.library.tensor([1, 2], dtype=kit.library.uint8),
        kit.tensor([1, 0, 2])[::2],
    ):
        np.testing.assert_array_equal(kit.numbers(layer(ids)), expected)
    assert tuple(layer(kit.tensor(np.zeros(0, np.int64))).shape) == (0, 2)
    assert tuple(layer(kit.tensor(1)).shape) == (2,)
    with pytest.raises(InvalidRequest, match="integers"):
        layer(kit.tensor([1.0]))


@EACH
def test_several_lookups_are_one_update(kit: Kit, session: Session) -> None:
    """Momentum would tell one update from two."""
    layer, reference = kit.adapter.Embedding(10, 2, name="e"), kit.nn.Embedding(10, 2)
    optimizer = kit.adapter.DistributedOptimizer(kit.sgd(layer, rate=0.1, momentum=0.9))
    plain = kit.sgd(reference, rate=0.1, momentum=0.9)
    kit.set_weight(reference.weight, rows_of(session, layer, range(10)))
    for _ in range(3):
        for module, update in ((layer, optimizer), (reference, plain)):
            kit.clear(update)
            first, second = module(kit.tensor([1, 2])), module(kit.tensor([2, 3]))
            (first * second).sum().backward()
            update.step()
    np.testing.assert_allclose(
        rows_of(session, layer, range(10)), kit.numbers(reference.weight), rtol=1e-5, atol=1e-7
    )


@EACH
def test_gradients_accumulate_over_backward_passes(kit: Kit, session: Session) -> None:
    layer = kit.adapter.Embedding(None, 2)
    optimizer = wrapped(kit, layer)
    before = rows_of(session, layer, [1])
    loss = layer(kit.tensor([1])).sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    np.testing.assert_allclose(rows_of(session, layer, [1]), before - 0.5 * 3, rtol=1e-6)


@EACH
@pytest.mark.parametrize("ids_as", ["tensor", "array"])
def test_the_callers_ids_may_change_before_the_push(
    kit: Kit, session: Session, ids_as: str
) -> None:
    layer = kit.adapter.Embedding(None, 2)
    optimizer = wrapped(kit, layer)
    before = rows_of(session, layer, [1, 2, 3])
    ids = kit.tensor([1]) if ids_as == "tensor" else np.array([1])
    first = layer(ids)
    ids[0] = 2
    (first + layer(ids)).sum().backward()
    ids[0] = 3
    optimizer.step()
    after = rows_of(session, layer, [1, 2, 3])
    np.testing.assert_allclose(after - before, [[-0.5] * 2, [-0.5] * 2, [0.0] * 2], rtol=1e-5)


@EACH
def test_output_may_be_changed_in_place(kit: Kit, session: Session) -> None:
    layer = kit.adapter.Embedding(None, 2)
    optimizer = wrapped(kit, layer)
    before = rows_of(session, layer, [1])
    output = layer(kit.tensor([1]))
    kit.scale_in_place(output, 3.0)
    np.testing.assert_allclose(kit.numbers(output), 3 * before, rtol=1e-6)
    output.sum().backward()
    optimizer.step()
    np.testing.assert_allclose(rows_of(session, layer, [1]), before - 0.5 * 3, rtol=1e-6)


@EACH
def test_only_what_a_backward_pass_reached_is_pushed(kit: Kit, session: Session) -> None:
    layer = kit.adapter.Embedding(None, 2)
    optimizer = wrapped(kit, layer)
    ids = kit.tensor([1])
    with kit.no_grad():
        assert not kit.trains(layer(ids))
    layer.eval()
    assert not kit.trains(layer(ids))
    layer.train()
    assert kit.trains(layer(ids))  # no backward
    optimizer.step()
    layer(ids).sum().backward()
    kit.clear(optimizer)
    optimizer.step()
    assert session.client.stats().pushes_acknowledged == 0
    layer(ids).sum().backward()
    optimizer.step()
    optimizer.step()  # nothing new
    assert session.client.stats().pushes_acknowledged == 1


@EACH_IN_SLOW
def test_padding_idx(kit: Kit, session: Session) -> None:
    layer = kit.adapter.Embedding(None, 2, padding_idx=0)
    optimizer = wrapped(kit, layer)
    before = rows_of(session, layer, [5, 6, 0])
    output = layer(kit.tensor([[5, 0], [0, 6]]))
    assert not kit.numbers(output)[[0, 1], [1, 0]].any()
    np.testing.assert_array_equal(kit.numbers(output)[[0, 1], [0, 1]], before[:2])
    output.sum().backward()
    optimizer.step()
    after = rows_of(session, layer, [5, 6, 0])
    np.testing.assert_allclose(after[:2], before[:2] - 0.5, rtol=1e-6)
    np.testing.assert_array_equal(after[2], before[2])
    only_padding = layer(kit.tensor([0, 0]))
    only_padding.sum().backward()
    optimizer.step()
    assert not kit.numbers(only_padding).any()
    assert kit.adapter.Embedding(10, 2, padding_idx=-1).padding_idx == 9


@EACH_IN_SLOW
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_are_those_of_plain_rows(kit: Kit, session: Session, mode: str) -> None:
    layer = kit.adapter.EmbeddingBag(8, 3, padding_idx=7, mode=mode)
    reference = kit.nn.Embedding(8, 3, padding_idx=7)
    optimizer, plain = wrapped(kit, layer), kit.sgd(reference)
    start = rows_of(session, layer, range(8))
    start[7] = 0.0
    kit.set_weight(reference.weight, start)
    ids = np.array([[1, 2, 7], [3, 3, 1], [7, 7, 7], [4, 7, 5]])
    counts = np.maximum((ids != 7).sum(axis=1, keepdims=True), 1).astype(np.float32)
    factor = kit.tensor(np.arange(1, 13, dtype=np.float32).reshape(4, 3))

    bags = layer(kit.tensor(ids))
    expected = reference(kit.tensor(ids)).sum(1)
    if mode == "mean":
        expected = expected / kit.tensor(counts)
    np.testing.assert_allclose(kit.numbers(bags), kit.numbers(expected), rtol=1e-5, atol=1e-7)
    for output, update in ((bags, optimizer), (expected, plain)):
        (output * factor).sum().backward()
        update.step()
    after = rows_of(session, layer, range(7))
    np.testing.assert_allclose(after, kit.numbers(reference.weight)[:7], rtol=1e-5, atol=1e-6)

    flat = layer(ids[ids != 7], offsets=np.array([0, 2, 5, 5]))
    np.testing.assert_allclose(kit.numbers(flat), kit.numbers(layer(ids)), rtol=1e-6)


@EACH_IN_SLOW
def test_bag_refuses_what_does_not_fit(kit: Kit, session: Session) -> None:
    layer = kit.adapter.EmbeddingBag(None, 2, optimizer=tables.SGD(0.1))
    with pytest.raises(InvalidRequest, match="bags"):
        layer(kit.tensor([1, 2]))
    with pytest.raises(InvalidRequest, match="flat"):
        layer(kit.tensor([[1, 2]]), offsets=[0])
    for offsets in ([1], [0, 2, 1], [0, 3]):
        with pytest.raises(InvalidRequest, match="rise"):
            layer(kit.tensor([1, 2]), offsets=offsets)
    with pytest.raises(ConfigError, match="mode"):
        kit.adapter.EmbeddingBag(None, 2, mode="max")


@EACH_IN_SLOW
def test_prefetched_rows_are_used_once(kit: Kit, session: Session) -> None:
    layer = kit.adapter.Embedding(None, 2)
    optimizer = wrapped(kit, layer)
    layer.prefetch(np.array([1, 2]))
    layer.prefetch(kit.tensor([3]))
    first = layer(kit.tensor([1, 2]))
    before = kit.numbers(first)
    first.sum().backward()
    optimizer.step()
    assert session.client.stats().pulls == 1
    now = kit.numbers(layer(kit.tensor([1, 2])))
    np.testing.assert_allclose(now, before - 0.5, rtol=1e-6)
    layer(kit.tensor([3]))
    assert session.client.stats().pulls == 3
    for batch in range(100):  # they are not fetched: the oldest are forgotten
        layer.prefetch(np.array([batch]))
    assert len(layer._prefetched) <= 8


@EACH_IN_SLOW
def test_evaluation_finds_the_tables_of_training(kit: Kit, session: Session) -> None:
    trained = kit.adapter.Embedding(None, 2, name="ads", optimizer=tables.FTRL(0.1))
    trained(kit.tensor([1]))
    again = kit.adapter.Embedding(None, 2, name="ads")
    again.eval()
    np.testing.assert_array_equal(kit.numbers(again([1])), kit.numbers(trained([1])))


@EACH
def test_a_frozen_embedding_is_looked_up_only(kit: Kit, session: Session) -> None:
    trained = kit.adapter.Embedding(None, 2, name="shared")
    wrapped(kit, trained)
    frozen = kit.adapter.Embedding(None, 2, name="shared")
    kit.freeze(frozen)
    dense = kit.nn.Linear(2, 1)
    optimizer = wrapped(kit, frozen, dense)
    before = rows_of(session, trained, [1])
    dense(frozen(kit.tensor([1]))).sum().backward()
    optimizer.step()
    np.testing.assert_array_equal(rows_of(session, trained, [1]), before)


@EACH_IN_SLOW
def test_rows_are_carried_over_as_the_guide_says(kit: Kit, session: Session) -> None:
    old = kit.adapter.Embedding(None, 2, name="old")
    new = kit.adapter.Embedding(None, 2, name="new", seed=9)
    wrapped(kit, old, new)
    ids = np.array([3, BIG])
    rows = rows_of(session, old, ids)
    assert (kit.numbers(new(ids)) != rows).any()
    session.client.assign(new.table_name, ids, rows)
    np.testing.assert_array_equal(kit.numbers(new(ids)), rows)


# -- dense parameters and steps ----------------------------------------------------------------


@EACH
def test_dense_parameters_of_the_first_trainer_win(kit: Kit, session: Session) -> None:
    first, second = kit.nn.Linear(3, 2), kit.nn.Linear(3, 2)
    # One program in two processes gives the parameters the same names; here the test does.
    named = {"name": "shared"} if kit.name == "torch" else {}
    for mine, other in zip(second.parameters(), first.parameters(), strict=True):
        if kit.name == "paddle":
            mine.name = other.name
    first_optimizer = kit.adapter.DistributedOptimizer(kit.sgd(first), **named)
    weight, bias = kit.numbers(first.weight), kit.numbers(first.bias)
    second_optimizer = kit.adapter.DistributedOptimizer(kit.sgd(second), **named)
    np.testing.assert_array_equal(kit.numbers(second.weight), weight)

    first(kit.tensor(np.ones((1, 3)))).sum().backward()
    first_optimizer.step()
    np.testing.assert_allclose(kit.numbers(first.weight), weight - 0.5, rtol=1e-6)
    np.testing.assert_array_equal(kit.numbers(second.weight), weight)
    second_optimizer.synchronize()
    np.testing.assert_allclose(kit.numbers(second.weight), weight - 0.5, rtol=1e-6)
    np.testing.assert_allclose(kit.numbers(second.bias), bias - 0.5, rtol=1e-6)


@EACH
def test_many_dense_parameters_are_one_table(kit: Kit, session: Session) -> None:
    layers = [kit.nn.Linear(4, 4) for _ in range(20)]
    rows = kit.adapter.Embedding(None, 2, name="rows")
    optimizer = wrapped(kit, *layers, rows)
    mine = {t.name for t in session.client.tables() if t.name.startswith(f"{session.job}/")}
    first = "optimizer_0.0" if kit.name == "torch" else layers[0].weight.name
    assert optimizer.table_names == (f"{session.job}/rows", f"{session.job}/dense.{first}")
    assert mine == set(optimizer.table_names)


@EACH
def test_asynchronous_steps_settle(kit: Kit, session: Session) -> None:
    layer, dense = kit.adapter.Embedding(None, 2), kit.nn.Linear(2, 1)
    optimizer = wrapped(kit, layer, dense, rate=0.01, steps_in_flight=3)
    rows, bias = rows_of(session, layer, [1]), kit.numbers(dense.bias)
    for _ in range(10):
        output = layer(kit.tensor([1]))
        (output.sum() + dense(output.detach()).sum()).backward()
        optimizer.step()
    optimizer.synchronize()
    np.testing.assert_allclose(rows_of(session, layer, [1]), rows - 0.1, rtol=1e-5)
    np.testing.assert_allclose(kit.numbers(dense.bias), bias - 0.1, rtol=1e-5)


@EACH_IN_SLOW
@pytest.mark.parametrize("steps_in_flight", [0, 2])
def test_a_refused_push_is_reported(kit: Kit, session: Session, steps_in_flight: int) -> None:
    layer = kit.adapter.Embedding(None, 2)
    optimizer = wrapped(kit, layer, steps_in_flight=steps_in_flight)
    before = rows_of(session, layer, [1])
    (layer(kit.tensor([1])) * float("nan")).sum().backward()

    def step_and_wait() -> None:
        optimizer.step()
        optimizer.synchronize()

    with pytest.raises(NonFiniteGradient):
        step_and_wait()
    np.testing.assert_array_equal(rows_of(session, layer, [1]), before)


@EACH
def test_a_failed_step_can_be_abandoned(kit: Kit, session: Session) -> None:
    layer, dense = kit.adapter.Embedding(None, 2), kit.nn.Linear(2, 1)
    optimizer = wrapped(kit, layer, dense, steps_in_flight=2)
    ones = kit.tensor(np.ones((1, 2)))
    layer.prefetch(kit.tensor([9]))
    layer(kit.tensor([1])).sum().backward()
    dense(ones).sum().backward()
    assert optimizer.abandon() == 0
    assert not layer._prefetched
    optimizer.step()  # nothing is left
    assert session.client.stats().pushes_acknowledged == 1  # of the first dense values
    bias = kit.numbers(dense.bias)
    dense(ones).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    np.testing.assert_allclose(kit.numbers(dense.bias), bias - 0.5, rtol=1e-6)


# -- what is refused ---------------------------------------------------------------------------


@EACH
def test_errors_say_what_to_do(kit: Kit, session: Session) -> None:
    layer = kit.adapter.Embedding(None, 2, name="once")
    with pytest.raises(ConfigError, match="wrap the optimizer"):
        layer(kit.tensor([1]))
    wrapped(kit, layer)
    with pytest.raises(ConfigError, match="has an optimizer already"):
        wrapped(kit, layer)
    with pytest.raises(TableConflict, match="once"):
        wrapped(kit, kit.adapter.Embedding(None, 2, name="once", seed=1))
    fresh = kit.adapter.Embedding(None, 2, name="fresh")
    with pytest.raises(ConfigError, match="needs AdamW"):
        kit.adapter.DistributedOptimizer(kit.sgd(fresh, weight_decay=0.1))
    with pytest.raises(ConfigError, match="steps_in_flight"):
        wrapped(kit, fresh, steps_in_flight=-1)
    before = session.client.tables()
    with pytest.raises(ConfigError, match="float32"):
        wrapped(kit, fresh, kit.nn.Linear(2, 2).to(dtype=kit.library.float64))
    assert session.client.tables() == before
    assert not fresh.has_optimizer
    with pytest.raises(ConfigError, match="session is open"):
        kit.adapter.init("127.0.0.1:1")


@EACH
def test_an_optimizer_is_wrapped_once(kit: Kit, session: Session) -> None:
    plain = kit.sgd(kit.nn.Linear(2, 2))
    optimizer = kit.adapter.DistributedOptimizer(plain)
    for again in (plain, optimizer):
        with pytest.raises(ConfigError, match="wrapped in a DistributedOptimizer already"):
            kit.adapter.DistributedOptimizer(again)


@EACH_IN_SLOW
def test_an_embedding_of_another_client_is_refused(
    kit: Kit, session: Session, three_servers: LocalCluster
) -> None:
    with Client(three_servers.endpoints) as other:
        layer = kit.adapter.Embedding(None, 2, name="elsewhere", client=other)
        with pytest.raises(ConfigError, match="'elsewhere' and this optimizer have different"):
            wrapped(kit, layer)
        assert not layer.has_optimizer


@EACH_IN_SLOW
def test_two_widths_of_one_name(kit: Kit, session: Session) -> None:
    wrapped(kit, kit.adapter.Embedding(None, 2, name="both"))
    wide = kit.adapter.Embedding(None, 3, name="both")
    with pytest.raises(ConfigError, match="rows of 2 elements, this layer wants 3"):
        wide(kit.tensor([1]))
    with pytest.raises(TableConflict, match="both"):
        wrapped(kit, wide)


@EACH
def test_nothing_looks_saved_that_is_not(kit: Kit, session: Session) -> None:
    rows = kit.adapter.Embedding(None, 2, name="unsaved")
    model = kit.nn.Sequential(rows, kit.nn.Linear(2, 2))
    optimizer = wrapped(kit, model)
    warning = r"no row of the embedding .*unsaved.*checkpoints.*pull"
    with pytest.warns(UserWarning, match=warning):
        model.state_dict()
    model.state_dict()  # said once, which is enough: another warning would be an error here
    with pytest.raises(ConfigError, match="no checkpoints"):
        optimizer.state_dict()
    load = optimizer.load_state_dict if kit.name == "torch" else optimizer.set_state_dict
    with pytest.raises(ConfigError, match="cannot load"):
        load({})
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ConfigError, match=r"'.*unsaved' cannot be copied or pickled"):
            copied(model)


@EACH_IN_SLOW
def test_without_a_session(kit: Kit) -> None:
    with pytest.raises(ConfigError, match="init"):
        kit.adapter.Embedding(None, 2)
    with pytest.raises(ConfigError, match="init"):
        wrapped(kit, kit.nn.Linear(2, 2))
