"""Embeddings of each framework's own that move to the servers, stay, or are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from backstay import tables
from backstay.errors import ConfigError
from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer.adapter.session import Session, init, set_session_factory
from tests.frameworks import EACH, EACH_IN_SLOW, Kit, kit_of

# Bytes of a weight of 100 rows of 4.
LARGE = 100 * 4 * 4 - 1


@pytest.fixture(scope="module")
def session(one_server: LocalCluster) -> Iterator[Session]:
    with init(one_server.endpoints, job="swap") as opened:
        yield opened


def model_of(kit: Kit, **layers: Any) -> Any:
    model = kit.module()
    for name, layer in layers.items():
        setattr(model, name, layer)
    return model


def swapped(kit: Kit, model: Any, over_bytes: int = LARGE) -> Any:
    return kit.adapter.swap_embeddings(model, over_bytes=over_bytes)


def frozen(kit: Kit) -> Any:
    layer = kit.nn.Embedding(100, 4)
    kit.freeze(layer)
    return layer


def uniform(paddle: Any, bound: float, **settings: Any) -> Any:
    initializer = paddle.nn.initializer.Uniform(-bound, bound)
    return paddle.ParamAttr(initializer=initializer, **settings)


@EACH
def test_large_and_sparse_ones_move_and_the_rest_stays(kit: Kit, session: Session) -> None:
    nn, place = kit.nn, f"{kit.name}_part"
    part = model_of(
        kit,
        large=nn.Embedding(100, 4, padding_idx=-1),
        other=nn.Embedding(100, 4),
        small=nn.Embedding(3, 4),
        sparse=nn.Embedding(3, 4, sparse=True),
        frozen=frozen(kit),
    )
    part.other.eval()
    model = model_of(kit, **{place: part}, head=nn.Linear(4, 1))
    names = [f"{place}.{name}" for name in ("large", "other", "sparse")]
    assert swapped(kit, model) == names
    assert type(part.large) is type(part.sparse) is kit.adapter.Embedding
    assert part.large.padding_idx == 99
    assert part.other.padding_idx is None
    assert part.large.training
    assert not part.other.training
    assert type(part.small) is type(part.frozen) is nn.Embedding
    assert part.large.table_name == f"swap/{place}.large"
    assert swapped(kit, model) == []
    optimizer = kit.adapter.DistributedOptimizer(kit.sgd(model))
    assert optimizer.table_names[:3] == tuple(f"swap/{name}" for name in names)


def test_pytorchs_bags_move_and_its_rows_are_normal(session: Session) -> None:
    kit = kit_of("torch")
    bag = kit.nn.EmbeddingBag(100, 4, mode="sum", padding_idx=2, include_last_offset=True)
    model = model_of(kit, rows=kit.nn.Embedding(100, 4), bag=bag)
    assert swapped(kit, model) == ["rows", "bag"]
    assert type(model.bag) is kit.adapter.EmbeddingBag
    moved = model.bag
    assert (moved.mode, moved.padding_idx, moved.include_last_offset) == ("sum", 2, True)
    kit.adapter.DistributedOptimizer(kit.sgd(model))
    drawn = session.client.pull("swap/rows", np.arange(10_000)).reshape(-1)
    assert drawn.std() == pytest.approx(1.0, abs=0.02)


def test_paddles_weight_attr_holds_on_the_servers(session: Session) -> None:
    kit = kit_of("paddle")
    attributes = uniform(kit.library, 3.0, learning_rate=0.5)
    model = model_of(kit, wide=kit.nn.Embedding(100, 4, weight_attr=attributes))
    assert swapped(kit, model) == ["wide"]
    optimizer = kit.adapter.DistributedOptimizer(kit.sgd(model, rate=1.0))
    drawn = session.client.pull("swap/wide", np.arange(1000))
    assert 2.9 < abs(drawn).max() <= 3.0  # as the layer's own initializer says
    model.wide(kit.tensor([1])).sum().backward()
    optimizer.step()
    after = session.client.pull("swap/wide", np.arange(1000))
    np.testing.assert_allclose(after[1], drawn[1] - 0.5, rtol=1e-5)  # and its learning rate


@EACH_IN_SLOW
def test_nothing_to_move_needs_no_servers(kit: Kit, session: Session) -> None:
    def nobody() -> Session:
        raise AssertionError("a session was asked for")

    before = set_session_factory(nobody)
    try:
        assert swapped(kit, model_of(kit, small=kit.nn.Embedding(3, 4))) == []
    finally:
        set_session_factory(before)


@EACH
def test_one_layer_in_two_places_stays_one(kit: Kit, session: Session) -> None:
    shared = kit.nn.Embedding(100, 4)
    model = model_of(kit, left=shared, right=kit.nn.Sequential(shared))
    assert swapped(kit, model) == ["left"]
    assert type(model.left) is kit.adapter.Embedding
    assert model.right[0] is model.left


@EACH
def test_weights_set_by_hand_are_refused(kit: Kit, session: Session) -> None:
    layer = kit.nn.Embedding(100, 4)
    kit.set_weight(layer.weight, np.ones((100, 4)))
    model = model_of(kit, custom=layer)
    advice = {"torch": r"Normal\(0, 1\).*server_init", "paddle": "Xavier.*weight_attr"}
    with pytest.raises(ConfigError, match=rf"'custom' has 1600 bytes.*{advice[kit.name]}"):
        swapped(kit, model)
    assert model.custom is layer
    assert swapped(kit, model, LARGE + 1) == []


def test_another_distribution_is_said_to_pytorch(session: Session) -> None:
    kit = kit_of("torch")
    layer = kit.nn.Embedding(100, 4)
    kit.nn.init.uniform_(layer.weight, -0.5, 0.5)
    layer.server_initializer = tables.Constant(0.25)
    model = model_of(kit, said=layer)
    assert swapped(kit, model) == ["said"]
    kit.adapter.DistributedOptimizer(kit.sgd(model))
    assert (kit.numbers(model.said([5])) == 0.25).all()


def subclassed(kit: Kit) -> Any:
    return type("Mine", (kit.nn.Embedding,), {})(100, 4)


def hooked(kit: Kit) -> Any:
    layer = kit.nn.Embedding(100, 4)
    layer.register_forward_pre_hook(lambda *_: None)
    return layer


def kaiming(kit: Kit) -> Any:
    attributes = kit.library.ParamAttr(initializer=kit.nn.initializer.KaimingNormal())
    return kit.nn.Embedding(100, 4, weight_attr=attributes)


@pytest.mark.parametrize(
    ("framework", "make", "why"),
    [
        ("torch", lambda kit: kit.nn.Embedding(100, 4, max_norm=1.0), "max_norm"),
        ("torch", lambda kit: kit.nn.Embedding(100, 4, scale_grad_by_freq=True), "scale_grad_by"),
        ("torch", lambda kit: kit.nn.EmbeddingBag(100, 4, mode="max"), "mode='max'"),
        ("torch", lambda kit: kit.nn.Embedding(100, 4).double(), "float64"),
        ("torch", subclassed, "Mine may do more"),
        ("torch", hooked, "forward hooks"),
        ("paddle", kaiming, "KaimingNormal"),
        ("paddle", lambda kit: kit.nn.Embedding(100, 4).to(dtype="float64"), "FLOAT64|float64"),
        ("paddle", subclassed, "Mine may do more"),
        ("paddle", hooked, "forward hooks"),
    ],
)
def test_what_the_servers_cannot_do_is_refused(
    session: Session, framework: str, make: Any, why: str
) -> None:
    kit = kit_of(framework)
    sound = kit.nn.Embedding(100, 4)
    model = model_of(kit, sound=sound, layer=make(kit))
    with pytest.raises(ConfigError, match=f"'layer' has .*({why}).*raise over_bytes"):
        swapped(kit, model)
    assert model.sound is sound  # nothing is half done
    assert swapped(kit, model_of(kit, layer=make(kit)), 1 << 20) == []


@EACH
def test_a_tied_weight_and_a_bare_layer_are_refused(kit: Kit, session: Session) -> None:
    model = model_of(kit, rows=kit.nn.Embedding(100, 4), out=kit.nn.Linear(4, 100))
    model.out.weight = model.rows.weight
    with pytest.raises(ConfigError, match=r"'rows'.*shared with a Linear"):
        swapped(kit, model)
    with pytest.raises(ConfigError, match="the model itself"):
        swapped(kit, kit.nn.Embedding(100, 4))


@EACH_IN_SLOW
def test_a_layer_that_cannot_be_made_is_named(kit: Kit, session: Session) -> None:
    path, attributes, why = "the users", {}, ""  # no table can have this name
    if kit.name == "paddle":
        path, why = "rows", ".*regularizer"
        decay = kit.library.regularizer.L2Decay(0.1)
        attributes = {"weight_attr": kit.library.ParamAttr(regularizer=decay)}
    model = kit.nn.Sequential()
    add = model.add_module if kit.name == "torch" else model.add_sublayer
    add(path, kit.nn.Embedding(100, 4, **attributes))
    with pytest.raises(ConfigError, match=f"{path!r} cannot move to the servers{why}"):
        swapped(kit, model)
