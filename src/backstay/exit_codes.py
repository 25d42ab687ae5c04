"""How the commands of a job end: their exit codes.

Only this module has the codes; docs/reference/cli.md lists them, and a test compares both.
"""

from __future__ import annotations

from backstay.exits import EXIT_WRONG_SETTING

__all__ = [
    "EXIT_CODES",
    "EXIT_DEAD_LETTERS",
    "EXIT_FAILED",
    "EXIT_NEVER_REACHED",
    "EXIT_NO_ANSWER",
    "EXIT_STOPPED",
    "EXIT_UNSAVED",
    "EXIT_WRONG_ARGUMENTS",
    "JOBS_EXIT_CODES",
    "ZOO_EXIT_CODES",
]

EXIT_FAILED = 1
EXIT_WRONG_ARGUMENTS = EXIT_WRONG_SETTING
EXIT_DEAD_LETTERS = 3
EXIT_NO_ANSWER = 3
EXIT_NEVER_REACHED = 4
EXIT_UNSAVED = 5
EXIT_STOPPED = 130
# The exit codes of train, evaluate and predict.
EXIT_CODES = {
    0: "finished",
    EXIT_FAILED: "failed; the message says why, and the same command goes on where it was",
    EXIT_WRONG_ARGUMENTS: "a field of the job, an argument or a setting is wrong",
    EXIT_DEAD_LETTERS: (
        "finished, but for tasks that failed too often (`backstay jobs show` names them)"
    ),
    EXIT_NEVER_REACHED: "no server answered within `first_contact_timeout_ms`; nothing was begun",
    EXIT_UNSAVED: "all tasks are done, but the last checkpoint could not be written",
    EXIT_STOPPED: ("stopped by Ctrl-C, `backstay jobs stop` or an alert; the same command goes on"),
}
JOBS_EXIT_CODES = {
    0: "it was done, or shown",
    EXIT_FAILED: "it could not be done; the message says why",
    EXIT_WRONG_ARGUMENTS: "an argument or a setting is wrong",
    EXIT_NO_ANSWER: "no server or no job master answers, or there is no such job",
}
ZOO_EXIT_CODES = {
    0: "it was done",
    EXIT_FAILED: "the builder failed, or a file cannot be written; the message says why",
    EXIT_WRONG_ARGUMENTS: "an argument is wrong, a file is there already, or there is no builder",
}
