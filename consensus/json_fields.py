"""Taking JSON records apart strictly: the fields expected, of the types expected, no others.

A record that a process of another version wrote must not be half understood. This module
imports ``backstay.errors`` and the standard library; it knows no record.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from backstay.errors import InvalidRequest

__all__ = [
    "NUMBER_MAX",
    "check_times",
    "dump",
    "fields_of",
    "parse_fields",
    "strings_of",
    "whole_numbers_of",
]

# What a JSON reader in any language keeps exactly as a signed 64-bit number.
NUMBER_MAX = 2**63 - 1


def dump(document: Mapping[str, object]) -> str:
    """Return an object as the text that the coordination store keeps."""
    return json.dumps(document, separators=(",", ":"))


def parse_fields(
    what: str, text: str, expected: Mapping[str, type], added: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the fields of a JSON object given as text.

    Args:
        what: Name of the record, for the error.
        text: The JSON text.
        expected: Exactly the fields it must have, with their types.
        added: Fields of ``expected`` that a record of before them lacks, with what they are then.

    Raises:
        InvalidRequest: It is not such a text.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"{what}: not JSON: {error}") from error
    if added and isinstance(document, dict):
        document = {**added, **document}
    return fields_of(what, document, expected)


def fields_of(what: str, value: object, expected: Mapping[str, type]) -> dict[str, Any]:
    """Return a JSON object's fields, after a check that they are exactly the expected ones.

    Raises:
        InvalidRequest: It is no such object; the message names the first thing that is wrong.
    """
    if not isinstance(value, dict) or value.keys() != expected.keys():
        raise InvalidRequest(f"{what}: expected an object with the fields {', '.join(expected)}")
    for name, kind in expected.items():
        if type(value[name]) is not kind:
            raise InvalidRequest(f"{what}: {name} is not of type {kind.__name__}")
    return value


def check_times(what: str, **times: float) -> None:
    """Refuse a time that is none: seconds since 1970-01-01 00:00 UTC are finite and not negative.

    Raises:
        InvalidRequest: One of them is no such number; the message names it.
    """
    for name, value in times.items():
        if not (math.isfinite(value) and value >= 0):
            raise InvalidRequest(f"{what}: {name} {value} is not in seconds since 1970")


def whole_numbers_of(what: str, name: str, values: object, lowest: int = 0) -> list[int]:
    """Return a list of integers, each ``lowest`` to ``NUMBER_MAX``.

    Raises:
        InvalidRequest: It is no such list.
    """
    # set(map(type, ...)) is one pass in C; a routing table has some 200,000 numbers.
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:
        raise InvalidRequest(f"{what}: {name} holds more than integers")
    if values and not (lowest <= min(values) and max(values) <= NUMBER_MAX):
        raise InvalidRequest(f"{what}: {name} holds a number outside {lowest} to {NUMBER_MAX}")
    return values


def strings_of(what: str, name: str, values: object) -> list[str]:
    """Return a list of strings.

    Raises:
        InvalidRequest: It is no such list.
    """
    if not isinstance(values, list) or not set(map(type, values)) <= {str}:
        raise InvalidRequest(f"{what}: {name} holds more than strings")
    return values
