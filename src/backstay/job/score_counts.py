"""What predictions are worth, from counts: a histogram of scores for each class, and three sums.

Counts of different workers are added up, and those of the past decay, without any record. The
buckets are equally wide on the scale of logits, from -16 to 16: probabilities of rare events lie
close to 0. Records that share a bucket count as ties, so the area under the curve is off by at most
half the share of pairs in one bucket (``auc_error_max``). In practice it is off by far less, for
most of these pairs cancel out. Logloss and calibration come from the sums, which are exact.

May import numpy and the errors; does no I/O.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backstay.errors import InvalidRequest

__all__ = ["BUCKETS", "FIGURES", "GROUP_BUCKETS", "OTHER", "ScoreCounts", "Scores"]

# Of all records; and of those with one value of a column, which are fewer.
BUCKETS = 8192
GROUP_BUCKETS = 1024
LOGIT_MAX = 16.0
# As ``metrics.logloss``.
PROBABILITY_MIN = 1e-15
# Values that have no counts of their own.
OTHER = "other"
# What has decayed to less than this is as if it were not there: products of it would be 0 at last.
WEIGHT_MIN = 1e-9
FIGURES = ("examples", "skipped", "auc", "logloss", "calibration")

# Values in one ``Scores``, and bytes of the name of one.
GROUPS_MAX = 1024
NAME_BYTES_MAX = 256
# Buckets, whether the weights are whole, sums of losses and predictions, records skipped, weights.
_HEAD = struct.Struct("<H?dddI")
_GROUP_HEAD = struct.Struct("<HI")
_WHOLE_MAX = 2**32 - 1


class ScoreCounts:
    """How often each score came with each label, and what else figures need.

    Args:
        buckets: ``BUCKETS`` or ``GROUP_BUCKETS``.
    """

    __slots__ = ("_weights", "loss_sum", "predicted_sum", "skipped")

    def __init__(self, buckets: int = BUCKETS) -> None:
        # By label and bucket.
        self._weights = np.zeros((2, buckets))
        self.loss_sum = 0.0
        self.predicted_sum = 0.0
        self.skipped = 0.0

    # What is counted.

    def add(self, predictions: NDArray[Any], labels: NDArray[Any], *, logits: bool = False) -> None:
        """Count records; one with an unusable prediction or label is skipped, and counted as such.

        Unusable are labels other than 0 and 1, and predictions that are not finite or, for
        probabilities, outside of 0 to 1.

        Args:
            predictions: Of label 1, [n]: probabilities, or logits.
            labels: [n].
            logits: Whether predictions are logits.
        """
        scores = np.asarray(predictions, np.float64)
        wanted = np.asarray(labels, np.float64)
        usable = np.isfinite(scores) & ((wanted == 0.0) | (wanted == 1.0))
        if not logits:
            usable &= (scores >= 0.0) & (scores <= 1.0)
        if not usable.all():
            self.skipped += float(usable.size - np.count_nonzero(usable))
            scores, wanted = scores[usable], wanted[usable]
        is_positive = wanted == 1.0
        if logits:
            scales = scores
            self.predicted_sum += float(np.sum(_sigmoid(scores)))
            losses = np.logaddexp(0.0, np.where(is_positive, -scores, scores))
        else:
            clipped = np.clip(scores, PROBABILITY_MIN, 1.0 - PROBABILITY_MIN)
            of_one, of_zero = np.log(clipped), np.log1p(-clipped)
            scales = of_one - of_zero
            self.predicted_sum += float(np.sum(scores))
            losses = -np.where(is_positive, of_one, of_zero)
        self.loss_sum += float(np.sum(losses))
        buckets = self.buckets
        places = np.floor((scales + LOGIT_MAX) * (buckets / (2 * LOGIT_MAX)))
        places = np.clip(places, 0, buckets - 1).astype(np.int64) + buckets * is_positive
        self._weights += np.bincount(places, minlength=2 * buckets).reshape(2, buckets)

    def merge(self, other: ScoreCounts) -> None:
        """Count what another one has counted, too.

        Raises:
            InvalidRequest: It has another number of buckets.
        """
        if other.buckets != self.buckets:
            raise InvalidRequest(f"scores of {other.buckets} buckets among those of {self.buckets}")
        self._weights += other._weights
        self.loss_sum += other.loss_sum
        self.predicted_sum += other.predicted_sum
        self.skipped += other.skipped

    def decay(self, factor: float) -> None:
        """Have everything that was counted weigh so many times as much."""
        self._weights *= factor
        self.loss_sum *= factor
        self.predicted_sum *= factor
        self.skipped *= factor

    # What follows from it.

    @property
    def buckets(self) -> int:
        """How many there are."""
        return int(self._weights.shape[1])

    @property
    def examples(self) -> float:
        """How many records were counted, by their weights; those skipped are none of them."""
        return float(self._weights.sum())

    @property
    def positives(self) -> float:
        """Those with label 1."""
        return float(self._weights[1].sum())

    def auc(self) -> float | None:
        """Return the probability that a positive scores above a negative; None: a class is missing.

        A tie counts one half.
        """
        negative, positive = self._weights
        negatives, positives = float(negative.sum()), float(positive.sum())
        if min(negatives, positives) < WEIGHT_MIN:
            return None
        below = np.cumsum(negative) - negative / 2
        return float(positive @ below) / (negatives * positives)

    def auc_error_max(self) -> float | None:
        """Return by how much ``auc`` may be off because scores in one bucket count as ties."""
        negative, positive = self._weights
        negatives, positives = float(negative.sum()), float(positive.sum())
        if min(negatives, positives) < WEIGHT_MIN:
            return None
        return float(positive @ negative) / (2 * negatives * positives)

    def logloss(self) -> float | None:
        """Return the mean of ``-log p(label)``; None: there are no records."""
        examples = self.examples
        return self.loss_sum / examples if examples >= WEIGHT_MIN else None

    def calibration(self) -> float | None:
        """Return the mean prediction over the observed rate of label 1; None: there is none."""
        positives = self.positives
        return self.predicted_sum / positives if positives >= WEIGHT_MIN else None

    def figures(self) -> dict[str, float | None]:
        """Return all of ``FIGURES``, by name."""
        return {
            "examples": self.examples,
            "skipped": self.skipped,
            "auc": self.auc(),
            "logloss": self.logloss(),
            "calibration": self.calibration(),
        }

    # How they travel and are kept.

    def to_bytes(self) -> bytes:
        """Return them packed; weights that are not whole are rounded to float32."""
        flat = self._weights.reshape(-1)
        places = np.flatnonzero(flat)
        values = flat[places]
        whole = bool((values == np.floor(values)).all()) and not (values > _WHOLE_MAX).any()
        steps = np.diff(places, prepend=0).astype("<u2")
        content = steps.tobytes() + values.astype("<u4" if whole else "<f4").tobytes()
        head = _HEAD.pack(
            self.buckets, whole, self.loss_sum, self.predicted_sum, self.skipped, len(places)
        )
        return head + zlib.compress(content, 1)

    @classmethod
    def from_bytes(cls, data: bytes) -> ScoreCounts:
        """Return what ``to_bytes`` packed.

        Raises:
            InvalidRequest: It is nothing of that form.
        """
        if len(data) < _HEAD.size:
            raise InvalidRequest(f"scores: {len(data)} bytes are too few")
        buckets, whole, loss_sum, predicted_sum, skipped, count = _HEAD.unpack_from(data)
        if buckets not in (BUCKETS, GROUP_BUCKETS) or count > 2 * buckets:
            raise InvalidRequest(f"scores: {count} weights in {buckets} buckets")
        content = _unpacked(data[_HEAD.size :], 6 * count)
        places = np.cumsum(np.frombuffer(content[: 2 * count], "<u2"), dtype=np.int64)
        values = np.frombuffer(content[2 * count :], "<u4" if whole else "<f4").astype(np.float64)
        sums = np.array([loss_sum, predicted_sum, skipped])
        bad = not (np.isfinite(sums) & (sums >= 0)).all()
        bad = bad or not (np.isfinite(values) & (values >= 0)).all()
        if bad or (count and places[-1] >= 2 * buckets) or (np.diff(places) <= 0).any():
            raise InvalidRequest("scores: weights or sums that no records give")
        counts = cls(buckets)
        counts._weights.reshape(-1)[places] = values
        counts.loss_sum, counts.predicted_sum, counts.skipped = loss_sum, predicted_sum, skipped
        return counts


class Scores:
    """The counts of all records, and of those with each value of a column.

    Attributes:
        all: Of all records.
        by: By value; empty: no column is looked at.
    """

    __slots__ = ("all", "by")

    def __init__(self, by: Mapping[str, ScoreCounts] | None = None) -> None:
        self.all = ScoreCounts()
        self.by = dict(by or {})

    def of(self, value: str) -> ScoreCounts:
        """Return the counts of a value; none yet: they begin."""
        counts = self.by.get(value)
        if counts is None:
            counts = self.by[value] = ScoreCounts(GROUP_BUCKETS)
        return counts

    def merge(self, other: Scores) -> None:
        """Count what another one has counted, too."""
        self.all.merge(other.all)
        for value, counts in other.by.items():
            self.of(value).merge(counts)

    def to_bytes(self) -> bytes:
        """Return them packed."""
        parts = []
        for name, counts in (("", self.all), *self.by.items()):
            encoded, packed = name.encode(), counts.to_bytes()
            parts += [_GROUP_HEAD.pack(len(encoded), len(packed)), encoded, packed]
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> Scores:
        """Return what ``to_bytes`` packed.

        Raises:
            InvalidRequest: It is nothing of that form.
        """
        scores, place, number = cls(), 0, 0
        while place < len(data):
            if place + _GROUP_HEAD.size > len(data) or number > GROUPS_MAX:
                raise InvalidRequest(f"scores: not {number} groups in {len(data)} bytes")
            name_size, size = _GROUP_HEAD.unpack_from(data, place)
            begin = place + _GROUP_HEAD.size + name_size
            place = begin + size
            if name_size > NAME_BYTES_MAX or place > len(data):
                raise InvalidRequest("scores: a group is longer than all of them")
            name = data[begin - name_size : begin].decode(errors="replace")
            counts = ScoreCounts.from_bytes(data[begin:place])
            if counts.buckets != (GROUP_BUCKETS if number else BUCKETS):
                raise InvalidRequest(f"scores: group {number} has {counts.buckets} buckets")
            if number:
                scores.by[name] = counts
            else:
                scores.all = counts
            number += 1
        if not number:
            raise InvalidRequest("scores: none")
        return scores


def _sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    # exp of a negative number never overflows.
    small = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1.0, small) / (1.0 + small)


def _unpacked(data: bytes, size: int) -> bytes:
    """Return content of exactly that size.

    Raises:
        InvalidRequest: It is of another size, or damaged.
    """
    unpacker = zlib.decompressobj()
    try:
        # One byte more would be too much; none at all means "no limit".
        content = unpacker.decompress(data, size + 1)
    except zlib.error as error:
        raise InvalidRequest(f"scores: {error}") from error
    if len(content) != size or not unpacker.eof or unpacker.unused_data:
        raise InvalidRequest(f"scores: {len(content)} bytes or more, not {size}")
    return content
