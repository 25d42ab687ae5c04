"""How long to pause before something that failed for a passing reason is tried again.

Decides only: it reads no clock, draws no random number of its own and never sleeps. Imports nothing
of this package.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Backoff", "Retries"]


@dataclass(frozen=True, slots=True)
class Backoff:
    """The pauses after failures in a row; each is longer than the one before, up to a limit.

    Attributes:
        first_s: After the first failure.
        longest_s: No pause is longer.
        factor: Each pause is so many times as long as the one before.
        jitter: The share of a pause, 0 to 1, of which a random part is left out, so that many
            callers that failed at one time do not come back at one time.
    """

    first_s: float
    longest_s: float
    factor: float = 2.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        """Check it.

        Raises:
            ValueError: A pause would be negative, or shorter than the one before.
        """
        if not (0 <= self.first_s <= self.longest_s and self.factor >= 1 and 0 <= self.jitter <= 1):
            raise ValueError(
                "0 <= first_s <= longest_s, factor >= 1, 0 <= jitter <= 1 must hold: "
                f"{self.first_s}, {self.longest_s}, {self.factor}, {self.jitter}"
            )

    def pause_s(self, failures: int, drawn: float = 0.0) -> float:
        """Return the pause after so many failures in a row; none after none.

        Args:
            failures: In a row.
            drawn: A number from 0 to 1; at 1 all of ``jitter`` is left out.
        """
        if failures <= 0:
            return 0.0
        try:
            pause_s = min(self.first_s * self.factor ** (failures - 1), self.longest_s)
        except OverflowError:
            pause_s = self.longest_s
        return pause_s * (1 - self.jitter * drawn)

    def begin(
        self, *, until_s: float = math.inf, draw: Callable[[], float] = lambda: 0.0
    ) -> Retries:
        """Return the state of one loop of tries.

        Args:
            until_s: When the last try may begin, on the caller's clock.
            draw: Draws a number from 0 to 1 for the jitter, as ``random.Random().random`` does;
                by default there is no jitter.
        """
        return Retries(self, until_s, draw)


class Retries:
    """The failures in a row of one loop of tries."""

    def __init__(self, backoff: Backoff, until_s: float, draw: Callable[[], float]) -> None:
        """Begin without a failure; see :meth:`Backoff.begin`."""
        self._backoff = backoff
        self._until_s = until_s
        self._draw = draw
        self._failures = 0
        self._pause_s = 0.0

    @property
    def pause_s(self) -> float:
        """The pause after the last failure; 0 if the last try was a success."""
        return self._pause_s

    def next_s(self) -> float:
        """Count a failure and return the pause after it."""
        self._failures += 1
        self._pause_s = self._backoff.pause_s(self._failures, self._draw())
        return self._pause_s

    def reset(self) -> None:
        """Note a success."""
        self._failures, self._pause_s = 0, 0.0

    def is_over(self, now_s: float) -> bool:
        """Whether the pause would last until ``until_s`` or longer."""
        return now_s + self._pause_s >= self._until_s
