"""What all of our clients of Kafka share: files with settings, and errors that say why.

Imports the errors only.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from backstay.errors import BackstayError, ConfigError

__all__ = ["BrokerTrouble", "settings_of_file"]

# What only developers of the client need: its thread, and how long it tried.
_NOISE = re.compile(r"^\[thrd:[^\]]*\]: | \(after \d+ms in state .*\)$")

log = logging.getLogger(__name__)


class BrokerTrouble:
    """Makes errors of failed calls, with the reason that the client has logged.

    The error of a call says only that the call failed. This object is the client's logger, by its
    setting ``logger``.
    """

    def __init__(self, brokers: str, kind: type[BackstayError]) -> None:
        """Prepare; ``kind`` is the error of a call that fails."""
        self._brokers = brokers
        self._kind = kind
        self._logged = ""

    def log(self, level: int, text: str, *words: str) -> None:
        """Keep the newest warning of the client."""
        log.debug(text, *words)
        if level >= logging.WARNING and words:
            self._logged = _NOISE.sub("", words[-1])

    def error(self, what: str, why: str) -> BackstayError:
        """Return the error of a call."""
        logged = f"; the last warning of the client: {self._logged}" if self._logged else ""
        return self._kind(f"{what}: {why} (brokers {self._brokers}{logged})")


def settings_of_file(path: Path, name: str) -> dict[str, str]:
    """Read lines of ``name=value``; lines that begin with # are comments.

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
