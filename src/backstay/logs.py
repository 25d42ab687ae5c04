"""The log of a node: to standard error, as text for people or as one JSON object a line.

A line may carry fields (``log.info("...", extra=fields(slot=3))``): the text form appends them as
``slot=3``, the JSON form has them as members, so that a search needs no parsing of sentences.
It imports nothing of the package but the native logger.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from collections.abc import Mapping
from datetime import datetime, timezone

from backstay._native import log_to_stderr

__all__ = ["JsonFormatter", "TextFormatter", "fields", "message_of", "set_up_logging"]

TEXT_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_KEY = "backstay_fields"
# What TEXT_FORMAT puts before the message.
_BEGINNING = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ +\S+: ")


def message_of(line: str) -> str:
    """Return a line of a text log without its time, level and logger."""
    return line[found.end() :] if (found := _BEGINNING.match(line)) else line


def fields(**values: object) -> dict[str, Mapping[str, object]]:
    """Return the ``extra`` of a log call that carries these fields."""
    return {_KEY: values}


class TextFormatter(logging.Formatter):
    """Lines for people, with the fields at the end."""

    def __init__(self) -> None:
        super().__init__(TEXT_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        """Return the line without exception and stack, which logging appends."""
        line = super().formatMessage(record)
        carried: Mapping[str, object] = getattr(record, _KEY, {})
        return " ".join([line, *(f"{name}={value}" for name, value in carried.items())])


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, node, message, and the fields."""

    def __init__(self, node_id: str) -> None:
        super().__init__()
        self._node_id = node_id

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        moment = datetime.fromtimestamp(record.created, tz=timezone.utc)
        line: dict[str, object] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "node": self._node_id,
            "message": record.getMessage(),
            **getattr(record, _KEY, {}),
        }
        if record.exc_info is not None:
            line["exception"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line, default=str)


def set_up_logging(level: str, form: str, node_id: str, *, trace_pushes: bool = False) -> None:
    """Log to standard error from now on, Python's side and the data plane's."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(node_id) if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    log_to_stderr(level, form, node_id, trace_pushes)
