"""JSON objects out of bytes: what is a record, and what is wrong with the others.

Pure. Imports the readers' batch only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from backstay.data.batch import Record

__all__ = ["json_object"]


def json_object(content: bytes, columns: Sequence[str]) -> tuple[Record, str]:
    """Return the object, and what is wrong with it; empty: nothing.

    Args:
        content: UTF-8.
        columns: Names that it must have.
    """
    try:
        record = json.loads(content.decode())
    except UnicodeDecodeError as error:
        return None, f"not UTF-8: {error.reason} at byte {error.start} of the record"
    except json.JSONDecodeError as error:
        return None, f"not JSON: {error.msg} at character {error.pos} of the record"
    except RecursionError:
        return None, "JSON that is nested too deeply"
    except ValueError as error:
        # A number of thousands of digits, say.
        return None, f"JSON that Python does not take: {error}"
    if not isinstance(record, dict):
        return None, f"a JSON {type(record).__name__}, not an object"
    missing = [name for name in columns if name not in record]
    return (None, f"has no {missing}") if missing else (record, "")
