"""``settings``: what an operator may change while the cluster runs, one record for all nodes.

Each field says its default, its range and what it does; ``pserverctl config`` and the reference
page show just that. This module imports ``backstay.settings``, ``backstay.errors`` and
``json_record``; it knows no clock, no network and no randomness.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from backstay.errors import ConfigError, InvalidRequest
from backstay.json_record import JsonRecord, dump
from backstay.settings import check, load, setting

__all__ = ["ClusterSettings", "SettingText", "SettingsRecord"]

ON_SLOT_LOSS = ("restore", "restore-lost", "wait")
# A relative path would be another folder on each node.
_URL = re.compile(r"/.*|[a-z][a-z0-9+.-]*://.+|", re.DOTALL)
_PASSWORD = re.compile(r"[^/]*://[^/]*:[^/]*@")


@dataclass(frozen=True)
class SettingText:
    """One setting for people, all strings.

    Attributes:
        name: Its name.
        value: What it is.
        default: Its value while it is not set.
        allowed: The range of a number; empty for a string.
        help: What it does.
        is_number: Whether the value is an integer.
    """

    name: str
    value: str
    default: str
    allowed: str
    help: str
    is_number: bool


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """The settings in force; without a record, the defaults."""

    checkpoint_url: str = setting(
        "",
        "Where checkpoints go: an absolute path that every node has, or a URL. Every caller "
        "can read it: put no secret in it. Empty: nowhere.",
    )
    checkpoint_every_s: int = setting(
        0,
        "Seconds from one checkpoint to the next. 0: none by time.",
        minimum=0,
        maximum=31_536_000,
    )
    checkpoint_every_pushes: int = setting(
        0,
        "Pushes, over all masters, from one checkpoint to the next. 0: none by pushes.",
        minimum=0,
        maximum=10**15,
    )
    checkpoint_full_every: int = setting(
        8,
        "One in so many checkpoints is full; the others have only the changes.",
        minimum=1,
        maximum=1000,
    )
    checkpoint_keep_last: int = setting(
        3, "How many of the newest checkpoints are kept.", minimum=1, maximum=10_000
    )
    checkpoint_keep_every: int = setting(
        0,
        "One in so many older checkpoints is also kept. 0: none.",
        minimum=0,
        maximum=10_000,
    )
    checkpoint_bytes_per_s: int = setting(
        0, "Most bytes a second that each node writes. 0: no limit.",
        minimum=0, maximum=2**40,
    )  # fmt: skip
    on_slot_loss: str = setting(
        "restore",
        "When slots lose all copies: restore (all slots go back to the newest checkpoint), "
        "restore-lost (only the lost ones; jobs fail) or wait (for an operator).",
        choices=ON_SLOT_LOSS,
    )
    moves_at_once: int = setting(
        256,
        "Most slots that a resize, drain or rebalance moves at a time.",
        minimum=1,
        maximum=65_536,
    )

    def __post_init__(self) -> None:
        """Refuse values that are not allowed, each for itself."""
        check(self)
        if _PASSWORD.match(self.checkpoint_url):
            # The value is left out, because messages go to logs.
            raise ConfigError(
                "checkpoint_url: the value (not shown) holds a password, and everyone who may ask "
                "could read it; give the nodes their credentials in their environment"
            )
        if not _URL.fullmatch(self.checkpoint_url):
            raise ConfigError(
                f"checkpoint_url: {self.checkpoint_url!r} is neither an absolute path nor a URL "
                "such as s3://bucket/path"
            )

    def changed(self, texts: Mapping[str, str]) -> ClusterSettings:
        """Return these settings with some others, given as strings.

        Raises:
            ConfigError: There is no setting of that name, a value is not allowed, or the
                settings do not fit together; the message says what is.
        """
        given: dict[str, object] = {item.name: getattr(self, item.name) for item in fields(self)}
        config = load(ClusterSettings, {}, {}, given | dict(texts)).config
        if config.checkpoint_url:
            return config
        for name, needs_it in (
            ("checkpoint_every_s", config.checkpoint_every_s > 0),
            ("checkpoint_every_pushes", config.checkpoint_every_pushes > 0),
        ):
            if needs_it:
                value = getattr(config, name)
                raise ConfigError(
                    f"{name}: {value} needs checkpoint_url, which is empty; set both together"
                )
        return config

    def texts(self) -> list[SettingText]:
        """Return each setting as people read and write it, in the order of the fields."""
        shown = []
        for item in fields(self):
            low, high = item.metadata["minimum"], item.metadata["maximum"]
            shown.append(
                SettingText(
                    name=item.name,
                    value=str(getattr(self, item.name)),
                    default=str(item.default),
                    allowed="" if low is None else f"{low} to {high}",
                    help=item.metadata["doc"],
                    is_number=low is not None,
                )
            )
        return shown

    def to_json(self) -> str:
        """Return the record of these settings, of which none has another source."""
        return SettingsRecord(self).to_json()

    @classmethod
    def from_json(cls, text: str) -> ClusterSettings:
        """Return the settings of a record, as ``SettingsRecord.from_json`` reads it."""
        return SettingsRecord.from_json(text).settings


@dataclass(frozen=True)
class SettingsRecord:
    """``settings``: the settings, and the sources of the values that a profile decided.

    Attributes:
        settings: The settings in force.
        sources: By name ``profile NAME``, for what a profile decided when the cluster was
            created; ``replicas``, which cannot change, may be among them.
    """

    settings: ClusterSettings
    sources: Mapping[str, str] = field(default_factory=dict)

    def source_of(self, name: str) -> str:
        """Return where the value of a setting comes from: a profile, ``set`` or ``default``."""
        known = {item.name: item.default for item in fields(ClusterSettings)}
        is_default = name in known and getattr(self.settings, name) == known[name]
        return self.sources.get(name) or ("default" if is_default else "set")

    def changed(self, texts: Mapping[str, str]) -> SettingsRecord:
        """Return the record with some other settings, given as strings; see ``ClusterSettings``."""
        left = {name: source for name, source in self.sources.items() if name not in texts}
        return SettingsRecord(self.settings.changed(texts), left)

    def to_json(self) -> str:
        """Return the record as the JSON that the coordination store keeps."""
        sources = dict(sorted(self.sources.items()))
        document = _StoredSettings(vars(self.settings), sources).to_document()
        if not sources:
            del document["sources"]
        return dump(document)

    @classmethod
    def from_json(cls, text: str) -> SettingsRecord:
        """Return the record that ``to_json`` gave.

        A setting that is not in it has its default: the record may be older than the setting.

        Raises:
            InvalidRequest: It is not of that form.
        """
        stored = _StoredSettings.from_json(text)
        # An older version wrote this value where none was chosen.
        if stored.settings.get("on_slot_loss") == "empty":
            del stored.settings["on_slot_loss"]
        known = {item.name for item in fields(ClusterSettings)}
        for name in stored.settings:
            if name not in known:
                raise InvalidRequest(f"{_WHAT}: this version knows no setting {name!r}")
        try:
            settings = ClusterSettings(**stored.settings)
        except ConfigError as error:
            raise InvalidRequest(f"{_WHAT}: {error}") from error
        return cls(settings, stored.sources)


_WHAT = "cluster settings"


@dataclass(frozen=True)
class _StoredSettings(JsonRecord, what=_WHAT, added=("sources",)):
    """The JSON form of ``SettingsRecord``."""

    format: Literal[1] = field(default=1, kw_only=True)
    settings: dict[str, Any]
    sources: dict[str, str] = field(default_factory=dict)
