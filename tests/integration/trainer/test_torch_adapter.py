"""What only the PyTorch adapter has, against real servers; see test_adapter.py for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from backstay import tables
from backstay.config import ClientConfig
from backstay.errors import ConfigError, InvalidRequest
from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer.torch import DistributedOptimizer, Embedding, EmbeddingBag, Session, init

pytestmark = pytest.mark.torch


@pytest.fixture
def session(one_server: LocalCluster, own_name: str) -> Iterator[Session]:
    """A session whose tables no other test has seen."""
    with init(one_server.endpoints, trainer_id=0, trainers_num=1, job=own_name) as opened:
        yield opened


def sgd(*modules: Any, rate: Any = 0.5) -> Any:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], rate)


def rows_of(session: Session, layer: Any, ids: Any) -> Any:
    return session.client.pull(layer.table_name, np.asarray(ids, np.int64))


def numbers(tensor: Any) -> Any:
    return tensor.detach().numpy().copy()


def test_tables_do_about_stale_gradients_what_the_setting_or_the_layer_says(
    one_server: LocalCluster, own_name: str
) -> None:
    config = ClientConfig(compensation="scale")
    with init(
        one_server.endpoints, trainer_id=0, trainers_num=1, job=own_name, config=config
    ) as session:
        scaled, plain = Embedding(None, 3), Embedding(None, 3, compensation="ignore")
        DistributedOptimizer(sgd(scaled, plain, torch.nn.Linear(3, 1)))
        found = {spec.name: spec.compensation for spec in session.client.tables()}
        assert found[scaled.table_name] == "scale"
        assert found[plain.table_name] == "ignore"
        (dense,) = (name for name in found if name.startswith(f"{session.job}/dense"))
        assert found[dense] == "scale"
        ftrl = tables.FTRL(0.1)
        with pytest.raises(ConfigError, match=r"with the optimizer ftrl: .*BACKSTAY_COMPENSATION"):
            Embedding(None, 3, optimizer=ftrl)
        Embedding(None, 3, optimizer=ftrl, compensation="ignore")


def test_a_layer_that_revises_its_steps_needs_adagrad(session: Session) -> None:
    layer = Embedding(None, 3, compensation=tables.AdaptiveRevision())
    with pytest.raises(ConfigError, match="with the optimizer adagrad only; this table has sgd"):
        DistributedOptimizer(sgd(layer))
    optimizer = DistributedOptimizer(torch.optim.Adagrad(layer.parameters(), lr=0.5))
    found = {spec.name: spec.compensation for spec in session.client.tables()}
    assert found[layer.table_name] == tables.AdaptiveRevision()
    before = rows_of(session, layer, [1, 2])
    layer(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    np.testing.assert_allclose(rows_of(session, layer, [1, 2]), before - 0.5, rtol=1e-5)


def test_rows_begin_as_pytorchs(session: Session) -> None:
    layer = Embedding(None, 64)
    DistributedOptimizer(sgd(layer))
    drawn = numbers(layer(torch.arange(1000)))
    assert drawn.mean() == pytest.approx(0.0, abs=0.02)
    assert drawn.std() == pytest.approx(1.0, abs=0.02)
    constant = Embedding(None, 2, initializer=tables.Constant(0.25))
    DistributedOptimizer(sgd(constant))
    assert (numbers(constant([1, 2])) == 0.25).all()


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


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bag_against_pytorch(session: Session, mode: str) -> None:
    layer = EmbeddingBag(8, 3, padding_idx=7, mode=mode)  # type: ignore[arg-type]
    reference = torch.nn.EmbeddingBag(8, 3, padding_idx=7, mode=mode)
    optimizer, plain = DistributedOptimizer(sgd(layer)), sgd(reference)
    reference.weight.data = torch.from_numpy(rows_of(session, layer, range(8)))
    ids = torch.tensor([[1, 2, 7], [3, 3, 1], [7, 7, 7], [4, 7, 5]])
    factor = torch.arange(1.0, 13.0).reshape(4, 3)
    for module, update in ((layer, optimizer), (reference, plain)):
        (module(ids) * factor).sum().backward()
        update.step()
        update.zero_grad()
    after = rows_of(session, layer, range(7))
    np.testing.assert_allclose(after, numbers(reference.weight)[:7], rtol=1e-5, atol=1e-6)
    for offsets in ([0, 2, 5, 5], [0, 0, 7, 12]):
        flat = layer(ids.reshape(-1), torch.tensor(offsets))
        expected = reference(ids.reshape(-1), torch.tensor(offsets))
        np.testing.assert_allclose(numbers(flat), numbers(expected), rtol=1e-5, atol=1e-6)
    last = EmbeddingBag(
        8,
        3,
        7,
        mode=mode,  # type: ignore[arg-type]
        include_last_offset=True,
        name="x",
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
    reference = torch.nn.EmbeddingBag(8, 3, padding_idx=7, mode="sum")
    optimizer, plain = DistributedOptimizer(sgd(layer)), sgd(reference)
    reference.weight.data = torch.from_numpy(rows_of(session, layer, range(8)))
    ids = torch.tensor([[1, 2, 7], [3, 3, 1], [7, 7, 7], [4, 7, 5]])
    offsets = torch.tensor([0, 2, 5, 5]) if flat else None
    seen = []
    for module, update in ((layer, optimizer), (reference, plain)):
        shaped = ids.reshape(-1) if flat else ids
        weights = torch.linspace(0.5, 2.0, 12).reshape(shaped.shape).requires_grad_()
        output = module(shaped, offsets, weights)
        output.pow(2).sum().backward()
        update.step()
        seen.append((numbers(output), weights.grad.numpy()))
    for mine, theirs in zip(*seen, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    after = rows_of(session, layer, range(7))
    np.testing.assert_allclose(after, numbers(reference.weight)[:7], rtol=1e-5, atol=1e-6)


def test_weights_that_do_not_fit_are_refused(session: Session) -> None:
    layer = EmbeddingBag(None, 2, optimizer=tables.SGD(0.1))
    with pytest.raises(InvalidRequest, match="mode='sum'"):
        layer(torch.tensor([[1, 2]]), per_sample_weights=torch.ones(1, 2))
    summing = EmbeddingBag(None, 2, mode="sum", optimizer=tables.SGD(0.1))
    with pytest.raises(InvalidRequest, match=r"shape \(2,\), the ids \(1, 2\)"):
        summing(torch.tensor([[1, 2]]), per_sample_weights=torch.ones(2))


# torch.compile looks at .grad of what comes into a graph and hides the warning; not from pytest.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_model_trains_with_the_same_numbers(session: Session) -> None:
    """AOT autograd, without the code generator, which takes long; the graph breaks at the rows."""

    class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
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


def test_a_step_may_run_a_closure(session: Session) -> None:
    layer, dense = Embedding(None, 2), torch.nn.Linear(2, 1)
    optimizer = DistributedOptimizer(sgd(layer, dense, rate=0.01))
    rows = rows_of(session, layer, [1])

    def closure() -> Any:
        loss = layer(torch.tensor([1])).sum()
        loss.backward()
        return loss

    for _ in range(3):
        assert optimizer.step(closure).requires_grad
    np.testing.assert_allclose(rows_of(session, layer, [1]), rows - 0.03, rtol=1e-5)


def test_errors_say_what_to_do(session: Session) -> None:
    fresh = Embedding(None, 2, name="fresh")
    decayed = torch.optim.SGD(fresh.parameters(), 0.1, weight_decay=0.1)
    with pytest.raises(ConfigError, match="fresh' needs AdamW"):
        DistributedOptimizer(decayed)
    with pytest.raises(ConfigError, match="NAdam does not run"):
        DistributedOptimizer(torch.optim.NAdam(fresh.parameters()))
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
