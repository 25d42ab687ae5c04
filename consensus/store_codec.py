"""Commands to a ``StoreState`` as text, for a replicated log; and carrying them out.

A command is a JSON list: its name, then its arguments. This module imports the store's values
and its state; it does no I/O and reads no clock.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from backstay.consensus.store import Compare, Delete, Get, Operation, Put, Txn
from backstay.consensus.store_state import StoreState
from backstay.errors import InvalidRequest

__all__ = ["command", "execute", "transaction_command"]


def command(name: str, *arguments: int) -> str:
    """Return a command without structure: grant, keepalive, revoke, lead, tick or barrier."""
    return json.dumps([name, *arguments])


def transaction_command(txn: Txn) -> str:
    """Return the command for a transaction."""
    return json.dumps(
        [
            "transaction",
            [[each.key, each.target, each.operand] for each in txn.compare],
            [_operation_to_json(each) for each in txn.success],
            [_operation_to_json(each) for each in txn.failure],
        ],
        separators=(",", ":"),
    )


def execute(state: StoreState, text: str) -> Any:
    """Carry a command out and return its result.

    Raises:
        LeaseLost: The command concerns a lease that is over.
        InvalidRequest: It is no command, or one of a later version.
    """
    try:
        name, *arguments = json.loads(text)
        match name, arguments:
            case "transaction", [compare, success, failure]:
                return state.transact(_transaction(compare, success, failure))
            case "grant", [ttl_ms]:
                return state.grant(ttl_ms)
            case "keepalive", [lease]:
                return state.keepalive(lease)
            case "revoke", [lease]:
                return state.revoke(lease)
            case "lead", [term, silent_ms]:
                return state.take_lead(term, silent_ms)
            case "tick", [term, elapsed_ms]:
                return state.tick(term, elapsed_ms)
            case "barrier", []:
                return None
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(f"store command {text[:100]!r}: {error}") from error
    raise InvalidRequest(f"store command {text[:100]!r}: unknown; a member of a later version?")


def _transaction(compare: Any, success: Any, failure: Any) -> Txn:
    return Txn(
        tuple(Compare(*each) for each in compare),
        tuple(_operation_from_json(each) for each in success),
        tuple(_operation_from_json(each) for each in failure),
    )


def _operation_to_json(operation: Operation) -> list[str | int]:
    if isinstance(operation, Put):
        return ["put", operation.key, operation.value, operation.lease]
    return ["get" if isinstance(operation, Get) else "delete", operation.key]


def _operation_from_json(value: Sequence[Any]) -> Operation:
    kind, *arguments = value
    kinds: dict[str, type[Put | Get | Delete]] = {"put": Put, "get": Get, "delete": Delete}
    return kinds[kind](*arguments)
