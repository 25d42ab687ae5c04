"""What a push does to a row, on the servers: settings and sources of each optimizer.

``w`` is a weight, ``g`` its gradient. Every optimizer keeps its state per row and changes only
rows that are pushed. The rules of each, and the words of state of a row, are those of the file of
its name in crates/backstay-core/src/optimizer. Imports ``backstay.tables.part`` only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from backstay.tables.part import Part

__all__ = [
    "FTRL",
    "SGD",
    "AMSGrad",
    "Adadelta",
    "Adagrad",
    "AdagradDecay",
    "Adam",
    "AdamW",
    "Adamax",
    "GroupFTRL",
    "Momentum",
    "Optimizer",
    "RMSProp",
    "RowWiseAdagrad",
    "Steps",
]

Steps: TypeAlias = Literal["row", "global"]


class Optimizer(Part, at="optimizer"):
    """Base of what a push does to a row, on the servers."""

    def correction(self, step: int) -> float:
        """Return what a trainer multiplies its learning rate by at its step, from 1.

        Other than 1 with ``steps="global"`` only: the servers leave the bias correction to the
        trainer.
        """
        return 1.0


@dataclass(frozen=True)
class SGD(Optimizer, name="sgd"):
    """Gradient descent: ``w -= learning_rate * g``. No state."""

    learning_rate: float = 0.01


@dataclass(frozen=True)
class Momentum(Optimizer, name="momentum"):
    """Gradient descent with momentum: ``v = momentum * v + g; w -= learning_rate * v``.

    With ``nesterov``: ``w -= learning_rate * (g + momentum * v)``. One word of state per weight.

    Source: I. Sutskever et al., "On the importance of initialization and momentum in deep
    learning", ICML 2013, section 2, in the form of Paddle and PyTorch.
    """

    learning_rate: float
    momentum: float = 0.9
    nesterov: bool = False


@dataclass(frozen=True)
class Adagrad(Optimizer, name="adagrad"):
    """``a += g * g; w -= learning_rate * g / (sqrt(a) + epsilon)``; ``a`` is the state.

    Source: J. Duchi, E. Hazan and Y. Singer, "Adaptive subgradient methods for online learning
    and stochastic optimization", JMLR 12 (2011), figure 1. Default epsilon as in PyTorch;
    Paddle's is 1e-6.
    """

    learning_rate: float
    epsilon: float = 1e-10
    initial_accumulator: float = 0.0


@dataclass(frozen=True)
class Adam(Optimizer, name="adam"):
    """Adam, lazy: only rows that are pushed change.

    ``steps="row"``: the bias correction counts the row's own updates. ``steps="global"``: it counts
    the trainer's steps, as PyTorch's ``SparseAdam`` and Paddle's ``lazy_mode=True`` do, so rows
    first seen late get a first step some 3 times larger; epsilon is then added to the uncorrected
    root, as in ``SparseAdam``. State: two words per weight, and one.

    Source: D. Kingma and J. Ba, "Adam: a method for stochastic optimization", ICLR 2015,
    algorithm 1; epsilon is added to the root of the corrected mean square, as in Paddle and
    PyTorch (TensorFlow adds it to the uncorrected one: the paper's "epsilon hat").
    """

    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    steps: Steps = field(default="row", kw_only=True)

    def correction(self, step: int) -> float:
        """Return the factor of the learning rate that the trainer's step gives, from step 1."""
        if self.steps == "row":
            return 1.0
        return math.sqrt(1.0 - self.beta2**step) / (1.0 - self.beta1**step)


@dataclass(frozen=True)
class AdamW(Adam, name="adamw"):
    """``w *= 1 - learning_rate * weight_decay``, then a step of :class:`Adam`.

    Rows that are not pushed do not decay. With ``steps="global"`` the decay follows the correction
    by the trainer's step too.

    Source: I. Loshchilov and F. Hutter, "Decoupled weight decay regularization", ICLR 2019,
    algorithm 2, in the form of Paddle and PyTorch.
    """

    weight_decay: float = 0.01


@dataclass(frozen=True)
class RMSProp(Optimizer, name="rmsprop"):
    """Divide the gradient by a running root mean square, or deviation if ``centered``.

    ``epsilon_inside_sqrt=False`` divides by ``sqrt(x) + epsilon`` as PyTorch does, True by
    ``sqrt(x + epsilon)`` as Paddle does. The learning rate multiplies the momentum's sum as in
    PyTorch; Paddle has it inside, which differs only while the learning rate changes.
    State: one word per weight, one more if centred, one more with momentum.

    Source: T. Tieleman and G. Hinton, "Lecture 6.5: RMSProp", COURSERA 2012; centred form:
    A. Graves, arXiv:1308.0850, equations 38 to 45.
    """

    learning_rate: float = 0.01
    rho: float = 0.99
    epsilon: float = 1e-8
    momentum: float = 0.0
    centered: bool = False
    epsilon_inside_sqrt: bool = False


@dataclass(frozen=True)
class FTRL(Optimizer, name="ftrl"):
    """FTRL-Proximal: ``l1`` makes weights of little use exactly 0.

    The weights follow from the state alone: use it with :class:`Zeros`. ``l2`` is the paper's;
    TensorFlow's and Paddle's is half of it. State: two words per weight.

    Source: H. B. McMahan et al., "Ad click prediction: a view from the trenches", KDD 2013,
    algorithm 1.
    """

    learning_rate: float
    l1: float = 0.0
    l2: float = 0.0
    learning_rate_power: float = -0.5
    initial_accumulator: float = 0.1


@dataclass(frozen=True)
class RowWiseAdagrad(Optimizer, name="rowwiseadagrad"):
    """Adagrad with one accumulator for a row: ``a += mean(g * g)``.

    ``w -= learning_rate * g / (sqrt(a) + epsilon)``. One word of state per row.

    Source: FBGEMM's exact row-wise Adagrad, which TorchRec uses (D. Mudigere et al.,
    "Software-hardware co-design for fast and scalable training of deep learning recommendation
    models", ISCA 2022).
    """

    learning_rate: float
    epsilon: float = 1e-8
    initial_accumulator: float = 0.0


@dataclass(frozen=True)
class Adadelta(Optimizer, name="adadelta"):
    """Steps of the size of the steps before, over that of the gradients.

    Defaults as in PyTorch; Paddle's are 0.001, 0.95 and 1e-6. Two words of state per weight.

    Source: M. Zeiler, "ADADELTA: an adaptive learning rate method", arXiv:1212.5701, algorithm 1.
    """

    learning_rate: float = 1.0
    rho: float = 0.9
    epsilon: float = 1e-6


@dataclass(frozen=True)
class Adamax(Optimizer, name="adamax"):
    """Adam with the largest gradient in place of the mean square; lazy, as :class:`Adam`.

    ``epsilon_on_maximum=False`` adds epsilon to the gradient's magnitude as PyTorch does, True to
    the decayed maximum as Paddle does. State: two words per weight, and one.

    Source: D. Kingma and J. Ba, "Adam: a method for stochastic optimization", ICLR 2015,
    algorithm 2.
    """

    learning_rate: float = 0.002
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    steps: Steps = field(default="row", kw_only=True)
    epsilon_on_maximum: bool = field(default=False, kw_only=True)

    def correction(self, step: int) -> float:
        """Return the factor of the learning rate that the trainer's step gives, from step 1."""
        return 1.0 if self.steps == "row" else 1.0 / (1.0 - self.beta1**step)


@dataclass(frozen=True)
class AMSGrad(Adam, name="amsgrad"):
    """Adam with the largest mean square so far; with ``weight_decay`` that of :class:`AdamW`.

    State: three words per weight, and one.

    Source: S. Reddi, S. Kale and S. Kumar, "On the convergence of Adam and beyond", ICLR 2018,
    algorithm 2, in the form of Paddle's and PyTorch's ``amsgrad=True``.
    """

    weight_decay: float = 0.0


@dataclass(frozen=True)
class AdagradDecay(Optimizer, name="adagraddecay"):
    """Adagrad that forgets: ``a = max(decay * a, initial_accumulator) + g * g``.

    At each update of the row. One word of state per weight.

    Source: DeepRec's AdagradDecay, which decays at each so many global steps; Paddle's
    ``decayed_adagrad`` has ``(1 - decay) * g * g``.
    """

    learning_rate: float
    decay: float = 0.9999
    epsilon: float = 1e-10
    initial_accumulator: float = 0.1


@dataclass(frozen=True)
class GroupFTRL(Optimizer, name="groupftrl"):
    """FTRL-Proximal with a group lasso: ``l21`` makes whole rows of little use exactly 0.

    The weights follow from the state alone: use it with :class:`Zeros`. State: two words per
    weight.

    Source: H. Yang et al., "Online learning for group lasso", ICML 2010, with the step sizes of
    :class:`FTRL`, as in X. Ni et al., CIKM 2019, and Y. Yue et al., arXiv:2107.14432.
    """

    learning_rate: float
    l1: float = 0.0
    l2: float = 0.0
    l21: float = 0.0
    initial_accumulator: float = 0.1
