"""PyTorch adapter: train a plain PyTorch model on a backstay cluster.

::

    with backstay.trainer.torch.init() as session:           # servers and role from the environment
        model = Model(Embedding(None, 16, name="ads"), ...)  # instead of torch.nn.Embedding
        optimizer = DistributedOptimizer(
            torch.optim.Adam(model.parameters()), session.client
        )
        ...                                                  # the loop stays as it is

Only this package imports torch, and it imports nothing of the servers.
"""

from backstay.trainer.adapter.session import (
    Session,
    TrainerEnvironment,
    current_session,
    init,
    set_session_factory,
)
from backstay.trainer.adapter.swapping import Swapper
from backstay.trainer.torch.framework import FRAMEWORK
from backstay.trainer.torch.layers import Embedding, EmbeddingBag
from backstay.trainer.torch.optimizer import DistributedOptimizer

__all__ = [
    "DistributedOptimizer",
    "Embedding",
    "EmbeddingBag",
    "Session",
    "TrainerEnvironment",
    "current_session",
    "init",
    "set_session_factory",
    "swap_embeddings",
]

swap_embeddings = Swapper(FRAMEWORK).swap_embeddings
