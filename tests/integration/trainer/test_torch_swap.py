"""Plain PyTorch embeddings that move to the servers, stay, or are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from backstay import tables
from backstay.errors import ConfigError
from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer.torch import (
    DistributedOptimizer,
    Embedding,
    EmbeddingBag,
    Session,
    init,
    set_session_factory,
    swap_embeddings,
)

pytestmark = pytest.mark.torch
nn = torch.nn
# Bytes of a weight of 100 rows of 4.
LARGE = 100 * 4 * 4 - 1


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with LocalCluster(servers=1) as cluster, init(cluster.endpoints, job="swap") as opened:
        yield opened


class Model(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, **layers: Any) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)


def test_large_and_sparse_ones_move_and_the_rest_stays(session: Session) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(
        Model(
            large=nn.Embedding(100, 4, padding_idx=-1),
            small=nn.Embedding(3, 4),
            sparse=nn.Embedding(3, 4, sparse=True),
            bag=nn.EmbeddingBag(100, 4, mode="sum", padding_idx=2, include_last_offset=True),
            frozen=nn.Embedding.from_pretrained(torch.zeros(100, 4)),
        ),
        nn.Linear(4, 1),
    )
    model[0].bag.eval()
    assert swap_embeddings(model, over_bytes=LARGE) == ["0.large", "0.sparse", "0.bag"]
    part = model[0]
    assert type(part.large) is Embedding
    assert part.large.padding_idx == 99
    assert type(part.sparse) is Embedding
    assert type(part.bag) is EmbeddingBag
    assert (part.bag.mode, part.bag.padding_idx, part.bag.include_last_offset) == ("sum", 2, True)
    assert part.large.training
    assert not part.bag.training
    assert type(part.small) is nn.Embedding
    assert type(part.frozen) is nn.Embedding
    assert part.large.table_name == "swap/0.large"
    assert swap_embeddings(model, over_bytes=LARGE) == []
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.5))
    assert optimizer.table_names[:3] == ("swap/0.large", "swap/0.sparse", "swap/0.bag")
    drawn = session.client.pull("swap/0.large", np.arange(10_000)).reshape(-1)
    assert drawn.std() == pytest.approx(1.0, abs=0.02)  # as PyTorch draws them


def test_nothing_to_move_needs_no_servers(session: Session) -> None:
    def nobody() -> Session:
        raise AssertionError("a session was asked for")

    before = set_session_factory(nobody)
    try:
        assert swap_embeddings(nn.Sequential(nn.Embedding(3, 4)), over_bytes=LARGE) == []
    finally:
        set_session_factory(before)


def test_one_layer_in_two_places_stays_one(session: Session) -> None:
    shared = nn.Embedding(100, 4)
    model = Model(left=shared, right=nn.Sequential(shared))
    assert swap_embeddings(model, over_bytes=LARGE) == ["left"]
    assert type(model.left) is Embedding
    assert model.right[0] is model.left


def test_another_distribution_is_said(session: Session) -> None:
    layer = nn.Embedding(100, 4)
    nn.init.uniform_(layer.weight, -0.5, 0.5)
    model = Model(custom=layer)
    with pytest.raises(ConfigError, match=r"'custom' has 1600 bytes.*Normal\(0, 1\).*server_init"):
        swap_embeddings(model, over_bytes=LARGE)
    assert model.custom is layer
    assert swap_embeddings(model, over_bytes=LARGE + 1) == []
    layer.server_initializer = tables.Constant(0.25)
    assert swap_embeddings(model, over_bytes=LARGE) == ["custom"]
    DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.5))
    assert (model.custom([5]).detach().numpy() == 0.25).all()


class Mine(nn.Embedding):  # type: ignore[misc, name-defined]
    pass


def hooked() -> Any:
    layer = nn.Embedding(100, 4)
    layer.register_forward_hook(lambda *_: None)
    return layer


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: nn.Embedding(100, 4, max_norm=1.0), "max_norm"),
        (lambda: nn.Embedding(100, 4, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (lambda: nn.EmbeddingBag(100, 4, mode="max"), "mode='max'"),
        (lambda: nn.Embedding(100, 4).double(), "float64"),
        (lambda: Mine(100, 4), "Mine may do more"),
        (hooked, "forward hooks"),
    ],
)
def test_what_the_servers_cannot_do_is_refused(session: Session, make: Any, why: str) -> None:
    sound = nn.Embedding(100, 4)
    model = Model(sound=sound, layer=make())
    with pytest.raises(ConfigError, match=f"'layer' has .*{why}.*raise over_bytes"):
        swap_embeddings(model, over_bytes=LARGE)
    assert model.sound is sound  # nothing is half done
    assert swap_embeddings(Model(layer=make()), over_bytes=1 << 20) == []


def test_a_tied_weight_and_a_bare_layer_are_refused(session: Session) -> None:
    model = Model(rows=nn.Embedding(100, 4), out=nn.Linear(4, 100, bias=False))
    model.out.weight = model.rows.weight
    with pytest.raises(ConfigError, match=r"'rows'.*shared with a Linear"):
        swap_embeddings(model, over_bytes=LARGE)
    with pytest.raises(ConfigError, match="the model itself"):
        swap_embeddings(nn.Embedding(100, 4), over_bytes=LARGE)


def test_a_name_that_no_table_can_have_is_named(session: Session) -> None:
    model = nn.ModuleDict({"the users": nn.Embedding(100, 4)})
    with pytest.raises(ConfigError, match="'the users' cannot move to the servers"):
        swap_embeddings(model, over_bytes=LARGE)
