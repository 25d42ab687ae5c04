"""The two forms of a node's log."""

from __future__ import annotations

import json
import logging
import sys

from backstay.logs import JsonFormatter, TextFormatter, fields


def record(**extra: object) -> logging.LogRecord:
    made = logging.LogRecord("backstay.x", logging.WARNING, "f", 1, "%s is gone", ("ps-0",), None)
    made.__dict__.update(fields(**extra))
    return made


def test_text_has_the_fields_at_its_end() -> None:
    line = TextFormatter().format(record(instance=7))
    assert line.endswith("WARNING backstay.x: ps-0 is gone instance=7")


def test_json_has_the_fields_as_members() -> None:
    line = JsonFormatter("ps-1").format(record(instance=7))
    document = json.loads(line)
    assert document.pop("time").endswith("+00:00")
    assert document == {
        "level": "warning",
        "logger": "backstay.x",
        "node": "ps-1",
        "message": "ps-0 is gone",
        "instance": 7,
    }


def test_json_keeps_an_exception_in_one_line() -> None:
    made = record()
    try:
        raise ValueError("broken")
    except ValueError:
        made.exc_info = sys.exc_info()
    line = JsonFormatter("ps-1").format(made)
    assert "\n" not in line
    assert "ValueError: broken" in json.loads(line)["exception"]
