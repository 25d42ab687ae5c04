"""A made-up world of clicks that changes all the time: tastes turn, ids come and go.

Pure: a seed and the times that it is asked about give the same visits. May import numpy only.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Visits", "World"]

PLACES = 40
# How many users and ads there are at a time, and how long one lives on the mean.
USERS, USER_LIFE_S = 2000, 90.0
ADS, AD_LIFE_S = 300, 45.0
# Visits of users who come once: ids that a table should not keep.
GUEST_SHARE = 0.25
# What is liked turns once in this time: after half of it, all that was liked is not.
TURN_S = 240.0
# Of what makes a click: planes that turn, how much places and users differ, ads' appeal.
PLANES = 2
PLACE_TASTE, USER_TASTE, AD_TASTE, APPEAL = 1.0, 0.5, 1.0, 1.2
BIAS = -1.0
# Ids are numbered as they come, users from here on.
FIRST_USER = 1_000_000


class Visits(NamedTuple):
    """What some visitors were shown and whether they clicked; arrays of one length.

    Attributes:
        user: Id of the visitor.
        ad: Id of what was shown.
        place: Where it was shown, 0 to 39.
        click: 1 or 0.
        chance: What the click was drawn with: no model can know more.
    """

    user: NDArray[np.int64]
    ad: NDArray[np.int64]
    place: NDArray[np.int64]
    click: NDArray[np.int64]
    chance: NDArray[np.float64]


class World:
    """Who is there, and what they like. Times only grow."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._next = {"user": FIRST_USER, "ad": 0}
        self._place_taste = self._taste(PLACES, PLACE_TASTE)
        self._users = self._born("user", USERS)
        self._user_place = self._random.integers(0, PLACES, USERS)
        self._user_taste = self._taste(USERS, USER_TASTE)
        self._user_end = self._random.exponential(USER_LIFE_S, USERS)
        self._ads = self._born("ad", ADS)
        self._ad_taste = self._taste(ADS, AD_TASTE)
        self._ad_phase = self._random.uniform(0.0, 2 * math.pi, ADS)
        self._ad_end = self._random.exponential(AD_LIFE_S, ADS)

    @property
    def born(self) -> int:
        """How many users and ads there have been."""
        return self._next["user"] - FIRST_USER + self._next["ad"]

    def visits(self, count: int, now_s: float) -> Visits:
        """Draw so many visits at a time, in seconds since the world began."""
        self._replace(now_s)
        users, ads = self._popular(USERS, count), self._popular(ADS, count)
        is_guest = self._random.random(count) < GUEST_SHARE
        user, place = self._users[users], self._user_place[users]
        taste = self._place_taste[place] + self._user_taste[users]
        guests = int(is_guest.sum())
        user[is_guest] = self._born("user", guests)
        place[is_guest] = self._random.integers(0, PLACES, guests)
        taste[is_guest] = self._place_taste[place[is_guest]]
        angle = 2 * math.pi * now_s / TURN_S
        # A turn of each plane, as of complex numbers.
        liked = (taste * np.exp(1j * angle) * self._ad_taste[ads].conj()).real.sum(axis=1)
        appeal = APPEAL * np.sin(angle + self._ad_phase[ads])
        chance = 1.0 / (1.0 + np.exp(-(BIAS + liked + appeal)))
        click = (self._random.random(count) < chance).astype(np.int64)
        return Visits(user, self._ads[ads], place, click, chance)

    def _replace(self, now_s: float) -> None:
        """Put new users and ads in the places of those whose time is over."""
        gone = np.flatnonzero(self._user_end <= now_s)
        self._users[gone] = self._born("user", len(gone))
        self._user_place[gone] = self._random.integers(0, PLACES, len(gone))
        self._user_taste[gone] = self._taste(len(gone), USER_TASTE)
        self._user_end[gone] = now_s + self._random.exponential(USER_LIFE_S, len(gone))
        gone = np.flatnonzero(self._ad_end <= now_s)
        self._ads[gone] = self._born("ad", len(gone))
        self._ad_taste[gone] = self._taste(len(gone), AD_TASTE)
        self._ad_phase[gone] = self._random.uniform(0.0, 2 * math.pi, len(gone))
        self._ad_end[gone] = now_s + self._random.exponential(AD_LIFE_S, len(gone))

    def _born(self, kind: str, count: int) -> NDArray[np.int64]:
        first = self._next[kind]
        self._next[kind] += count
        return np.arange(first, first + count)

    def _taste(self, count: int, scale: float) -> NDArray[np.complex128]:
        parts = self._random.normal(0.0, scale / math.sqrt(PLANES), (count, PLANES, 2))
        return parts.view(np.complex128)[..., 0]

    def _popular(self, among: int, count: int) -> NDArray[np.int64]:
        """Draw places: a few are frequent, most are rare."""
        return (among * self._random.random(count) ** 3).astype(np.int64)
