"""What servers do about stale gradients, beyond dividing the learning rate.

Imports ``backstay.tables.part`` only.
"""

from __future__ import annotations

from dataclasses import dataclass

from backstay.tables.part import Part


@dataclass(frozen=True)
class DelayCompensated(Part, at="compensation", name="delay_compensated"):
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


@dataclass(frozen=True)
class AdaptiveRevision(Part, at="compensation", name="adaptive_revision", word=True):
    """Have Adagrad revise its steps by gradients that come late.

    A pull brings the sum of the gradients that its weights have seen, and a push sends it back. So
    the servers know what was applied in between: each weight takes the steps that it would have
    taken had that been known before. (McMahan and Streeter, NIPS 2014.) With the optimizer
    ``Adagrad`` only.
    """
