"""The machinery of configurations: declare a setting, check it, load it, say who set it.

A configuration is a frozen dataclass whose fields are made by ``setting``. ``check`` is called
when one is made; ``load`` fills one from explicit arguments, a TOML file, the environment and
the defaults, and remembers where each value came from, because the first question about a
wrong setting is "who set that?".

This module imports ``backstay.errors`` only and knows no particular configuration. The
environment is an argument; the only file it reads is the one it is given.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar, get_type_hints

from backstay.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "ENVIRONMENT_PREFIX",
    "Loaded",
    "check",
    "check_name",
    "load",
    "read_section",
    "setting",
    "suggestion",
]

ENVIRONMENT_PREFIX = "BACKSTAY_"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_TYPE_WORDS = {str: "a string", int: "an integer", bool: "true or false"}


class Configuration(Protocol):
    """A frozen dataclass whose fields were made by ``setting``."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


ConfigT = TypeVar("ConfigT", bound=Configuration)


def setting(
    default: Any,
    doc: str,
    *,
    minimum: int | None = None,
    maximum: int | None = None,
    secret: bool = False,
    parse: Callable[[str], object] | None = None,
) -> Any:
    """Return a dataclass field.

    Args:
        default: Its default value.
        doc: One or two sentences for ``--help`` and the reference page.
        minimum: Least value of a number.
        maximum: Greatest value of a number.
        secret: Never show the value.
        parse: Makes the value out of a string, for types other than string, number and bool.
    """
    metadata = {"doc": doc, "minimum": minimum, "maximum": maximum, "parse": parse}
    return field(default=default, repr=not secret, metadata=metadata)


def check(config: Configuration) -> None:
    """Check the types of the plain fields, and the bounds of the numbers.

    Raises:
        ConfigError: One is wrong; the message names it, its value and what is allowed.
    """
    hints = get_type_hints(type(config))
    for item in fields(config):
        value = getattr(config, item.name)
        shown = repr(value) if item.repr else "the value (not shown)"
        kind = _plain_type(hints[item.name])
        may_be_none = item.default is None
        if kind is not None and type(value) is not kind and not (may_be_none and value is None):
            raise ConfigError(f"{item.name}: {shown} is not {_TYPE_WORDS[kind]}")
        low, high = item.metadata["minimum"], item.metadata["maximum"]
        if value is None:
            continue
        if (low is not None and value < low) or (high is not None and value > high):
            allowed = f"at least {low}" if high is None else f"{low} to {high}"
            raise ConfigError(f"{item.name}: {shown} is out of range; allowed is {allowed}")


def check_name(setting: str, value: str) -> None:
    """Make sure that a value can be the name of a node or of a cluster.

    Raises:
        ConfigError: It cannot; the message names the setting.
    """
    if not _NAME.fullmatch(value):
        raise ConfigError(
            f"{setting}: {value!r} is not a name of 1 to 64 characters out of A-Z a-z 0-9 _ . -"
        )


@dataclass(frozen=True)
class Loaded(Generic[ConfigT]):
    """A configuration, and for each of its fields where the value came from."""

    config: ConfigT
    sources: Mapping[str, str]

    def describe(self) -> str:
        """Return one line per field: its value and its source; secrets are not shown."""
        lines = []
        from_profile: Mapping[str, object] = getattr(self.config, "from_profile", {})
        for item in fields(self.config):
            value, source = getattr(self.config, item.name), self.sources[item.name]
            if item.name in from_profile:
                value = from_profile[item.name]
                source = f"profile {getattr(self.config, 'profile', '')}"
            if isinstance(value, tuple):
                value = ",".join(map(str, value))
            shown = value if item.repr or value is None else "(not shown)"
            lines.append(f"{item.name} = {shown}  [{source}]")
        return "\n".join(lines)


def load(
    kind: type[ConfigT],
    section: Mapping[str, object],
    environment: Mapping[str, str],
    explicit: Mapping[str, object],
    *,
    file: str | None = None,
) -> Loaded[ConfigT]:
    """Return a configuration: explicit argument, else file, else environment, else default.

    Args:
        kind: The class of the configuration.
        section: What the file says, as ``read_section`` gave it.
        environment: Usually ``os.environ``; of it, only ``BACKSTAY_<FIELD>`` names are read, and
            an empty value counts as not set.
        explicit: Values given by the caller; None counts as not given.
        file: The file's name, for messages.

    Raises:
        ConfigError: A value is not allowed, or an explicit name is no field.
    """
    hints = get_type_hints(kind)
    names = sorted(item.name for item in fields(kind))
    given = {name: value for name, value in explicit.items() if value is not None}
    for name in sorted(given.keys() - set(names)):
        raise ConfigError(
            f"{name}: no such setting{suggestion(name, names)}; there are {', '.join(names)}"
        )
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for item in fields(kind):
        variable = ENVIRONMENT_PREFIX + item.name.upper()
        if item.name in given:
            raw, source = given[item.name], "argument"
        elif item.name in section:
            raw, source = section[item.name], f"file {file}"
        elif environment.get(variable):
            raw, source = environment[variable], f"environment {variable}"
        else:
            sources[item.name] = "default"
            continue
        sources[item.name] = source
        # A file has types of its own; elsewhere everything may arrive as text.
        kind_of_text = None if source == f"file {file}" else _plain_type(hints[item.name])
        with _named_source(sources):
            values[item.name] = _convert(item.name, raw, kind_of_text, item.metadata["parse"])
    with _named_source(sources):
        return Loaded(kind(**values), sources)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` with the nearest of the known names; empty if none is."""
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def read_section(
    path: Path, wanted: str, known_keys: Mapping[str, Set[str]]
) -> Mapping[str, object]:
    """Return one section of a TOML file; empty if the file has no such section.

    Args:
        path: The file.
        wanted: The name of the section.
        known_keys: For each section that a file may have, the keys it may have.

    Raises:
        ConfigError: The file cannot be read, is not TOML, or has an unknown section or key.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the file {str(path)!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file {str(path)!r} is not TOML: {error}") from error
    for name, content in document.items():
        if name not in known_keys or not isinstance(content, dict):
            allowed = " and ".join(f"[{section}]" for section in known_keys)
            raise ConfigError(f"{path}: unknown section {name!r}; there are {allowed}")
        for key in content:
            if key not in known_keys[name]:
                nearest = suggestion(key, sorted(known_keys[name]))
                raise ConfigError(f"{path}: unknown key {key!r} in [{name}]{nearest}")
    section: Mapping[str, object] = document.get(wanted, {})
    return section


@contextmanager
def _named_source(sources: Mapping[str, str]) -> Iterator[None]:
    """Add to an error, which begins with the setting's name, where the value came from."""
    try:
        yield
    except ConfigError as error:
        source = sources.get(str(error).partition(":")[0], "default")
        if source in ("default", "argument"):
            raise
        raise ConfigError(f"{error} (from {source})") from error


def _convert(
    name: str, raw: object, kind: type | None, parse: Callable[[str], object] | None
) -> object:
    """Return ``raw`` as a value of the field."""
    if parse is not None:
        if isinstance(raw, list) and all(isinstance(entry, str) for entry in raw):
            raw = ",".join(raw)
        return parse(raw) if isinstance(raw, str) else raw
    if not isinstance(raw, str):
        return raw
    if kind is int:
        try:
            return int(raw)
        except ValueError:
            raise ConfigError(f"{name}: {raw!r} is not an integer") from None
    if kind is bool:
        if raw.lower() not in _TRUE | _FALSE:
            raise ConfigError(f"{name}: {raw!r} is not true or false")
        return raw.lower() in _TRUE
    return raw


def _plain_type(hint: object) -> type | None:
    """Return the type behind ``str``, ``int``, ``bool`` or one of them or None; else None."""
    for kind in _TYPE_WORDS:
        if hint is kind or hint == kind | None:
            return kind
    return None
