"""Paddle adapter: train a dygraph model of paddlepaddle 3.x on a backstay cluster.

::

    with backstay.trainer.paddle.init() as session:          # servers and role from PADDLE_* names
        model = Model(Embedding(None, 16, name="ads"), ...)  # instead of paddle.nn.Embedding
        optimizer = DistributedOptimizer(
            paddle.optimizer.Adam(parameters=model.parameters()), session.client
        )
        ...                                                  # the loop stays as it is

Only this package imports paddle, and it imports nothing of the servers.
"""

from backstay.trainer.adapter.session import (
    Session,
    TrainerEnvironment,
    current_session,
    init,
    set_session_factory,
)
from backstay.trainer.adapter.swapping import Swapper
from backstay.trainer.paddle.framework import FRAMEWORK
from backstay.trainer.paddle.layers import Embedding, EmbeddingBag
from backstay.trainer.paddle.optimizer import DistributedOptimizer

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
