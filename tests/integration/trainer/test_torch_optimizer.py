"""The PyTorch optimizer against real servers on this machine, beside plain PyTorch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from backstay.errors import ConfigError, NonFiniteGradient, TableConflict
from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer import Client
from backstay.trainer.torch import (
    DistributedOptimizer,
    Embedding,
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
    with init(
        cluster.endpoints, trainer_id=0, trainers_num=1, job=f"optimizer{next(jobs)}"
    ) as opened:
        yield opened


def sgd(*modules: Any, rate: Any = 0.5) -> Any:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], rate)


def rows_of(session: Session, layer: Any, ids: Any) -> Any:
    return session.client.pull(layer.table_name, np.asarray(ids, np.int64))


def numbers(tensor: Any) -> Any:
    return tensor.detach().numpy().copy()


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
    with pytest.raises(ConfigError, match="NAdam does not run"):
        DistributedOptimizer(torch.optim.NAdam(fresh.parameters()))
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


def test_without_a_session() -> None:
    with pytest.raises(ConfigError, match="init"):
        Embedding(None, 2)
    with pytest.raises(ConfigError, match="init"):
        DistributedOptimizer(sgd(torch.nn.Linear(2, 2)))
