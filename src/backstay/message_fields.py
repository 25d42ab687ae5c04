"""Plain values in the fields of protobuf messages, by their names: a spec travels whole.

A spec is a dataclass, made of plain values and into them by ``backstay.settings``. So a new field
of a spec stands in its dataclass and in its message, and in nothing between. This module imports
protobuf only; it knows no message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

__all__ = ["fill", "values_of"]


def fill(message: Message, values: Mapping[str, Any]) -> None:
    """Set the fields of a message.

    Args:
        message: Empty so far.
        values: By the names of its fields: numbers, texts, lists, mappings; None: not set.
    """
    for name, value in values.items():
        field = message.DESCRIPTOR.fields_by_name[name]
        if value is None:
            continue
        if field.is_repeated:
            into = getattr(message, name)
            into.update(value) if isinstance(value, Mapping) else into.extend(value)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            getattr(message, name).SetInParent()
            fill(getattr(message, name), value)
        else:
            setattr(message, name, value)


def values_of(message: Message) -> dict[str, Any]:
    """Return the fields of a message as ``fill`` takes them; None of one that is not set."""
    return {name: _value(message, name) for name in message.DESCRIPTOR.fields_by_name}


def _value(message: Message, name: str) -> Any:
    field = message.DESCRIPTOR.fields_by_name[name]
    value = getattr(message, name)
    if field.is_repeated:
        return dict(value) if isinstance(value, Mapping) else tuple(value)
    if field.has_presence and not message.HasField(name):
        return None
    return values_of(value) if field.type == FieldDescriptor.TYPE_MESSAGE else value
