"""What the translations of frameworks' optimizers to the servers' share.

Pure: values in, values out. A framework's own part is ``translate.py`` in its folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from backstay.errors import ConfigError

__all__ = ["rate_of_table", "translation_of"]

TranslationT = TypeVar("TranslationT")


def rate_of_table(first_rate: float) -> float:
    """Return the learning rate that a table is given; each push scales it to the current one.

    Args:
        first_rate: The scheduler's first rate, not its current one: the table's must be the same in
            every trainer, whenever it joins. 1.0 stands for 0 (warm-up).
    """
    return first_rate if first_rate > 0.0 else 1.0


def translation_of(
    translations: Mapping[type, TranslationT], optimizer: Any, package: str
) -> TranslationT:
    """Return what translates an optimizer of a framework into that of a table.

    Args:
        translations: By the exact class: a subclass may compute something else.
        optimizer: The framework's.
        package: Where its optimizers are, for the message.

    Raises:
        ConfigError: The servers have none like it.
    """
    translation = translations.get(type(optimizer))
    if translation is None:
        *most, last = (kind.__name__ for kind in translations)
        raise ConfigError(
            f"{package}.{type(optimizer).__name__} does not run on the servers; "
            f"{', '.join(most)} and {last} do"
        )
    return translation
