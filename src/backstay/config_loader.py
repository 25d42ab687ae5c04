"""Fills a configuration: explicit argument, else file, else environment, else default.

A file is TOML with the sections ``[server]`` and ``[client]``; an environment variable is
called ``BACKSTAY_<FIELD>``, and an empty one counts as not set. The loader remembers where
each value came from, because the first question about a wrong setting is "who set that?".

This module imports ``backstay.config`` and ``backstay.errors`` only. The environment is an
argument; the only file it reads is the one it is given.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

from backstay.config import ClientConfig, Peer, SecurityConfig, ServerConfig, parse_peers
from backstay.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["ENVIRONMENT_PREFIX", "Loaded", "load"]

ENVIRONMENT_PREFIX = "BACKSTAY_"
_SECTIONS: Mapping[str, type[SecurityConfig]] = {"server": ServerConfig, "client": ClientConfig}
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})

ConfigT = TypeVar("ConfigT", bound=SecurityConfig)


@dataclass(frozen=True)
class Loaded(Generic[ConfigT]):
    """A configuration, and for each of its fields where the value came from."""

    config: ConfigT
    sources: Mapping[str, str]

    def describe(self) -> str:
        """Return one line per field: its value and its source; secrets are not shown."""
        lines = []
        for item in fields(self.config):
            value = getattr(self.config, item.name)
            if isinstance(value, tuple):
                value = ",".join(map(str, value))
            shown = value if item.repr or value is None else "(hidden)"
            lines.append(f"{item.name} = {shown}  [{self.sources[item.name]}]")
        return "\n".join(lines)


def load(
    kind: type[ConfigT],
    *,
    explicit: Mapping[str, object] | None = None,
    file: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Loaded[ConfigT]:
    """Return a configuration: explicit argument, else file, else environment, else default.

    Args:
        kind: ``ServerConfig`` (section ``[server]`` of the file) or ``ClientConfig``
            (section ``[client]``).
        explicit: Values given by the caller; None means not given.
        file: A TOML file; None for no file.
        environment: Usually ``os.environ``; only ``BACKSTAY_<FIELD>`` names are read.

    Raises:
        ConfigError: A value is not allowed, or the file is unreadable or has an unknown key.
    """
    explicit = {name: value for name, value in (explicit or {}).items() if value is not None}
    in_file = _read_section(kind, Path(file)) if file is not None else {}
    environment = environment or {}
    hints = get_type_hints(kind)
    unknown = sorted(explicit.keys() - hints.keys())
    if unknown:
        raise ConfigError(f"{unknown[0]}: no such setting; there are {', '.join(sorted(hints))}")
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for item in fields(kind):
        variable = ENVIRONMENT_PREFIX + item.name.upper()
        if item.name in explicit:
            raw, source = explicit[item.name], "argument"
        elif item.name in in_file:
            raw, source = in_file[item.name], f"file {file}"
        elif environment.get(variable):
            raw, source = environment[variable], f"environment {variable}"
        else:
            sources[item.name] = "default"
            continue
        sources[item.name] = source
        values[item.name] = _convert(item.name, raw, hints[item.name], source)
    try:
        return Loaded(kind(**values), sources)
    except ConfigError as error:
        culprit = str(error).partition(":")[0]
        if sources.get(culprit, "default") in ("default", "argument"):
            raise
        raise ConfigError(f"{error} (from {sources[culprit]})") from error


def _read_section(kind: type[SecurityConfig], path: Path) -> Mapping[str, object]:
    """Return the file's section for this kind of configuration, every key known."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the file {str(path)!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file {str(path)!r} is not TOML: {error}") from error
    for name, content in document.items():
        if name not in _SECTIONS or not isinstance(content, dict):
            raise ConfigError(f"{path}: unknown section {name!r}; there are [server] and [client]")
        known = {item.name for item in fields(_SECTIONS[name])}
        for key in content:
            if key not in known:
                raise ConfigError(f"{path}: unknown key {key!r} in [{name}]")
    wanted = next(name for name, section in _SECTIONS.items() if section is kind)
    section: Mapping[str, object] = document.get(wanted, {})
    return section


def _convert(name: str, raw: object, hint: object, source: str) -> object:
    """Return ``raw`` as the field's type: texts are parsed, lists of peers are joined."""
    if hint == tuple[Peer, ...]:
        if isinstance(raw, list) and all(isinstance(entry, str) for entry in raw):
            raw = ",".join(raw)
        return parse_peers(raw) if isinstance(raw, str) else raw
    if not isinstance(raw, str) or source.startswith("file"):
        return raw
    if hint is int:
        try:
            return int(raw.replace("_", ""))
        except ValueError:
            raise ConfigError(f"{name}: {raw!r} is not a whole number (from {source})") from None
    if hint is bool:
        if raw.lower() not in _TRUE | _FALSE:
            raise ConfigError(f"{name}: {raw!r} is not true or false (from {source})")
        return raw.lower() in _TRUE
    return raw
