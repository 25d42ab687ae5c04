"""What servers do about stale gradients, beyond dividing the learning rate.

Imports its siblings in ``backstay.tables``; never does I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

from backstay.tables.checks import MIN_EPSILON, check_flag, check_fraction, check_number


@dataclass(frozen=True)
class DelayCompensated:
    """Move each gradient to where the weights are by the time it is applied.

    A push brings the weights that its gradients were computed with, r, and the optimizer takes
    ``g + lambda * g * g * (w - r)`` for g. (Zheng et al., ICML 2017; what is not finite is not
    moved.)

    Attributes:
        strength: lambda, from 0.
        adaptive: Divide it by ``sqrt(s + epsilon)``, where s is the mean square of the gradients of
            the weight: one more word for each weight.
        decay: Share of s that stays with each push.
        epsilon: Keeps that finite.
    """

    strength: float
    adaptive: bool = False
    decay: float = 0.95
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        check_number(self, "strength", 0.0)
        check_flag(self, "adaptive")
        check_fraction(self, "decay")
        check_number(self, "epsilon", MIN_EPSILON)

    def state_elements(self, row_elements: int) -> int:
        """Words behind the optimizer's state of a row."""
        return row_elements if self.adaptive else 0


@dataclass(frozen=True)
class AdaptiveRevision:
    """Have Adagrad revise its steps by gradients that come late.

    A pull brings the sum of the gradients that its weights have seen, and a push sends it back. So
    the servers know what was applied in between: each weight takes the steps that it would have
    taken had that been known before. (McMahan and Streeter, NIPS 2014.) With the optimizer
    ``Adagrad`` only.
    """

    def state_elements(self, row_elements: int) -> int:
        """Words behind the optimizer's state of a row."""
        return 2 * row_elements + 1
