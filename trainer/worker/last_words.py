"""The last words of a worker's process: why it fails, where Kubernetes looks for it.

A node of Kubernetes keeps up to 4 KiB of a file with the status of a Pod that has ended. Without
such a file it keeps the last 2 KiB of the log, in which the beginning of a traceback may be
missing. The file is a mount of its own, so it can be written in a read-only root file system.
May import ``backstay.job``.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from backstay.job.tracebacks import cut_middle, traceback_within

__all__ = ["VARIABLE", "leave_last_words"]

# Names the file; the launcher that makes Pods sets it.
VARIABLE = "BACKSTAY_LAST_WORDS"
# More is cut off at its beginning.
BYTES_MAX = 4096

_LOG = logging.getLogger(__name__)


def leave_last_words(error: Exception, told: str = "") -> None:
    """Write why this process fails, if it runs where that is asked for.

    Args:
        error: Why; its traceback is kept.
        told: What is kept instead, of an error that says it; empty: it does not.
    """
    path = os.environ.get(VARIABLE, "")
    if not path:
        return
    words = cut_middle(told, BYTES_MAX) if told else traceback_within(error, BYTES_MAX)
    try:
        Path(path).write_text(words, encoding="utf-8", errors="replace")
    except OSError as failure:
        # The end of the log is kept instead.
        _LOG.warning("the last words of this worker are in its log only: %s", failure)
