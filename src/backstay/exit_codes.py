"""How the programs of backstay end: each exit code has one meaning.

``backstay``, ``pserver`` and ``pserverctl``, and the processes that they start, end with these
codes. docs/reference/cli.md shows the table. Imports nothing of backstay.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = [
    "CONTROL_CODES",
    "JOBS_CODES",
    "JOB_CODES",
    "LOCAL_CODES",
    "MASTER_CODES",
    "SERVE_CODES",
    "SIGNAL_BASE",
    "ZOO_CODES",
    "ExitCode",
]


class ExitCode(IntEnum):
    """An exit code, and its meaning for people."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> ExitCode:
        """Make a member of a number and a text."""
        code = int.__new__(cls, value)
        code._value_ = value
        code.meaning = meaning
        return code

    # Otherwise Python 3.10 would write the name.
    __str__ = int.__repr__

    OK = 0, "it was done, or all is well; or a signal stopped a server or a job master"
    FAILED = 1, "it failed, could not be done, or what was looked at is not well"
    WRONG_SETTING = 2, "an argument, a setting or a field of the job is wrong"
    NO_ANSWER = 3, "no server or job master answers, it refused the call, or there is no such job"
    NEVER_REACHED = 4, "no server answered within `first_contact_timeout_ms`; nothing was begun"
    UNSAVED = 5, "all tasks are done, but the last checkpoint could not be written"
    DEAD_LETTERS = (
        6,
        "finished, but for tasks that failed too often (`backstay jobs show` names them)",
    )
    CANNOT_LISTEN = 7, "an address cannot be listened on"
    REPLACED = 8, "another process is the job master"
    JOB_FAILED = 9, "the job failed"
    PARENT_GONE = 70, "the process that started this one is gone"
    AGAIN = 75, "this run of a schedule is not over; another Pod goes on with it"
    NO_SUCH_COMMAND = 127, "there is no such command to run"
    STOPPED = (
        130,
        "stopped by Ctrl-C, `backstay jobs stop` or an alert; the same command goes on",
    )


# A command that a signal has ended: this and the signal's number.
SIGNAL_BASE = 128
_COMMON = (ExitCode.OK, ExitCode.FAILED, ExitCode.WRONG_SETTING)
# The codes of ``pserver serve``.
SERVE_CODES = (*_COMMON, ExitCode.CANNOT_LISTEN)
# Of ``pserverctl``.
CONTROL_CODES = (*_COMMON, ExitCode.NO_ANSWER)
# Of ``backstay train``, ``evaluate`` and ``predict``.
JOB_CODES = (
    *_COMMON,
    *(ExitCode.NEVER_REACHED, ExitCode.UNSAVED, ExitCode.DEAD_LETTERS, ExitCode.STOPPED),
)
# Of ``backstay jobs`` and ``export``.
JOBS_CODES = CONTROL_CODES
ZOO_CODES = _COMMON
# Of ``backstay master``.
MASTER_CODES = (
    *_COMMON,
    *(ExitCode.UNSAVED, ExitCode.CANNOT_LISTEN, ExitCode.REPLACED, ExitCode.JOB_FAILED),
)
# Of ``backstay local`` without a command, or before it runs.
LOCAL_CODES = (*_COMMON, ExitCode.NO_SUCH_COMMAND)
