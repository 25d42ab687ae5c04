"""Plain Paddle embeddings that move to the servers, stay, or are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

from backstay.errors import ConfigError
from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer.paddle import (
    DistributedOptimizer,
    Embedding,
    Session,
    init,
    swap_embeddings,
)

pytestmark = pytest.mark.paddle
nn = paddle.nn
# Bytes of a weight of 100 rows of 4.
LARGE = 100 * 4 * 4 - 1


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with LocalCluster(servers=1) as cluster, init(cluster.endpoints, job="swap") as opened:
        yield opened


class Model(nn.Layer):  # type: ignore[misc, name-defined]
    def __init__(self, **layers: Any) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)


def uniform(bound: float) -> Any:
    return paddle.ParamAttr(initializer=nn.initializer.Uniform(-bound, bound), learning_rate=0.5)


def test_large_and_sparse_ones_move_and_the_rest_stays(session: Session) -> None:
    paddle.seed(1)
    model = nn.Sequential(
        Model(
            large=nn.Embedding(100, 4, padding_idx=-1),
            wide=nn.Embedding(100, 4, weight_attr=uniform(3.0)),
            small=nn.Embedding(3, 4),
            sparse=nn.Embedding(3, 4, sparse=True),
            frozen=nn.Embedding(100, 4, weight_attr=paddle.ParamAttr(trainable=False)),
        ),
        nn.Linear(4, 1),
    )
    model[0].wide.eval()
    assert swap_embeddings(model, over_bytes=LARGE) == ["0.large", "0.wide", "0.sparse"]
    part = model[0]
    assert type(part.large) is Embedding
    assert part.large.padding_idx == 99
    assert part.wide.padding_idx is None
    assert part.large.training
    assert not part.wide.training
    assert type(part.small) is nn.Embedding
    assert type(part.frozen) is nn.Embedding
    assert swap_embeddings(model, over_bytes=LARGE) == []
    optimizer = DistributedOptimizer(paddle.optimizer.SGD(1.0, parameters=model.parameters()))
    assert optimizer.table_names[:3] == ("swap/0.large", "swap/0.wide", "swap/0.sparse")
    drawn = session.client.pull("swap/0.wide", np.arange(1000))
    assert 2.9 < abs(drawn).max() <= 3.0  # as the layer's own initializer says
    part.wide.train()
    part.wide(paddle.to_tensor([1])).sum().backward()
    optimizer.step()
    after = session.client.pull("swap/0.wide", np.arange(1000))
    np.testing.assert_allclose(after[1], drawn[1] - 0.5, rtol=1e-5)  # and its learning rate


def test_one_layer_in_two_places_stays_one(session: Session) -> None:
    shared = nn.Embedding(100, 4)
    model = Model(left=shared, right=nn.Sequential(shared))
    assert swap_embeddings(model, over_bytes=LARGE) == ["left"]
    assert type(model.left) is Embedding
    assert model.right[0] is model.left


def test_weights_set_by_hand_are_refused(session: Session) -> None:
    layer = nn.Embedding(100, 4)
    layer.weight.set_value(np.ones((100, 4), np.float32))
    model = Model(custom=layer)
    with pytest.raises(ConfigError, match=r"'custom' has 1600 bytes.*Xavier.*weight_attr"):
        swap_embeddings(model, over_bytes=LARGE)
    assert model.custom is layer
    assert swap_embeddings(model, over_bytes=LARGE + 1) == []


class Mine(nn.Embedding):  # type: ignore[misc, name-defined]
    pass


def hooked() -> Any:
    layer = nn.Embedding(100, 4)
    layer.register_forward_post_hook(lambda *_: None)
    return layer


def with_initializer(initializer: Any) -> Any:
    return nn.Embedding(100, 4, weight_attr=paddle.ParamAttr(initializer=initializer))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: with_initializer(nn.initializer.KaimingNormal()), "KaimingNormal"),
        (lambda: nn.Embedding(100, 4).to(dtype="float64"), "FLOAT64|float64"),
        (lambda: Mine(100, 4), "Mine may do more"),
        (hooked, "forward hooks"),
    ],
)
def test_what_the_servers_cannot_do_is_refused(session: Session, make: Any, why: str) -> None:
    sound = nn.Embedding(100, 4)
    model = Model(sound=sound, layer=make())
    with pytest.raises(ConfigError, match=f"'layer' has .*({why}).*raise over_bytes"):
        swap_embeddings(model, over_bytes=LARGE)
    assert model.sound is sound  # nothing is half done
    assert swap_embeddings(Model(layer=make()), over_bytes=1 << 20) == []


def test_a_tied_weight_and_a_bare_layer_are_refused(session: Session) -> None:
    model = Model(rows=nn.Embedding(100, 4), out=nn.Linear(4, 100))
    model.out.weight = model.rows.weight
    with pytest.raises(ConfigError, match=r"'rows'.*shared with a Linear"):
        swap_embeddings(model, over_bytes=LARGE)
    with pytest.raises(ConfigError, match="the model itself"):
        swap_embeddings(nn.Embedding(100, 4), over_bytes=LARGE)


def test_a_regularizer_is_refused_by_the_layers_name(session: Session) -> None:
    decay = paddle.ParamAttr(regularizer=paddle.regularizer.L2Decay(0.1))
    model = Model(rows=nn.Embedding(100, 4, weight_attr=decay))
    with pytest.raises(ConfigError, match=r"'rows' cannot move.*regularizer"):
        swap_embeddings(model, over_bytes=LARGE)
