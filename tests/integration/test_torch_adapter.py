"""The PyTorch modules and optimizer against real servers on this machine, beside plain PyTorch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from backstay import tables
from backstay.errors import ConfigError, InvalidRequest, NonFiniteGradient, TableConflict
from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer import Client
from backstay.trainer.torch import (
    DistributedOptimizer,
    Embedding,
    EmbeddingBag,
    Session,
    init,
)

pytestmark = pytest.mark.torch
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


def sgd(*modules: Any, rate: Any = 0.5) -> Any:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], rate)


def rows_of(session: Session, layer: Any, ids: Any) -> Any:
    return session.client.pull(layer.table_name, np.asarray(ids, np.int64))


def numbers(tensor: Any) -> Any:
    return tensor.detach().numpy().copy()


def test_rows_are_pulled_and_gradients_pushed(session: Session) -> None:
    layer = Embedding(None, 3)
    optimizer = DistributedOptimizer(sgd(layer))
    ids = torch.tensor([[BIG, -1], [7, BIG]])
    before = rows_of(session, layer, ids.numpy())
    output = layer(ids)
    np.testing.assert_array_equal(numbers(output), before)
    assert output.shape == (2, 2, 3)
    (output * torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])).sum().backward()
    assert layer.handle.grad is None
    optimizer.step()
    # The id that came twice has the sum of both gradients.
    np.testing.assert_allclose(
        rows_of(session, layer, [BIG, -1, 7]),
        before.reshape(-1, 3)[:3] - 0.5 * np.array([[5.0], [2.0], [3.0]], np.float32),
        rtol=1e-6,
    )


def test_rows_begin_as_pytorchs(session: Session) -> None:
    layer = Embedding(None, 64)
    DistributedOptimizer(sgd(layer))
    drawn = numbers(layer(torch.arange(1000)))
    assert drawn.mean() == pytest.approx(0.0, abs=0.02)
    assert drawn.std() == pytest.approx(1.0, abs=0.02)
    constant = Embedding(None, 2, initializer=tables.Constant(0.25))
    DistributedOptimizer(sgd(constant))
    assert (numbers(constant([1, 2])) == 0.25).all()


def test_ids_of_any_kind(session: Session) -> None:
    layer = Embedding(None, 2)
    DistributedOptimizer(sgd(layer))
    expected = numbers(layer(torch.tensor([1, 2])))
    for ids in (
        [1, 2],
        np.array([1, 2], np.uint64),
        np.array([1, 2], np.int32),
        torch.tensor([1, 2], dtype=torch.int32),
        torch.tensor([1, 2], dtype=torch.uint8),
        torch.tensor([1, 0, 2])[::2],
    ):
        np.testing.assert_array_equal(numbers(layer(ids)), expected)
    assert layer(torch.zeros(0, dtype=torch.int64)).shape == (0, 2)
    assert layer(torch.tensor(1)).shape == (2,)
    with pytest.raises(InvalidRequest, match="integers"):
        layer(torch.tensor([1.0]))


def test_several_lookups_are_one_update(session: Session) -> None:
    """Momentum would tell one update from two."""
    layer, twin = Embedding(10, 2, name="e"), torch.nn.Embedding(10, 2)
    wrapped, plain = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (layer, twin))
    optimizer = DistributedOptimizer(wrapped)
    twin.weight.data = torch.from_numpy(rows_of(session, layer, range(10)))
    for _ in range(3):
        for module, update in ((layer, optimizer), (twin, plain)):
            update.zero_grad()
            first, second = module(torch.tensor([1, 2])), module(torch.tensor([2, 3]))
            (first * second).sum().backward()
            update.step()
    np.testing.assert_allclose(
        rows_of(session, layer, range(10)), numbers(twin.weight), rtol=1e-5, atol=1e-7
    )


def test_gradients_accumulate_over_backward_passes(session: Session) -> None:
    layer = Embedding(None, 2)
    optimizer = DistributedOptimizer(sgd(layer))
    before = rows_of(session, layer, [1])
    loss = layer(torch.tensor([1])).sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    np.testing.assert_allclose(rows_of(session, layer, [1]), before - 0.5 * 3, rtol=1e-6)


def test_collected_gradients_are_the_layers_own(session: Session) -> None:
    """A gradient that two tensors share may be changed, say clipped, before the step."""
    layer = Embedding(None, 2)
    optimizer = DistributedOptimizer(sgd(layer))
    before = rows_of(session, layer, [1])
    other = torch.zeros(1, 2, requires_grad=True)
    (layer(torch.tensor([1])) + other).mul(2.0).sum().backward()
    other.grad.zero_()
    optimizer.step()
    np.testing.assert_allclose(rows_of(session, layer, [1]), before - 0.5 * 2, rtol=1e-6)


def test_the_callers_array_may_change_before_the_push(session: Session) -> None:
    layer = Embedding(None, 2)
    optimizer = DistributedOptimizer(sgd(layer))
    before = rows_of(session, layer, [1, 2, 3])
    ids = torch.tensor([1])
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
    output = layer(torch.tensor([1]))
    output.mul_(3.0)
    np.testing.assert_allclose(numbers(output), 3 * before, rtol=1e-6)
    output.sum().backward()
    optimizer.step()
    np.testing.assert_allclose(rows_of(session, layer, [1]), before - 0.5 * 3, rtol=1e-6)


def test_only_what_a_backward_pass_reached_is_pushed(session: Session) -> None:
    layer = Embedding(None, 2)
    optimizer = DistributedOptimizer(sgd(layer))
    with torch.no_grad():
        assert not layer(torch.tensor([1])).requires_grad
    layer.eval()
    assert not layer(torch.tensor([1])).requires_grad
    layer.train()
    assert layer(torch.tensor([1])).requires_grad  # no backward
    optimizer.step()
    layer(torch.tensor([1])).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert session.client.stats().pushes_acknowledged == 0
    layer(torch.tensor([1])).sum().backward()
    optimizer.step()
    optimizer.step()  # nothing new
    assert session.client.stats().pushes_acknowledged == 1


def test_padding_idx(session: Session) -> None:
    layer = Embedding(None, 2, padding_idx=0)
    optimizer = DistributedOptimizer(sgd(layer))
    ids = torch.tensor([[5, 0], [0, 6]])
    before = rows_of(session, layer, [5, 6, 0])
    output = layer(ids)
    assert not numbers(output)[[0, 1], [1, 0]].any()
    np.testing.assert_array_equal(numbers(output)[[0, 1], [0, 1]], before[:2])
    output.sum().backward()
    optimizer.step()
    after = rows_of(session, layer, [5, 6, 0])
    np.testing.assert_allclose(after[:2], before[:2] - 0.5, rtol=1e-6)
    np.testing.assert_array_equal(after[2], before[2])
    only_padding = layer(torch.tensor([0, 0]))
    only_padding.sum().backward()
    optimizer.step()
    assert not numbers(only_padding).any()
    assert Embedding(10, 2, padding_idx=-1).padding_idx == 9


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bag_against_pytorch(session: Session, mode: str) -> None:
    layer = EmbeddingBag(8, 3, padding_idx=7, mode=mode)  # type: ignore[arg-type]
    twin = torch.nn.EmbeddingBag(8, 3, padding_idx=7, mode=mode)
    optimizer, plain = DistributedOptimizer(sgd(layer)), sgd(twin)
    twin.weight.data = torch.from_numpy(rows_of(session, layer, range(8)))
    ids = torch.tensor([[1, 2, 7], [3, 3, 1], [7, 7, 7], [4, 7, 5]])
    factor = torch.arange(1.0, 13.0).reshape(4, 3)
    for module, update in ((layer, optimizer), (twin, plain)):
        (module(ids) * factor).sum().backward()
        update.step()
        update.zero_grad()
    after = rows_of(session, layer, range(7))
    np.testing.assert_allclose(after, numbers(twin.weight)[:7], rtol=1e-5, atol=1e-6)
    for offsets in ([0, 2, 5, 5], [0, 0, 7, 12]):
        flat = layer(ids.reshape(-1), torch.tensor(offsets))
        expected = twin(ids.reshape(-1), torch.tensor(offsets))
        np.testing.assert_allclose(numbers(flat), numbers(expected), rtol=1e-5, atol=1e-6)
    last = EmbeddingBag(
        8,
        3,
        7,
        mode=mode,
        include_last_offset=True,
        name="x",  # type: ignore[arg-type]
    )
    last._table, last._spec = layer._table, layer._spec
    np.testing.assert_array_equal(
        numbers(last(ids.reshape(-1), [0, 2, 5, 12])),
        numbers(layer(ids.reshape(-1), [0, 2, 5])),
    )
    with pytest.raises(InvalidRequest, match="last offset must be the number of ids, 12"):
        last(ids.reshape(-1), [0, 2, 5])


@pytest.mark.parametrize("flat", [False, True])
def test_weighted_bag_against_pytorch(session: Session, flat: bool) -> None:
    layer = EmbeddingBag(8, 3, padding_idx=7, mode="sum")
    twin = torch.nn.EmbeddingBag(8, 3, padding_idx=7, mode="sum")
    optimizer, plain = DistributedOptimizer(sgd(layer)), sgd(twin)
    twin.weight.data = torch.from_numpy(rows_of(session, layer, range(8)))
    ids = torch.tensor([[1, 2, 7], [3, 3, 1], [7, 7, 7], [4, 7, 5]])
    offsets = torch.tensor([0, 2, 5, 5]) if flat else None
    seen = []
    for module, update in ((layer, optimizer), (twin, plain)):
        shaped = ids.reshape(-1) if flat else ids
        weights = torch.linspace(0.5, 2.0, 12).reshape(shaped.shape).requires_grad_()
        output = module(shaped, offsets, weights)
        output.pow(2).sum().backward()
        update.step()
        seen.append((numbers(output), weights.grad.numpy()))
    for mine, theirs in zip(*seen, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    after = rows_of(session, layer, range(7))
    np.testing.assert_allclose(after, numbers(twin.weight)[:7], rtol=1e-5, atol=1e-6)


def test_bag_refuses_what_does_not_fit(session: Session) -> None:
    layer = EmbeddingBag(None, 2, optimizer=tables.SGD(0.1))
    with pytest.raises(InvalidRequest, match="bags"):
        layer(torch.tensor([1, 2]))
    with pytest.raises(InvalidRequest, match="flat"):
        layer(torch.tensor([[1, 2]]), offsets=[0])
    for offsets in ([1], [0, 2, 1], [0, 3]):
        with pytest.raises(InvalidRequest, match="rise"):
            layer(torch.tensor([1, 2]), offsets=offsets)
    with pytest.raises(ConfigError, match="mode"):
        EmbeddingBag(None, 2, mode="max")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="mode='sum'"):
        layer(torch.tensor([[1, 2]]), per_sample_weights=torch.ones(1, 2))
    summing = EmbeddingBag(None, 2, mode="sum", optimizer=tables.SGD(0.1))
    with pytest.raises(InvalidRequest, match=r"shape \(2,\), the ids \(1, 2\)"):
        summing(torch.tensor([[1, 2]]), per_sample_weights=torch.ones(2))


def test_prefetched_rows_are_used_once(session: Session) -> None:
    layer = Embedding(None, 2)
    optimizer = DistributedOptimizer(sgd(layer))
    layer.prefetch(np.array([1, 2]))
    layer.prefetch(torch.tensor([3]))
    first = layer(torch.tensor([1, 2]))
    before = numbers(first)
    first.sum().backward()
    optimizer.step()
    assert session.client.stats().pulls == 1
    np.testing.assert_allclose(numbers(layer(torch.tensor([1, 2]))), before - 0.5, rtol=1e-6)
    layer(torch.tensor([3]))
    assert session.client.stats().pulls == 3
    for batch in range(100):  # nobody comes for them: the oldest are forgotten
        layer.prefetch(np.array([batch]))
    assert len(layer._prefetched) <= 8


def test_dense_parameters_of_the_first_trainer_win(session: Session) -> None:
    first, second = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    first_optimizer = DistributedOptimizer(sgd(first), name="shared")
    weight, bias = numbers(first.weight), numbers(first.bias)
    second_optimizer = DistributedOptimizer(sgd(second), name="shared")
    np.testing.assert_array_equal(numbers(second.weight), weight)

    first(torch.ones(1, 3)).sum().backward()
    first_optimizer.step()
    np.testing.assert_allclose(numbers(first.weight), weight - 0.5, rtol=1e-6)
    np.testing.assert_array_equal(numbers(second.weight), weight)
    second_optimizer.synchronize()
    np.testing.assert_allclose(numbers(second.weight), weight - 0.5, rtol=1e-6)
    np.testing.assert_allclose(numbers(second.bias), bias - 0.5, rtol=1e-6)


def test_many_dense_parameters_are_one_table(session: Session) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(20)), Embedding(None, 2))
    optimizer = DistributedOptimizer(sgd(model))
    mine = {t.name for t in session.client.tables() if t.name.startswith(f"{session.job}/")}
    assert optimizer.table_names == (
        f"{session.job}/embedding_0",
        f"{session.job}/dense.optimizer_0.0",
    )
    assert mine == set(optimizer.table_names)


def test_parameter_groups_and_a_scheduler_of_either_optimizer(session: Session) -> None:
    layer, dense, plain = Embedding(None, 2), torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    plain.load_state_dict(dense.state_dict())

    def groups(model: Any) -> Any:
        return [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.25, "momentum": 0.9}]

    inner = torch.optim.SGD([*groups(dense), {"params": layer.parameters(), "lr": 1.0}], 0.5)
    before_wrap = torch.optim.lr_scheduler.LambdaLR(inner, lambda epoch: 0.5**epoch)
    optimizer = DistributedOptimizer(inner)
    after_wrap = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
    single = torch.optim.SGD(groups(plain), 0.5)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(single, lambda epoch: 0.5**epoch),
        torch.optim.lr_scheduler.StepLR(single, 2, gamma=0.1),
    ]
    rows, moved = rows_of(session, layer, [1]), 0.0
    for _ in range(5):
        for model, update, steps in (
            (dense, optimizer, [before_wrap, after_wrap]),
            (plain, single, schedulers),
        ):
            update.zero_grad()
            loss = model(torch.tensor([[1.0, 2.0]])).pow(2).sum()
            if model is dense:
                moved += optimizer.param_groups[2]["lr"]
                loss = loss + layer(torch.tensor([1])).sum()
            loss.backward()
            update.step()
            for scheduler in steps:
                scheduler.step()
    np.testing.assert_allclose(numbers(dense.weight), numbers(plain.weight), rtol=1e-6)
    np.testing.assert_allclose(numbers(dense.bias), numbers(plain.bias), rtol=1e-6)
    np.testing.assert_allclose(rows_of(session, layer, [1]), rows - moved, rtol=1e-5, atol=1e-6)


def test_decay_of_the_gradient_and_clipping_of_dense_parameters(session: Session) -> None:
    layers = [torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)]
    layers[1].load_state_dict(layers[0].state_dict())
    updates = [torch.optim.Adam(m.parameters(), 0.05, weight_decay=0.1) for m in layers]
    updates[0] = DistributedOptimizer(updates[0])
    for _ in range(4):
        for layer, update in zip(layers, updates, strict=True):
            layer(torch.ones(4, 3)).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(layer.parameters(), 0.5)
            update.step()
            update.zero_grad()
    np.testing.assert_allclose(numbers(layers[0].weight), numbers(layers[1].weight), rtol=1e-5)


def test_a_sparse_gradient_of_a_plain_embedding(session: Session) -> None:
    plain = torch.nn.Embedding(6, 2, sparse=True)
    before = numbers(plain.weight)
    optimizer = DistributedOptimizer(sgd(plain))
    plain(torch.tensor([1, 1, 4])).sum().backward()
    optimizer.step()
    expected = before - 0.5 * np.array([[0], [2], [0], [0], [1], [0]])
    np.testing.assert_allclose(numbers(plain.weight), expected, rtol=1e-6)


def test_asynchronous_steps_settle(session: Session) -> None:
    layer, dense = Embedding(None, 2), torch.nn.Linear(2, 1)
    optimizer = DistributedOptimizer(sgd(layer, dense, rate=0.01), steps_in_flight=3)
    rows, bias = rows_of(session, layer, [1]), numbers(dense.bias)

    def closure() -> Any:
        output = layer(torch.tensor([1]))
        loss = output.sum() + dense(output.detach()).sum()
        loss.backward()
        return loss

    for _ in range(10):
        assert optimizer.step(closure).requires_grad
    optimizer.synchronize()
    np.testing.assert_allclose(rows_of(session, layer, [1]), rows - 0.1, rtol=1e-5)
    np.testing.assert_allclose(numbers(dense.bias), bias - 0.1, rtol=1e-5)


@pytest.mark.parametrize("steps_in_flight", [0, 2])
def test_a_refused_push_is_reported(session: Session, steps_in_flight: int) -> None:
    layer = Embedding(None, 2)
    optimizer = DistributedOptimizer(sgd(layer), steps_in_flight=steps_in_flight)
    before = rows_of(session, layer, [1])
    (layer(torch.tensor([1])) * float("nan")).sum().backward()

    def step_and_wait() -> None:
        optimizer.step()
        optimizer.synchronize()

    with pytest.raises(NonFiniteGradient):
        step_and_wait()
    np.testing.assert_array_equal(rows_of(session, layer, [1]), before)


def test_a_failed_step_can_be_abandoned(session: Session) -> None:
    layer, dense = Embedding(None, 2), torch.nn.Linear(2, 1)
    optimizer = DistributedOptimizer(sgd(layer, dense), steps_in_flight=2)
    layer.prefetch(torch.tensor([9]))
    layer(torch.tensor([1])).sum().backward()
    dense(torch.ones(1, 2)).sum().backward()
    assert optimizer.abandon() == 0
    assert not layer._prefetched
    optimizer.step()  # nothing is left
    assert session.client.stats().pushes_acknowledged == 1  # of the first dense values
    bias = numbers(dense.bias)
    dense(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    np.testing.assert_allclose(numbers(dense.bias), bias - 0.5, rtol=1e-6)


def test_evaluation_finds_the_tables_of_training(session: Session) -> None:
    trained = Embedding(None, 2, name="ads", optimizer=tables.FTRL(0.1))
    trained(torch.tensor([1]))
    again = Embedding(None, 2, name="ads")
    again.eval()
    np.testing.assert_array_equal(
        numbers(again(torch.tensor([1]))), numbers(trained(torch.tensor([1])))
    )


def test_a_frozen_embedding_is_looked_up_only(session: Session) -> None:
    trained = Embedding(None, 2, name="shared")
    DistributedOptimizer(sgd(trained))
    frozen = Embedding(None, 2, name="shared")
    frozen.requires_grad_(False)
    dense = torch.nn.Linear(2, 1)
    optimizer = DistributedOptimizer(sgd(frozen, dense))
    before = rows_of(session, trained, [1])
    dense(frozen(torch.tensor([1]))).sum().backward()
    optimizer.step()
    np.testing.assert_array_equal(rows_of(session, trained, [1]), before)


def test_errors_say_what_to_do(session: Session) -> None:
    with pytest.raises(ConfigError, match="wrap the optimizer"):
        Embedding(None, 2, name="nobody")(torch.tensor([1]))
    layer = Embedding(None, 2, name="once")
    DistributedOptimizer(sgd(layer))
    with pytest.raises(ConfigError, match="has an optimizer already"):
        DistributedOptimizer(sgd(layer))
    other = Embedding(None, 2, name="once", seed=1)
    with pytest.raises(TableConflict, match="once"):
        DistributedOptimizer(sgd(other))
    fresh = Embedding(None, 2, name="fresh")
    decayed = torch.optim.SGD(fresh.parameters(), 0.1, weight_decay=0.1)
    with pytest.raises(ConfigError, match="fresh' needs AdamW"):
        DistributedOptimizer(decayed)
    with pytest.raises(ConfigError, match="Adadelta does not run"):
        DistributedOptimizer(torch.optim.Adadelta(fresh.parameters()))
    with pytest.raises(ConfigError, match="steps_in_flight"):
        DistributedOptimizer(sgd(fresh), steps_in_flight=-1)
    with pytest.raises(ConfigError, match="float32"):
        DistributedOptimizer(sgd(torch.nn.Linear(2, 2).double()))
    assert not fresh.has_optimizer
    with pytest.raises(ConfigError, match="session is open"):
        init("127.0.0.1:1")
    optimizer = DistributedOptimizer(sgd(fresh))
    with pytest.raises(ConfigError, match="before it is wrapped"):
        optimizer.add_param_group({"params": list(torch.nn.Linear(2, 2).parameters())})


@pytest.mark.parametrize("before", [False, True])
def test_only_learning_rates_may_change(session: Session, before: bool) -> None:
    """A schedule of momentum would be lost in silence: the tables have what was wrapped."""
    model = torch.nn.Linear(2, 2)
    inner = torch.optim.Adam(model.parameters(), 0.1)
    cycle = torch.optim.lr_scheduler.OneCycleLR(inner, 0.1, total_steps=9) if before else None
    optimizer = DistributedOptimizer(inner)
    cycle = cycle or torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)

    def train() -> None:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            cycle.step()

    with pytest.raises(ConfigError, match=r"betas of parameter group 0 .*cycle_momentum=False"):
        train()


def test_an_optimizer_is_wrapped_once(session: Session) -> None:
    plain = sgd(torch.nn.Linear(2, 2))
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
        wide(torch.tensor([1]))
    with pytest.raises(TableConflict, match="both"):
        DistributedOptimizer(sgd(wide))


def test_nothing_looks_saved_that_is_not(session: Session) -> None:
    model = torch.nn.Sequential(Embedding(None, 2, name="unsaved"), torch.nn.Linear(2, 2))
    optimizer = DistributedOptimizer(sgd(model))
    with pytest.warns(UserWarning, match="no row of the embedding .*unsaved.*checkpoints"):
        model.state_dict()
    model.state_dict()  # said once, which is enough: another warning would be an error here
    with pytest.raises(ConfigError, match="checkpoints"):
        optimizer.state_dict()
    with pytest.raises(ConfigError, match="cannot load"):
        optimizer.load_state_dict({})
    with pytest.raises(ConfigError, match=r"'.*unsaved' cannot be copied or pickled"):
        copy.deepcopy(model)
    with pytest.raises(ConfigError, match=r"'.*unsaved' cannot be copied or pickled"):
        torch.save(model, "/dev/null")


def test_a_gradient_scaler_is_refused(session: Session) -> None:
    model = torch.nn.Sequential(Embedding(None, 2), torch.nn.Linear(2, 1))
    optimizer = DistributedOptimizer(sgd(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.tensor([1])).sum()).backward()
    before = rows_of(session, model[0], [1])
    with pytest.raises(ConfigError, match=r"GradScaler.*bfloat16"):
        scaler.step(optimizer)
    np.testing.assert_array_equal(rows_of(session, model[0], [1]), before)


def test_autocast_trains(session: Session) -> None:
    model = torch.nn.Sequential(Embedding(None, 4), torch.nn.Linear(4, 1))
    optimizer = DistributedOptimizer(sgd(model))
    before = rows_of(session, model[0], [1])
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.tensor([1])).sum()
    loss.backward()
    optimizer.step()
    assert (rows_of(session, model[0], [1]) != before).all()


def test_rows_are_carried_over_as_the_guide_says(session: Session) -> None:
    old, new = Embedding(None, 2, name="old"), Embedding(None, 2, name="new", seed=9)
    DistributedOptimizer(sgd(old, new))
    ids = np.array([3, BIG])
    rows = session.client.pull(old.table_name, ids)
    assert (numbers(new(ids)) != rows).any()
    session.client.assign(new.table_name, ids, rows)
    np.testing.assert_array_equal(numbers(new(ids)), rows)


def test_without_a_session() -> None:
    with pytest.raises(ConfigError, match="init"):
        Embedding(None, 2)
    with pytest.raises(ConfigError, match="init"):
        DistributedOptimizer(sgd(torch.nn.Linear(2, 2)))


# torch.compile looks at .grad of what comes into a graph and hides the warning; not from pytest.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_model_trains_with_the_same_numbers(session: Session) -> None:
    """AOT autograd, without the code generator, which takes long; the graph breaks at the rows."""

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, name: str) -> None:
            super().__init__()
            self.rows, self.bags = Embedding(None, 4, name=name), EmbeddingBag(None, 4)
            self.layer = torch.nn.Linear(8, 1)

        def forward(self, ids: Any) -> Any:
            both = torch.cat([self.rows(ids[:, 0]) * 2.0, self.bags(ids)], 1)
            return torch.tanh(self.layer(both)).squeeze(1)

    curves = []
    for compiled in (False, True):
        torch.manual_seed(7)
        model = Model(f"rows{compiled}")
        optimizer = DistributedOptimizer(sgd(model, rate=0.1))
        start = np.random.default_rng(3).normal(size=(50, 4)).astype(np.float32)
        for layer in (model.rows, model.bags):
            session.client.assign(layer.table_name, np.arange(50), start)
        call = torch.compile(model, backend="aot_eager") if compiled else model
        curve = []
        for step in range(20):
            ids = torch.from_numpy(np.random.default_rng(step).integers(0, 50, (16, 3)))
            loss = (call(ids) - (ids[:, 1] % 2)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(float(loss.detach()))
        curves.append(curve)
    assert np.mean(curves[0][-5:]) < np.mean(curves[0][:5])  # it did learn
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-6)
