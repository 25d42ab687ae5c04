"""One server and one trainer give the loss curve of the framework alone on one machine."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import Uniform
from backstay.trainer.adapter.session import init
from tests.frameworks import EACH, Kit, kit_of

IDS, FIELDS, BATCH, STEPS = 96, 6, 32, 60
# Both sides compute in float32, but may add in another order.
RELATIVE_TOLERANCE = 1e-5
CLIPPED_TOLERANCE = 1e-6

clips = itertools.count()
Make = Callable[[Any, Any], Any]

# An optimizer of ``torch.optim`` and ``paddle.optimizer``: (that, parameters) -> it. Rows without a
# gradient stay as they are under these, in the framework alone too.
OPTIMIZERS: dict[str, dict[str, Make]] = {
    "torch": {
        "sgd": lambda of, p: of.SGD(p, 2.0),
        "sgd_decayed_layers": lambda of, p: of.SGD(
            [{"params": p[:1]}, {"params": p[1:], "weight_decay": 0.001}], 2.0
        ),
        "adagrad": lambda of, p: of.Adagrad(p, 0.1),
    },
    "paddle": {
        "sgd": lambda of, p: of.SGD(0.3, parameters=p),
        "sgd_scheduled": lambda of, p: of.SGD(
            of.lr.ExponentialDecay(0.3, gamma=0.97), parameters=p
        ),
        "adagrad": lambda of, p: of.Adagrad(0.1, parameters=p),
    },
}
# Under these the framework alone moves every row in every step, the servers only those of the
# batch: equal where each batch has every row.
EVERY_ROW: dict[str, dict[str, Make]] = {
    "torch": {
        "momentum": lambda of, p: of.SGD(p, 0.2, momentum=0.9),
        "nesterov": lambda of, p: of.SGD(p, 0.2, momentum=0.9, nesterov=True),
        "adadelta": lambda of, p: of.Adadelta(p, 1.0),
        "adam": lambda of, p: of.Adam(p, 0.01),
        "adamax": lambda of, p: of.Adamax(p, 0.01),
        "amsgrad": lambda of, p: of.Adam(p, 0.01, amsgrad=True),
        "adamw": lambda of, p: of.AdamW(p, 0.01, weight_decay=0.1),
        "rmsprop": lambda of, p: of.RMSprop(p, 0.005),
        "rmsprop_centered": lambda of, p: of.RMSprop(p, 0.005, momentum=0.5, centered=True),
    },
    "paddle": {
        "momentum": lambda of, p: of.Momentum(0.05, 0.9, parameters=p),
        "adadelta": lambda of, p: of.Adadelta(1.0, epsilon=1e-3, parameters=p),
        "adam": lambda of, p: of.Adam(0.01, parameters=p),
        "adamax": lambda of, p: of.Adamax(0.01, parameters=p),
        "amsgrad": lambda of, p: of.Adam(0.01, amsgrad=True, parameters=p),
        "adamw": lambda of, p: of.AdamW(0.01, weight_decay=0.1, parameters=p),
        "rmsprop": lambda of, p: of.RMSProp(0.005, parameters=p),
    },
}
# PyTorch's schedulers are made of an optimizer, Paddle's are in it.
SCHEDULERS: dict[str, Callable[[Any, Any], Any]] = {
    "sgd": lambda lr, o: lr.ExponentialLR(o, gamma=0.99),
    "adam": lambda lr, o: lr.OneCycleLR(o, 0.02, total_steps=STEPS, cycle_momentum=False),
    "adamw": lambda lr, o: lr.CosineAnnealingLR(o, STEPS),
}
CLIPS: dict[str, dict[str, Any]] = {
    "torch": {
        "global_norm": lambda nn, p: nn.utils.clip_grad_norm_(p, 0.05),
        "largest": lambda nn, p: nn.utils.clip_grad_norm_(p, 0.01, norm_type=float("inf")),
        "norm": lambda nn, p: [nn.utils.clip_grad_norm_([one], 0.02) for one in p],
        "value": lambda nn, p: nn.utils.clip_grad_value_(p, 0.002),
    },
    "paddle": {
        "global_norm": lambda nn: nn.ClipGradByGlobalNorm(0.05),
        "norm": lambda nn: nn.ClipGradByNorm(0.02),
        "value": lambda nn: nn.ClipGradByValue(0.002),
    },
}


def rows_layer(kit: Kit, **settings: Any) -> Any:
    """Return an embedding with rows on the servers."""
    if kit.name == "torch":  # sixty steps are few from its default, Normal(0, 1)
        settings["initializer"] = Uniform(-0.25, 0.25)
    return kit.adapter.Embedding(IDS, 8, name="rows", **settings)


def model_of(kit: Kit, embedding: Any) -> Any:
    nn = kit.nn
    kit.library.manual_seed(11) if kit.name == "torch" else kit.library.seed(11)
    model = kit.module()
    model.embedding = embedding
    model.network = nn.Sequential(nn.Linear(FIELDS * 8, 16), nn.Tanh(), nn.Linear(16, 1))
    model.forward = lambda ids: model.network(model.embedding(ids).flatten(1)).squeeze(1)
    return model


def reference_of(kit: Kit, model: Any, session: Any, **settings: Any) -> Any:
    """Return the same model with an embedding of the framework's own, of equal rows."""
    reference = model_of(kit, kit.nn.Embedding(IDS, 8, **settings))
    rows = session.client.pull(model.embedding.table_name, np.arange(IDS))
    kit.set_weight(reference.embedding.weight, rows)
    own = dict(reference.network.named_parameters())
    for name, parameter in model.network.named_parameters():
        kit.set_weight(own[name], kit.numbers(parameter))
    return reference


def loss_curve(
    kit: Kit,
    model: Any,
    optimizer: Any,
    *,
    scheduler: Any = None,
    every_row: bool = False,
    before_step: Callable[[], None] = lambda: None,
) -> list[float]:
    generator = np.random.default_rng(3)
    hidden = generator.normal(size=IDS)
    losses = []
    for _ in range(STEPS):
        ids = generator.integers(0, IDS, (BATCH, FIELDS))
        if every_row:
            ids = generator.permutation(np.arange(BATCH * FIELDS) % IDS).reshape(BATCH, FIELDS)
        labels = (hidden[ids].sum(axis=1) > 0).astype(np.float32)
        loss = kit.nn.functional.binary_cross_entropy_with_logits(
            model(kit.tensor(ids)), kit.tensor(labels)
        )
        loss.backward()
        before_step()
        optimizer.step()
        kit.clear(optimizer)
        if scheduler is not None:
            scheduler.step()
        losses.append(float(loss.detach()))
    return losses


def of(kit: Kit) -> Any:
    return kit.library.optim if kit.name == "torch" else kit.library.optimizer


def scheduler_of(kit: Kit, name: str, optimizer: Any, inner: Any) -> Any:
    if kit.name == "torch":
        make = SCHEDULERS.get(name)
        return None if make is None else make(of(kit).lr_scheduler, optimizer)
    rate = inner._learning_rate
    return rate if isinstance(rate, of(kit).lr.LRScheduler) else None


def assert_same(here: list[float], plain: list[float]) -> None:
    assert np.mean(plain[-10:]) < 0.97 * np.mean(plain[:10])  # it did learn
    np.testing.assert_allclose(here, plain, rtol=RELATIVE_TOLERANCE)


@pytest.mark.parametrize(
    ("framework", "name"),
    [
        (framework, name)
        for framework in OPTIMIZERS
        for name in sorted({**OPTIMIZERS[framework], **EVERY_ROW[framework]})
    ],
)
def test_same_loss_curve(one_server: LocalCluster, framework: str, name: str) -> None:
    kit = kit_of(framework)
    every_row = name in EVERY_ROW[framework]
    make = {**OPTIMIZERS[framework], **EVERY_ROW[framework]}[name]
    with init(
        one_server.endpoints, job=name if framework == "paddle" else f"torch_{name}"
    ) as session:
        model = model_of(kit, rows_layer(kit))
        inner = make(of(kit), list(model.parameters()))
        optimizer = kit.adapter.DistributedOptimizer(inner)
        reference = reference_of(kit, model, session)
        single = make(of(kit), list(reference.parameters()))
        curves = [
            loss_curve(
                kit, trained, update, every_row=every_row,
                scheduler=scheduler_of(kit, name, update, unwrapped),
            )
            for trained, update, unwrapped in (
                (model, optimizer, inner), (reference, single, single)
            )
        ]  # fmt: skip
    assert_same(*curves)


class Both:
    """Two optimizers of one model, as PyTorch's users have them with sparse embeddings."""

    def __init__(self, *optimizers: Any) -> None:
        self.optimizers = optimizers

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


@pytest.mark.torch
def test_same_loss_curve_as_sparse_adam(one_server: LocalCluster) -> None:
    """Both count the trainer's steps, and a batch has some of the rows only."""
    kit = kit_of("torch")
    wrap = kit.adapter.DistributedOptimizer
    with init(one_server.endpoints, job="sparse") as session:
        model = model_of(kit, rows_layer(kit))
        rows = wrap(of(kit).SparseAdam(model.embedding.parameters(), 0.01))
        layers = wrap(of(kit).Adam(model.network.parameters(), 0.01))
        reference = reference_of(kit, model, session, sparse=True)
        plain_rows = of(kit).SparseAdam(reference.embedding.parameters(), 0.01)
        plain_layers = of(kit).Adam(reference.network.parameters(), 0.01)
        here = loss_curve(kit, model, Both(rows, layers))
        plain = loss_curve(kit, reference, Both(plain_rows, plain_layers))
    assert_same(here, plain)


@pytest.mark.paddle
def test_same_loss_curve_as_lazy_adam(one_server: LocalCluster) -> None:
    """Both count the trainer's steps, and a batch has some of the rows only."""
    kit = kit_of("paddle")

    def lazy_adam(model: Any) -> Any:
        # Paddle corrects epsilon by the step, too: equal where it is next to nothing.
        settings = {"epsilon": 1e-14, "lazy_mode": True}
        return of(kit).Adam(0.01, parameters=model.parameters(), **settings)

    with init(one_server.endpoints, job="lazy") as session:
        model = model_of(kit, rows_layer(kit))
        optimizer = kit.adapter.DistributedOptimizer(lazy_adam(model))
        reference = reference_of(kit, model, session, sparse=True)
        # For sparse gradients Paddle counts from 2.
        session.client.push_steps.done = 1
        plain = loss_curve(kit, reference, lazy_adam(reference))
        here = loss_curve(kit, model, optimizer)
    np.testing.assert_allclose(here, plain, rtol=RELATIVE_TOLERANCE)


@EACH
def test_a_swapped_model_is_the_same_model(one_server: LocalCluster, kit: Kit) -> None:
    """What ``swap_embeddings`` makes of a plain file trains as the plain file does."""
    make = OPTIMIZERS[kit.name]["adagrad"]
    with init(one_server.endpoints, job=f"swapped_{kit.name}") as session:
        model = model_of(kit, kit.nn.Embedding(IDS, 8, sparse=True))
        assert kit.adapter.swap_embeddings(model, over_bytes=1 << 30) == ["embedding"]
        inner = make(of(kit), list(model.parameters()))
        optimizer = kit.adapter.DistributedOptimizer(inner)
        reference = reference_of(kit, model, session)
        single = make(of(kit), list(reference.parameters()))
        plain = loss_curve(kit, reference, single)
        here = loss_curve(kit, model, optimizer)
    assert_same(here, plain)


# -- clipping: dense and sparse gradients of a batch together, equal ids merged before ----------


def clipped_sgd(kit: Kit, model: Any, clip: Any = None) -> Any:
    if kit.name == "torch":
        return kit.sgd(model, rate=2.0)
    return kit.sgd(model, rate=0.3, grad_clip=clip)


def check_clipping(
    one_server: LocalCluster,
    kit: Kit,
    clip: Any = None,
    in_loop: Any = None,
    attributes: Any = None,
    **settings: Any,
) -> None:
    """Compare curves and rows under clipping by the optimizer, or by the loop."""
    attributes = attributes or {}

    def curve(model: Any, optimizer: Any) -> list[float]:
        def clip_now() -> None:
            if in_loop is not None:
                in_loop(kit.nn, list(model.parameters()))

        return loss_curve(kit, model, optimizer, before_step=clip_now)

    made = None if clip is None else clip(kit.nn)
    with init(one_server.endpoints, job=f"clip{next(clips)}") as session:
        model = model_of(kit, rows_layer(kit, **attributes))
        optimizer = kit.adapter.DistributedOptimizer(clipped_sgd(kit, model, made))
        reference, unclipped = (
            reference_of(kit, model, session, **attributes, **settings) for _ in range(2)
        )
        plain = curve(reference, clipped_sgd(kit, reference, made))
        free = loss_curve(kit, unclipped, clipped_sgd(kit, unclipped))
        here = curve(model, optimizer)
        rows = session.client.pull(model.embedding.table_name, np.arange(IDS))
    assert np.max(np.abs(np.subtract(plain, free))) > 1e-3  # the limit is reached
    np.testing.assert_allclose(here, plain, rtol=CLIPPED_TOLERANCE)
    weights = kit.numbers(reference.embedding.weight)
    np.testing.assert_allclose(rows, weights, atol=CLIPPED_TOLERANCE)


@pytest.mark.torch
@pytest.mark.parametrize("name", CLIPS["torch"])
def test_clipped_gradients_are_those_of_plain_torch(one_server: LocalCluster, name: str) -> None:
    check_clipping(one_server, kit_of("torch"), in_loop=CLIPS["torch"][name])


# Paddle itself does not clip sparse gradients by value.
PADDLES = [(name, sparse) for name in CLIPS["paddle"] for sparse in (False, True)]


@pytest.mark.paddle
@pytest.mark.parametrize(("name", "sparse"), [one for one in PADDLES if one != ("value", True)])
def test_clipped_gradients_are_those_of_plain_paddle(
    one_server: LocalCluster, name: str, sparse: bool
) -> None:
    check_clipping(one_server, kit_of("paddle"), CLIPS["paddle"][name], sparse=sparse)


@pytest.mark.paddle
def test_what_asks_for_no_clipping_is_not_clipped(one_server: LocalCluster) -> None:
    """``need_clip`` of a parameter is Paddle's, rows on the servers included."""
    kit = kit_of("paddle")
    attributes = {"weight_attr": kit.library.ParamAttr(need_clip=False)}
    check_clipping(one_server, kit, CLIPS["paddle"]["global_norm"], attributes=attributes)


@pytest.mark.paddle
def test_gradients_clipped_in_the_loop_are_those_of_plain_paddle(one_server: LocalCluster) -> None:
    check_clipping(one_server, kit_of("paddle"), in_loop=CLIPS["torch"]["global_norm"])


@pytest.mark.slow
@pytest.mark.torch
# torch.compile looks at .grad of what comes into a graph and hides the warning; not from pytest.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_model_has_the_same_loss_curve(one_server: LocalCluster) -> None:
    """With PyTorch's code generator, as a user has it."""
    kit = kit_of("torch")
    with init(one_server.endpoints, job="compiled") as session:
        model = model_of(kit, rows_layer(kit))
        optimizer = kit.adapter.DistributedOptimizer(of(kit).Adagrad(model.parameters(), 0.1))
        reference = reference_of(kit, model, session)
        plain = loss_curve(kit, reference, of(kit).Adagrad(reference.parameters(), 0.1))
        here = loss_curve(kit, kit.library.compile(model), optimizer)
    assert_same(here, plain)
