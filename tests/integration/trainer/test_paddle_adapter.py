"""The Paddle layers and optimizer against real servers on this machine, beside plain Paddle."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

from backstay import tables
from backstay.errors import (
    ConfigError,
    InvalidRequest,
    NonFiniteGradient,
    TableConflict,
)
from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer import Client
from backstay.trainer.paddle import (
    DistributedOptimizer,
    Embedding,
    EmbeddingBag,
    Session,
    init,
)

pytestmark = pytest.mark.paddle
BIG = 2**63 - 5  # an id that no weight matrix has room for
jobs = itertools.count()


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(servers=2) as running:
        yield running


@pytest.fixture
def session(cluster: LocalCluster) -> Iterator[Session]:
    """A session whose tables no other test has seen."""
    with init(cluster.endpoints, trainer_id=0, trainers_num=1, job=f"job{next(jobs)}") as opened:
        yield opened


def sgd(*layers: Any, rate: Any = 0.5) -> Any:
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    return paddle.optimizer.SGD(rate, parameters=parameters)


def rows_of(session: Session, layer: Any, ids: Any) -> Any:
    return session.client.pull(layer.table_name, np.asarray(ids, np.int64))


def test_rows_are_pulled_and_gradients_pushed(session: Session) -> None:
    layer = Embedding(None, 3)
    optimizer = DistributedOptimizer(sgd(layer))
    ids = paddle.to_tensor([[BIG, -1], [7, BIG]])
    before = rows_of(session, layer, ids.numpy())
    output = layer(ids)
    np.testing.assert_array_equal(output.numpy(), before)
    assert output.shape == [2, 2, 3]
    (output * paddle.to_tensor([[[1.0], [2.0]], [[3.0], [4.0]]])).sum().backward()
    optimizer.step()
    # The id that came twice has the sum of both gradients.
    np.testing.assert_allclose(
        rows_of(session, layer, [BIG, -1, 7]),
        before.reshape(-1, 3)[:3] - 0.5 * np.array([[5.0], [2.0], [3.0]], np.float32),
        rtol=1e-6,
    )


def test_ids_of_any_kind(session: Session) -> None:
    layer = Embedding(None, 2)
    DistributedOptimizer(sgd(layer))
    expected = layer(paddle.to_tensor([1, 2])).numpy()
    for ids in ([1, 2], np.array([1, 2], np.uint64), np.array([1, 2], np.int32)):
        np.testing.assert_array_equal(layer(ids).numpy(), expected)
    assert layer(paddle.zeros([0], dtype="int64")).shape == [0, 2]
    with pytest.raises(InvalidRequest, match="integers"):
        layer(paddle.to_tensor([1.0]))


def test_several_lookups_are_one_update(session: Session) -> None:
    """Momentum would tell one update from two."""
    layer, reference = Embedding(10, 2, name="e"), paddle.nn.Embedding(10, 2)
    parameters = (layer.parameters(), reference.parameters())
    wrapped, plain = (paddle.optimizer.Momentum(0.1, 0.9, p) for p in parameters)
    optimizer = DistributedOptimizer(wrapped)
    reference.weight.set_value(rows_of(session, layer, range(10)))
    for _ in range(3):
        for model, update in ((layer, optimizer), (reference, plain)):
            first, second = model(paddle.to_tensor([1, 2])), model(paddle.to_tensor([2, 3]))
            (first * second).sum().backward()
            update.step()
            update.clear_grad()
    np.testing.assert_allclose(
        rows_of(session, layer, range(10)), reference.weight.numpy(), rtol=1e-5, atol=1e-7
    )


def test_gradients_accumulate_over_backward_passes(session: Session) -> None:
    layer = Embedding(None, 2)
    optimizer = DistributedOptimizer(sgd(layer))
    before = rows_of(session, layer, [1])
    loss = layer(paddle.to_tensor([1])).sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    np.testing.assert_allclose(rows_of(session, layer, [1]), before - 0.5 * 3, rtol=1e-6)


def test_the_callers_array_may_change_before_the_push(session: Session) -> None:
    layer = Embedding(None, 2)
    optimizer = DistributedOptimizer(sgd(layer))
    before = rows_of(session, layer, [1, 2, 3])
    ids = np.array([1])
    first = layer(ids)
    ids[0] = 2
    (first + layer(ids)).sum().backward()
    ids[0] = 3
    optimizer.step()
    after = rows_of(session, layer, [1, 2, 3])
    np.testing.assert_allclose(after - before, [[-0.5] * 2, [-0.5] * 2, [0.0] * 2], rtol=1e-5)


def test_output_may_be_changed_in_place(session: Session) -> None:
    layer = Embedding(None, 2)
    optimizer = DistributedOptimizer(sgd(layer))
    before = rows_of(session, layer, [1])
    output = layer(paddle.to_tensor([1]))
    output.scale_(3.0)
    np.testing.assert_allclose(output.numpy(), 3 * before, rtol=1e-6)
    output.sum().backward()
    optimizer.step()
    np.testing.assert_allclose(rows_of(session, layer, [1]), before - 0.5 * 3, rtol=1e-6)


def test_only_what_a_backward_pass_reached_is_pushed(session: Session) -> None:
    layer = Embedding(None, 2)
    optimizer = DistributedOptimizer(sgd(layer))
    with paddle.no_grad():
        assert layer(paddle.to_tensor([1])).stop_gradient
    layer.eval()
    assert layer(paddle.to_tensor([1])).stop_gradient
    layer.train()
    assert not layer(paddle.to_tensor([1])).stop_gradient  # no backward
    optimizer.step()
    layer(paddle.to_tensor([1])).sum().backward()
    optimizer.clear_grad()
    optimizer.step()
    assert session.client.stats().pushes_acknowledged == 0
    layer(paddle.to_tensor([1])).sum().backward()
    optimizer.step()
    optimizer.step()  # nothing new
    assert session.client.stats().pushes_acknowledged == 1


def test_padding_idx(session: Session) -> None:
    layer = Embedding(None, 2, padding_idx=0)
    optimizer = DistributedOptimizer(sgd(layer))
    ids = paddle.to_tensor([[5, 0], [0, 6]])
    before = rows_of(session, layer, [5, 6, 0])
    output = layer(ids)
    assert not output.numpy()[[0, 1], [1, 0]].any()
    np.testing.assert_array_equal(output.numpy()[[0, 1], [0, 1]], before[:2])
    output.sum().backward()
    optimizer.step()
    after = rows_of(session, layer, [5, 6, 0])
    np.testing.assert_allclose(after[:2], before[:2] - 0.5, rtol=1e-6)
    np.testing.assert_array_equal(after[2], before[2])
    only_padding = layer(paddle.to_tensor([0, 0]))
    only_padding.sum().backward()
    optimizer.step()
    assert not only_padding.numpy().any()
    assert Embedding(10, 2, padding_idx=-1).padding_idx == 9


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bag_against_paddle(session: Session, mode: str) -> None:
    layer = EmbeddingBag(8, 3, padding_idx=7, mode=mode)  # type: ignore[arg-type]
    reference = paddle.nn.Embedding(8, 3, padding_idx=7)
    optimizer, plain = DistributedOptimizer(sgd(layer)), sgd(reference)
    start = rows_of(session, layer, range(8))
    start[7] = 0.0
    reference.weight.set_value(start)
    ids = np.array([[1, 2, 7], [3, 3, 1], [7, 7, 7], [4, 7, 5]])
    counts = np.maximum((ids != 7).sum(axis=1, keepdims=True), 1).astype(np.float32)
    factor = paddle.to_tensor(np.arange(1, 13, dtype=np.float32).reshape(4, 3))

    bags = layer(paddle.to_tensor(ids))
    expected = reference(paddle.to_tensor(ids)).sum(axis=1)
    if mode == "mean":
        expected = expected / paddle.to_tensor(counts)
    np.testing.assert_allclose(bags.numpy(), expected.numpy(), rtol=1e-5, atol=1e-7)
    for output, update in ((bags, optimizer), (expected, plain)):
        (output * factor).sum().backward()
        update.step()
    after = rows_of(session, layer, range(7))
    np.testing.assert_allclose(after, reference.weight.numpy()[:7], rtol=1e-5, atol=1e-6)

    flat = layer(ids[ids != 7], offsets=np.array([0, 2, 5, 5]))
    np.testing.assert_allclose(flat.numpy(), layer(ids).numpy(), rtol=1e-6)


def test_bag_refuses_what_does_not_fit(session: Session) -> None:
    layer = EmbeddingBag(None, 2, optimizer=tables.SGD(0.1))
    with pytest.raises(InvalidRequest, match="bags"):
        layer(paddle.to_tensor([1, 2]))
    with pytest.raises(InvalidRequest, match="flat"):
        layer(paddle.to_tensor([[1, 2]]), offsets=[0])
    for offsets in ([1], [0, 2, 1], [0, 3]):
        with pytest.raises(InvalidRequest, match="rise"):
            layer(paddle.to_tensor([1, 2]), offsets=offsets)
    with pytest.raises(ConfigError, match="mode"):
        EmbeddingBag(None, 2, mode="max")  # type: ignore[arg-type]


def test_prefetched_rows_are_used_once(session: Session) -> None:
    layer = Embedding(None, 2)
    optimizer = DistributedOptimizer(sgd(layer))
    layer.prefetch(np.array([1, 2]))
    layer.prefetch(paddle.to_tensor([3]))
    first = layer(paddle.to_tensor([1, 2]))
    before = first.numpy().copy()
    first.sum().backward()
    optimizer.step()
    assert session.client.stats().pulls == 1
    np.testing.assert_allclose(layer(paddle.to_tensor([1, 2])).numpy(), before - 0.5, rtol=1e-6)
    layer(paddle.to_tensor([3]))
    assert session.client.stats().pulls == 3
    for batch in range(100):  # they are not fetched: the oldest are forgotten
        layer.prefetch(np.array([batch]))
    assert len(layer._prefetched) <= 8


def test_dense_parameters_of_the_first_trainer_win(session: Session) -> None:
    # One program in two processes gives the parameters the same names; here we do it.
    def model() -> Any:
        attribute = paddle.ParamAttr(name=f"shared{len(made)}")
        made.append(paddle.nn.Linear(3, 2, weight_attr=attribute))
        return made[-1]

    made: list[Any] = []
    first = model()
    first_optimizer = DistributedOptimizer(sgd(first))
    weight, bias = first.weight.numpy().copy(), first.bias.numpy().copy()
    second = model()
    for mine, other in zip(second.parameters(), first.parameters(), strict=True):
        mine.name = other.name
    second_optimizer = DistributedOptimizer(sgd(second))
    np.testing.assert_array_equal(second.weight.numpy(), weight)

    loss = first(paddle.ones([1, 3])).sum()
    loss.backward()
    first_optimizer.step()
    np.testing.assert_allclose(first.weight.numpy(), weight - 0.5, rtol=1e-6)
    np.testing.assert_array_equal(second.weight.numpy(), weight)
    second_optimizer.synchronize()
    np.testing.assert_allclose(second.weight.numpy(), weight - 0.5, rtol=1e-6)
    np.testing.assert_allclose(second.bias.numpy(), bias - 0.5, rtol=1e-6)


def test_many_dense_parameters_are_one_table(session: Session) -> None:
    model = paddle.nn.Sequential(*(paddle.nn.Linear(4, 4) for _ in range(20)))
    DistributedOptimizer(sgd(model))
    mine = [t.name for t in session.client.tables() if t.name.startswith(f"{session.job}/")]
    assert len(mine) == 1


def test_parameter_learning_rates_and_a_scheduler(session: Session) -> None:
    scheduler = paddle.optimizer.lr.ExponentialDecay(0.5, gamma=0.5)
    half = paddle.ParamAttr(learning_rate=0.5)
    layer = Embedding(None, 2, weight_attr=half)
    dense = paddle.nn.Linear(2, 1, weight_attr=half)
    optimizer = DistributedOptimizer(sgd(layer, dense, rate=scheduler))
    scheduler.step()
    assert optimizer.get_lr() == 0.25
    rows, weight = rows_of(session, layer, [1]), dense.weight.numpy().copy()
    bias = dense.bias.numpy().copy()
    output = layer(paddle.to_tensor([1]))
    (output.sum() + dense(paddle.ones([1, 2])).sum()).backward()
    optimizer.step()
    np.testing.assert_allclose(rows_of(session, layer, [1]), rows - 0.125, rtol=1e-6)
    np.testing.assert_allclose(dense.weight.numpy(), weight - 0.125, rtol=1e-6)
    np.testing.assert_allclose(dense.bias.numpy(), bias - 0.25, rtol=1e-6)


def test_decay_and_clipping_of_dense_parameters_are_paddles(session: Session) -> None:
    layers = [paddle.nn.Linear(3, 2), paddle.nn.Linear(3, 2)]
    updates = []
    layers[1].set_state_dict(layers[0].state_dict())
    for layer in layers:
        clip = paddle.nn.ClipGradByGlobalNorm(0.5)
        updates.append(
            paddle.optimizer.SGD(0.5, layer.parameters(), weight_decay=0.1, grad_clip=clip)
        )
    updates[0] = DistributedOptimizer(updates[0])
    for layer, update in zip(layers, updates, strict=True):
        layer(paddle.ones([4, 3])).square().sum().backward()
        update.step()
    np.testing.assert_allclose(layers[0].weight.numpy(), layers[1].weight.numpy(), rtol=1e-6)


def test_asynchronous_steps_settle(session: Session) -> None:
    layer, dense = Embedding(None, 2), paddle.nn.Linear(2, 1)
    optimizer = DistributedOptimizer(sgd(layer, dense, rate=0.01), steps_in_flight=3)
    rows, bias = rows_of(session, layer, [1]), dense.bias.numpy().copy()
    for _ in range(10):
        output = layer(paddle.to_tensor([1]))
        (output.sum() + dense(output.detach()).sum()).backward()
        optimizer.minimize(output)
    optimizer.synchronize()
    np.testing.assert_allclose(rows_of(session, layer, [1]), rows - 0.1, rtol=1e-5)
    np.testing.assert_allclose(dense.bias.numpy(), bias - 0.1, rtol=1e-5)


@pytest.mark.parametrize("steps_in_flight", [0, 2])
def test_a_refused_push_is_reported(session: Session, steps_in_flight: int) -> None:
    layer = Embedding(None, 2)
    optimizer = DistributedOptimizer(sgd(layer), steps_in_flight=steps_in_flight)
    before = rows_of(session, layer, [1])
    (layer(paddle.to_tensor([1])) * float("nan")).sum().backward()

    def step_and_wait() -> None:
        optimizer.step()
        optimizer.synchronize()

    with pytest.raises(NonFiniteGradient):
        step_and_wait()
    np.testing.assert_array_equal(rows_of(session, layer, [1]), before)


def test_evaluation_finds_the_tables_of_training(session: Session) -> None:
    trained = Embedding(None, 2, name="ads", optimizer=tables.FTRL(0.1))
    trained(paddle.to_tensor([1]))
    again = Embedding(None, 2, name="ads")
    again.eval()
    np.testing.assert_array_equal(
        again(paddle.to_tensor([1])).numpy(), trained(paddle.to_tensor([1])).numpy()
    )


def test_errors_say_what_to_do(session: Session) -> None:
    with pytest.raises(ConfigError, match="wrap the optimizer"):
        Embedding(None, 2, name="nobody")(paddle.to_tensor([1]))
    layer = Embedding(None, 2, name="once")
    DistributedOptimizer(sgd(layer))
    with pytest.raises(ConfigError, match="has an optimizer already"):
        DistributedOptimizer(sgd(layer))
    other = Embedding(None, 2, name="once", seed=1)
    with pytest.raises(TableConflict, match="once"):
        DistributedOptimizer(sgd(other))
    fresh = Embedding(None, 2)
    decayed = paddle.optimizer.SGD(0.1, fresh.parameters(), weight_decay=0.1)
    with pytest.raises(ConfigError, match="AdamW"):
        DistributedOptimizer(decayed)
    with pytest.raises(ConfigError, match="steps_in_flight"):
        DistributedOptimizer(sgd(fresh), steps_in_flight=-1)
    with pytest.raises(ConfigError, match="float32"):
        DistributedOptimizer(sgd(paddle.nn.Linear(2, 2).to(dtype="float64")))
    with pytest.raises(ConfigError, match="session is open"):
        init("127.0.0.1:1")


def test_an_optimizer_is_wrapped_once(session: Session) -> None:
    plain = sgd(paddle.nn.Linear(2, 2))
    wrapped = DistributedOptimizer(plain)
    for again in (plain, wrapped):
        with pytest.raises(ConfigError, match="wrapped in a DistributedOptimizer already"):
            DistributedOptimizer(again)


def test_an_embedding_of_another_client_is_refused(session: Session, cluster: LocalCluster) -> None:
    with Client(cluster.endpoints) as other:
        layer = Embedding(None, 2, name="elsewhere", client=other)
        with pytest.raises(ConfigError, match="'elsewhere' and this optimizer have different"):
            DistributedOptimizer(sgd(layer))
        assert not layer.has_optimizer


def test_two_widths_of_one_name(session: Session) -> None:
    DistributedOptimizer(sgd(Embedding(None, 2, name="both")))
    wide = Embedding(None, 3, name="both")
    with pytest.raises(ConfigError, match="rows of 2 elements, this layer wants 3"):
        wide(paddle.to_tensor([1]))
    with pytest.raises(TableConflict, match="both"):
        DistributedOptimizer(sgd(wide))


def test_minimize_takes_no_argument_in_silence(session: Session) -> None:
    layer = paddle.nn.Linear(2, 2)
    optimizer = DistributedOptimizer(sgd(layer))
    loss = layer(paddle.ones([1, 2])).sum()
    with pytest.raises(ConfigError, match="parameters"):
        optimizer.minimize(loss, parameters=layer.parameters())
    with pytest.raises(TypeError):
        optimizer.minimize(loss, whatever=1)  # type: ignore[call-arg]


def test_nothing_looks_saved_that_is_not(session: Session) -> None:
    model = paddle.nn.Sequential(Embedding(None, 2, name="unsaved"), paddle.nn.Linear(2, 2))
    optimizer = DistributedOptimizer(sgd(model))
    with pytest.warns(UserWarning, match="no row of the embedding .*unsaved.*pull"):
        model.state_dict()
    model.state_dict()  # said once, which is enough: another warning would be an error here
    with pytest.raises(ConfigError, match="no checkpoints"):
        optimizer.state_dict()
    with pytest.raises(ConfigError, match="cannot load"):
        optimizer.set_state_dict({})


def test_rows_are_carried_over_as_the_guide_says(session: Session) -> None:
    old, new = Embedding(None, 2, name="old"), Embedding(None, 2, name="new", seed=9)
    DistributedOptimizer(sgd(old, new))
    ids = np.array([3, BIG])
    rows = session.client.pull(old.table_name, ids)
    assert (new(ids).numpy() != rows).any()
    session.client.assign(new.table_name, ids, rows)
    np.testing.assert_array_equal(new(ids).numpy(), rows)


def test_without_a_session() -> None:
    with pytest.raises(ConfigError, match="init"):
        Embedding(None, 2)
    with pytest.raises(ConfigError, match="init"):
        DistributedOptimizer(sgd(paddle.nn.Linear(2, 2)))
