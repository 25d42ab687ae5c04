"""What a push does to a row, on the servers: settings and sources of each optimizer.

``w`` is a weight, ``g`` its gradient. Every optimizer keeps its state per row and changes only
rows that are pushed. CONTRIBUTING.md, Recipes, lists every place of a new optimizer. Imports
``backstay.tables.checks`` and ``backstay.tables.user``, the users' own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from backstay.tables.checks import MIN_EPSILON, check_flag, check_fraction, check_number
from backstay.tables.user import UserOptimizer


@dataclass(frozen=True)
class SGD:
    """Gradient descent: ``w -= learning_rate * g``. No state."""

    learning_rate: float = 0.01

    def __post_init__(self) -> None:
        check_number(self, "learning_rate", 0.0)

    def state_elements(self, row_elements: int) -> int:
        """Return the words of state of a row of so many weights, as the core does."""
        return 0


@dataclass(frozen=True)
class Momentum:
    """Gradient descent with momentum: ``v = momentum * v + g; w -= learning_rate * v``.

    With ``nesterov``: ``w -= learning_rate * (g + momentum * v)``. One word of state per weight.

    Source: I. Sutskever et al., "On the importance of initialization and momentum in deep
    learning", ICML 2013, section 2, in the form of Paddle and PyTorch.
    """

    learning_rate: float
    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_number(self, "learning_rate", 0.0)
        check_fraction(self, "momentum")
        check_flag(self, "nesterov")

    def state_elements(self, row_elements: int) -> int:
        """Return the words of state of a row of so many weights, as the core does."""
        return row_elements


@dataclass(frozen=True)
class Adagrad:
    """``a += g * g; w -= learning_rate * g / (sqrt(a) + epsilon)``; ``a`` is the state.

    Source: J. Duchi, E. Hazan and Y. Singer, "Adaptive subgradient methods for online learning
    and stochastic optimization", JMLR 12 (2011), figure 1. Default epsilon as in PyTorch;
    Paddle's is 1e-6.
    """

    learning_rate: float
    epsilon: float = 1e-10
    initial_accumulator: float = 0.0

    def __post_init__(self) -> None:
        check_number(self, "learning_rate", 0.0)
        check_number(self, "epsilon", MIN_EPSILON)
        check_number(self, "initial_accumulator", 0.0)

    def state_elements(self, row_elements: int) -> int:
        """Return the words of state of a row of so many weights, as the core does."""
        return row_elements


@dataclass(frozen=True)
class Adam:
    """Adam, lazy: only rows that are pushed change, and each counts its own updates.

    PyTorch's ``SparseAdam`` and Paddle's ``lazy_mode=True`` take the count from the whole
    parameter instead, so rows first seen late get a first step some 3 times larger there.
    State: two words per weight, and one.

    Source: D. Kingma and J. Ba, "Adam: a method for stochastic optimization", ICLR 2015,
    algorithm 1; epsilon is added to the root of the corrected mean square, as in Paddle and
    PyTorch (TensorFlow adds it to the uncorrected one: the paper's "epsilon hat").
    """

    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        check_number(self, "learning_rate", 0.0)
        check_fraction(self, "beta1")
        check_fraction(self, "beta2")
        check_number(self, "epsilon", MIN_EPSILON)

    def state_elements(self, row_elements: int) -> int:
        """Return the words of state of a row of so many weights, as the core does."""
        # Two moments for each weight, and how often the row was updated.
        return 2 * row_elements + 1


@dataclass(frozen=True)
class AdamW(Adam):
    """``w *= 1 - learning_rate * weight_decay``, then a step of :class:`Adam`.

    Rows that are not pushed do not decay.

    Source: I. Loshchilov and F. Hutter, "Decoupled weight decay regularization", ICLR 2019,
    algorithm 2, in the form of Paddle and PyTorch.
    """

    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "weight_decay", 0.0)


@dataclass(frozen=True)
class RMSProp:
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

    def __post_init__(self) -> None:
        check_number(self, "learning_rate", 0.0)
        check_fraction(self, "rho")
        check_number(self, "epsilon", MIN_EPSILON)
        check_fraction(self, "momentum")
        check_flag(self, "centered")
        check_flag(self, "epsilon_inside_sqrt")

    def state_elements(self, row_elements: int) -> int:
        """Return the words of state of a row of so many weights, as the core does."""
        return row_elements * (1 + self.centered + (self.momentum > 0.0))


@dataclass(frozen=True)
class FTRL:
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

    def __post_init__(self) -> None:
        check_number(self, "learning_rate", MIN_EPSILON)
        check_number(self, "l1", 0.0)
        check_number(self, "l2", 0.0)
        check_number(self, "learning_rate_power", -1.0, 0.0)
        check_number(self, "initial_accumulator", MIN_EPSILON)

    def state_elements(self, row_elements: int) -> int:
        """Return the words of state of a row of so many weights, as the core does."""
        return 2 * row_elements


Optimizer: TypeAlias = SGD | Momentum | Adagrad | Adam | AdamW | RMSProp | FTRL | UserOptimizer
