"""The list of a job's tables: every worker's model must make the same ones in the same order.

A batch's pushes are numbered by it, so two lists would let batches count twice or not at all.
Imports ``backstay.errors``; does no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

from backstay.errors import InvalidRequest, TableConflict

__all__ = ["TABLES_MAX", "check_tables"]

TABLES_MAX = 64


def check_tables(names: Sequence[str], known: Sequence[str]) -> None:
    """Check a worker's list of tables.

    Args:
        names: The worker's.
        known: The job's; empty: not known yet.

    Raises:
        TableConflict: They differ; the message says where.
        InvalidRequest: These cannot be the tables of a job.
    """
    if len(names) > TABLES_MAX or len(set(names)) != len(names):
        raise InvalidRequest(
            f"{len(names)} tables: at most {TABLES_MAX}, each once; a job's batches are numbered "
            "by batch and table"
        )
    if not known:
        return
    for number, (theirs, ours) in enumerate(zip(names, known, strict=False)):
        if theirs != ours:
            raise TableConflict(
                f"table {number} of this worker's model is {theirs!r}, of the job's {ours!r}: each "
                "worker must run the same model file with the same parameters"
            )
    if len(names) != len(known):
        raise TableConflict(
            f"this worker's model makes {len(names)} tables, the job has {len(known)} "
            f"({', '.join(known)}): each worker must run the same model file"
        )
