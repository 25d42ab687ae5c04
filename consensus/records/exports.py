"""``plans/export/<name>``: an export that goes on until it is stopped; and which tables it is of.

This module imports ``json_record`` and ``backstay.errors``; it knows no clock and no network.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from backstay.errors import InvalidRequest
from backstay.json_record import JsonRecord

__all__ = ["EVERY_PUSHES_MAX", "EVERY_S_MIN", "ExportRecord", "TopicRecord", "tables_of_exports"]

EVERY_S_MIN = 0.1
EVERY_S_MAX = 86_400.0
EVERY_PUSHES_MAX = 10**12
TEXT_MAX = 1_000
PATTERNS_MAX = 1_000
SETTINGS_MAX = 100

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}", re.ASCII)
# What is relative would be another folder on each node.
_PLACE = re.compile(r"/|[A-Za-z][A-Za-z0-9+.-]*://", re.ASCII)
_TOPIC = re.compile(r"[A-Za-z0-9_.-]{1,249}", re.ASCII)
# Everyone who may look at the cluster sees the record.
_SECRET = re.compile(r"password|secret|\.pem$|oauthbearer\.config$", re.ASCII)
# Another value would lose rows, or have two write at once.
_OURS = frozenset(
    {
        "acks",
        "auto.offset.reset",
        "bootstrap.servers",
        "enable.auto.commit",
        "enable.idempotence",
        "enable.partition.eof",
        "isolation.level",
        "metadata.broker.list",
        "request.required.acks",
        "transactional.id",
    }
)


@dataclass(frozen=True)
class TopicRecord(JsonRecord, what="topic of an export"):
    """A topic of Kafka.

    Attributes:
        brokers: Addresses to begin with, ``host:port``.
        name: Of the topic.
        settings: Of the client, librdkafka; no secrets.
        settings_file: On each node, with more of them, secrets too; empty: none.
    """

    brokers: tuple[str, ...]
    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    settings_file: str = ""

    def __post_init__(self) -> None:
        """Refuse what cannot be, is decided by the export, or is a secret."""
        if not _TOPIC.fullmatch(self.name) or self.name in (".", ".."):
            raise InvalidRequest(
                f"topic {self.name[:300]!r} is not 1 to 249 of A-Z a-z 0-9 _ . -, as Kafka's are"
            )
        brokers = ",".join(self.brokers)
        if not all(self.brokers) or not 1 <= len(brokers) <= TEXT_MAX:
            raise InvalidRequest(f"topic {self.name}: no brokers; name addresses, host:port")
        if len(self.settings) > SETTINGS_MAX or len(self.settings_file) > TEXT_MAX:
            raise InvalidRequest(f"topic {self.name}: over {SETTINGS_MAX} settings, or a long path")
        for name, value in self.settings.items():
            if not name or len(name) + len(value) > TEXT_MAX:
                raise InvalidRequest(f"topic {self.name}: the setting {name[:200]!r} is too long")
            if _SECRET.search(name):
                raise InvalidRequest(
                    f"topic {self.name}: {name} is a secret, which everyone would see: put it into "
                    "a settings file on each node"
                )
        self.check_ours(self.settings)

    def is_same(self, other: TopicRecord | None) -> bool:
        """Return whether it is the same topic, as far as names tell."""
        return other is not None and (
            other.name == self.name and bool(set(other.brokers) & set(self.brokers))
        )

    def check_ours(self, settings: Iterable[str]) -> None:
        """Refuse settings of the client that the export decides.

        Raises:
            InvalidRequest: It names one.
        """
        if wrong := sorted(_OURS & set(settings)):
            raise InvalidRequest(
                f"topic {self.name}: {wrong[0]} cannot be set; backstay decides it"
            )


@dataclass(frozen=True)
class ExportRecord(JsonRecord, what="export", added=("topic", "every_pushes")):
    """An export that goes on; the controller writes it.

    Attributes:
        name: Its name in the cluster.
        run: Random: which start it is.
        url: The folder or URL of its elements.
        every_s: Seconds from one increment to the next.
        tables: Names of tables, in which * and ? stand for any characters.
        statistics: Whether the statistics of rows go with their weights.
        score_at_least: The lowest score of a row, in tables whose lifetime uses one; None: any.
        started: ISO 8601, for people; exports are in the order of this.
        stopping: Whether it ends with the next increment.
        trouble: Why the last increment could not be written; empty if it was.
        topic: Where its rows go besides; None: nowhere.
        every_pushes: An increment comes earlier when a server has applied so many pushes since the
            one before; 0: it does not.
    """

    name: str
    run: str
    url: str
    every_s: float
    tables: tuple[str, ...]
    statistics: bool
    score_at_least: float | None
    started: str
    stopping: bool = False
    trouble: str = ""
    topic: TopicRecord | None = None
    every_pushes: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be, or would take too much room."""
        if not _NAME.fullmatch(self.name):
            raise InvalidRequest(f"name {self.name[:200]!r} is not 1 to 128 of A-Z a-z 0-9 _ . -")
        if not EVERY_S_MIN <= self.every_s <= EVERY_S_MAX:
            raise InvalidRequest(
                f"every_s {self.every_s:g} is not {EVERY_S_MIN:g} to {EVERY_S_MAX:g} seconds"
            )
        if not 0 <= self.every_pushes <= EVERY_PUSHES_MAX:
            raise InvalidRequest(
                f"every_pushes {self.every_pushes} is not 0 to {EVERY_PUSHES_MAX}; 0: by time alone"
            )
        if not 1 <= len(self.url) <= TEXT_MAX:
            raise InvalidRequest(f"url is not of 1 to {TEXT_MAX} characters")
        if not _PLACE.match(self.url):
            raise InvalidRequest(f"url {self.url!r} is neither an absolute path nor a URL")
        if not 1 <= len(self.tables) <= PATTERNS_MAX or not all(self.tables):
            raise InvalidRequest(f"tables is no list of 1 to {PATTERNS_MAX} names or patterns")
        if self.score_at_least is not None and not math.isfinite(self.score_at_least):
            raise InvalidRequest(f"score_at_least {self.score_at_least} is no number")

    def takes(self, table: str) -> bool:
        """Return whether a table is in it, if no earlier export has it.

        Tables of backstay's own, such as the audit's, are part of no model.
        """
        own = table.rpartition("/")[2].startswith("__")
        return not own and any(fnmatchcase(table, pattern) for pattern in self.tables)


def tables_of_exports(
    exports: Mapping[str, ExportRecord], tables: Iterable[str]
) -> dict[str, tuple[str, ...]]:
    """Return the tables of each export, sorted. A table is in the first one that takes it. Pure."""
    found: dict[str, list[str]] = {name: [] for name in exports}
    in_order = sorted(exports.values(), key=lambda one: (one.started, one.name))
    for table in sorted(tables):
        taker = next((one for one in in_order if one.takes(table)), None)
        if taker is not None:
            found[taker.name].append(table)
    return {name: tuple(some) for name, some in found.items()}
