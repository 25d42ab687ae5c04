"""A part of a table's description: a frozen dataclass that the core checks.

The rules stand in Rust (crates/backstay-core/src/spec). Python turns a setting into the type that
its annotation names, refuses one that is out of the core's range, and asks the core about the part
as a whole. Imports ``backstay._native`` and ``backstay.errors`` only; never does I/O.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from backstay import _native
from backstay.errors import ConfigError

__all__ = ["Part", "check_settings", "in_json", "kinds_of", "of_core"]

_Made = TypeVar("_Made")
_KINDS: dict[str, dict[str, type[Part]]] = {}
_HINTS: dict[type[Any], dict[str, Any]] = {}


class Part:
    """Base of the parts of a description.

    The class statement takes these arguments:
        at: The path of the part in a description.
        name: The JSON name, where one of several kinds of part stands at the path.
        word: Whether the JSON form is the name alone: there are no settings.
    """

    PATH: ClassVar[str] = ""
    NAME: ClassVar[str] = ""
    WORD: ClassVar[bool] = False

    def __init_subclass__(cls, at: str = "", name: str = "", *, word: bool = False) -> None:
        """Keep where such a part stands, and how it is read."""
        super().__init_subclass__()
        cls.PATH = at or cls.PATH
        cls.NAME, cls.WORD = name, word
        if name:
            _KINDS.setdefault(cls.PATH, {})[name] = cls

    def __post_init__(self) -> None:
        """Check the settings, each alone and then together."""
        path = self.path()
        check_settings(self, path)
        text = json.dumps({self.PATH: in_json(self)}, allow_nan=False)
        filled = json.loads(_native.canonical_part(text, path, type(self).__name__))[self.PATH]
        self.complete(filled[self.NAME] if self.NAME and not self.WORD else filled)

    @classmethod
    def path(cls) -> str:
        """Return where its settings stand in a description."""
        return f"{cls.PATH}.{cls.NAME}" if cls.NAME else cls.PATH

    def complete(self, filled: Mapping[str, Any]) -> None:
        """Take over settings that the core has filled in; it gives all of them."""

    def settings_in_json(self) -> dict[str, Any]:
        """Return the settings as JSON has them."""
        return {item.name: in_json(getattr(self, item.name)) for item in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def of_json(cls, settings: Mapping[str, Any]) -> Any:
        """Return the part with settings that the core gives; it has checked them."""
        return of_core(cls, settings)


def in_json(value: Any) -> Any:
    """Return a setting as JSON has it."""
    if isinstance(value, Part):
        if value.WORD:
            return value.NAME
        settings = value.settings_in_json()
        return {value.NAME: settings} if value.NAME else settings
    if isinstance(value, tuple):
        return [in_json(one) for one in value]
    return dict(sorted(value.items())) if isinstance(value, Mapping) else value


def kinds_of(path: str) -> Mapping[str, type[Part]]:
    """Return the kinds of part that can stand at a path, by their JSON names."""
    return _KINDS[path]


def of_core(kind: type[_Made], settings: Mapping[str, Any]) -> _Made:
    """Return a dataclass with settings of the core's JSON, which has checked them."""
    hints = _hints_of(kind)
    made = object.__new__(kind)
    for item in fields(kind):  # type: ignore[arg-type]
        value = settings.get(item.name, item.default)
        object.__setattr__(made, item.name, _read(hints[item.name], value))
    return made


def _read(hint: Any, value: Any) -> Any:
    if get_origin(hint) is tuple:
        return tuple(value)
    for kind in get_args(hint) or (hint,):
        if not (isinstance(kind, type) and issubclass(kind, Part)):
            continue
        kinds = _KINDS.get(kind.PATH, {})
        if isinstance(value, str) and value in kinds:
            return kinds[value]()
        if isinstance(value, dict) and len(value) == 1 and next(iter(value)) in kinds:
            ((name, settings),) = value.items()
            return kinds[name].of_json(settings)
        if isinstance(value, dict) and not kinds:
            return kind.of_json(value)
    return value


def check_settings(owner: Any, path: str) -> None:
    """Check each field of a dataclass by its annotation and the core's range.

    Integers and floats of NumPy become Python's.

    Raises:
        ConfigError: One is wrong; the message names it and says what is allowed.
    """
    for name, hint in _hints_of(type(owner)).items():
        where = f"{type(owner).__name__}.{name}"
        value = _checked(where, getattr(owner, name), hint, f"{path}.{name}" if path else name)
        object.__setattr__(owner, name, value)


def _hints_of(kind: type[Any]) -> dict[str, Any]:
    if kind not in _HINTS:
        hints = get_type_hints(kind)
        _HINTS[kind] = {item.name: hints[item.name] for item in fields(kind)}
    return _HINTS[kind]


def _checked(where: str, value: Any, hint: Any, path: str) -> Any:
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None and NoneType in options:
        return None
    words: list[str] = []
    for option in options:
        kind = get_origin(option) or option
        if option in _SIMPLE:
            return _SIMPLE[option](where, value, _native.TABLE_RANGES.get(path))
        if kind is Literal:
            if isinstance(value, str) and value in get_args(option):
                return value
            words += get_args(option) if len(options) == 1 else map(repr, get_args(option))
        elif kind is tuple and isinstance(value, (list, tuple)):
            inner = get_args(option)[0]
            return tuple(_checked(f"{where}[{at}]", one, inner, "") for at, one in enumerate(value))
        elif kind is Mapping and isinstance(value, Mapping):
            inner = get_args(option)[1]
            return {key: _checked(f"{where}.{key}", one, inner, "") for key, one in value.items()}
        elif isinstance(value, kind):
            return value
        else:
            words.append("None" if option is NoneType else _with_article(kind.__name__))
    raise ConfigError(f"{where} is {value!r:.200}; allowed: {', '.join(words)}")


def _with_article(name: str) -> str:
    return f"an {name}" if name[0] in "AEIOU" else f"a {name}"


def _integer(where: str, value: Any, span: tuple[float, float] | None) -> int:
    low, high = span or (0, 2**64 - 1)
    try:
        # True is an int to Python, but it is no size.
        number = None if isinstance(value, bool) else int(value.__index__())
    except AttributeError:
        number = None
    if number is None or not low <= number <= high:
        raise ConfigError(f"{where} is {value!r}; allowed: an integer from {low} to {high}")
    return number


def _number(where: str, value: Any, span: tuple[float, float] | None) -> float:
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    low, high = span or (-math.inf, math.inf)
    if not (math.isfinite(number) and low <= number <= high):
        allowed = f"a number from {low!r} to {high!r}" if span else "a finite number"
        raise ConfigError(f"{where} is {value!r}; allowed: {allowed}")
    return number


def _flag(where: str, value: Any, _: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where} is {value!r}; allowed: True or False")
    return value


_SIMPLE: dict[Any, Any] = {int: _integer, float: _number, bool: _flag}
