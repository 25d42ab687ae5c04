"""Checks of a reader's options, and imports of packages that only some readers need.

Imports the errors only.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from backstay.errors import ConfigError

__all__ = ["check_options", "optional_import", "text_tuple"]


_NAMES: Mapping[type, str] = {
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    Mapping: "a mapping of names to values",
}


def check_options(kind: str, options: Mapping[str, Any], allowed: Mapping[str, type]) -> None:
    """Refuse an option that this reader does not have, or that is of another type.

    Raises:
        ConfigError: It names the option and what is allowed.
    """
    for name, value in options.items():
        if name not in allowed:
            raise ConfigError(
                f"options: {kind} has no option {name!r}; it has {', '.join(sorted(allowed))}"
            )
        expected = allowed[name]
        if expected is tuple:
            text_tuple(name, value)
        elif not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
            wanted = _NAMES.get(expected, expected.__name__)
            raise ConfigError(f"options.{name}: is {value!r}; {wanted} is expected")


def text_tuple(name: str, value: Any) -> tuple[str, ...]:
    """Return a list of strings of the options as a tuple.

    Raises:
        ConfigError: It is no list of strings, is empty, or names something twice.
    """
    if (
        isinstance(value, str)
        or not isinstance(value, (list, tuple))
        or not value
        or not all(isinstance(each, str) and each for each in value)
        or len(set(value)) != len(value)
    ):
        raise ConfigError(f"options.{name}: is {value!r}; a list of different names is expected")
    return tuple(value)


def optional_import(module: str, extra: str, what: str) -> Any:
    """Return a module of a package that backstay installs with an extra.

    Raises:
        ConfigError: It is not installed; the message says what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ConfigError(
            f"{what} needs {package}, which is not installed: pip install 'backstay[{extra}]'"
        ) from error
