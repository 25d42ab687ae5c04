"""What all clients of Kafka's brokers here share: their settings, and what they tell when it fails.

Imports the errors only.
"""

from __future__ import annotations

import logging
from pathlib import Path

from backstay.errors import BackstayError, ConfigError

__all__ = ["BrokerTrouble", "settings_of_file"]

log = logging.getLogger(__name__)


class BrokerTrouble:
    """What a client has told last of its brokers: a call that fails says only that it did.

    It stands in the place of the client's logger, the setting ``logger``.
    """

    def __init__(self, brokers: str, kind: type[BackstayError]) -> None:
        """Prepare; ``kind`` is the error of a call that fails."""
        self._brokers = brokers
        self._kind = kind
        self._told = ""

    def log(self, level: int, text: str, *words: str) -> None:
        """Take what the client logs: that is how it tells."""
        log.debug(text, *words)
        if level >= logging.WARNING and words:
            self._told = words[-1]

    def error(self, what: str, why: str) -> BackstayError:
        """Return the error of a call."""
        told = f"; the last that was heard: {self._told}" if self._told else ""
        return self._kind(f"{what}: {why} (brokers {self._brokers}{told})")


def settings_of_file(path: Path, name: str) -> dict[str, str]:
    """Read lines of ``name=value``; those that begin with # say nothing.

    Args:
        path: The file.
        name: Of the setting that names it, for the error.

    Raises:
        ConfigError: It cannot be read, or has another line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: {path}: {error}") from error
    found = {}
    for number, line in enumerate(lines, 1):
        setting, sign, value = line.partition("=")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if not sign:
            raise ConfigError(f"{name}: {path}, line {number}: expected name=value")
        found[setting.strip()] = value.strip()
    return found
