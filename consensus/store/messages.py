"""The store's values as they travel between processes: to and from the generated messages.

Imports ``consensus.store`` and the generated code only; the service and the remote store both
use this one pair of functions per value.
"""

from __future__ import annotations

from backstay._proto.v1 import store_pb2
from backstay.consensus.store import (
    Compare,
    Delete,
    Event,
    Get,
    KeyValue,
    Operation,
    Put,
    RangeResult,
    Txn,
    TxnResult,
    WatchBatch,
)
from backstay.errors import ProtocolError

__all__ = [
    "batch_from_message",
    "batch_to_message",
    "range_from_message",
    "range_to_message",
    "result_from_message",
    "result_to_message",
    "txn_from_message",
    "txn_to_message",
]


def range_to_message(result: RangeResult) -> store_pb2.StoreRangeResponse:
    """Return the answer to Range."""
    return store_pb2.StoreRangeResponse(
        items=map(_item_to_message, result.items), revision=result.revision
    )


def range_from_message(message: store_pb2.StoreRangeResponse) -> RangeResult:
    """Return what an answer to Range holds."""
    return RangeResult(tuple(map(_item_from_message, message.items)), message.revision)


def txn_to_message(txn: Txn) -> store_pb2.StoreTransactRequest:
    """Return the request for a transaction."""
    return store_pb2.StoreTransactRequest(
        compare=map(_compare_to_message, txn.compare),
        success=map(_operation_to_message, txn.success),
        failure=map(_operation_to_message, txn.failure),
    )


def txn_from_message(message: store_pb2.StoreTransactRequest) -> Txn:
    """Return the transaction in a request.

    Raises:
        ProtocolError: It has a part of a later version.
        InvalidRequest: A part is over its limit.
    """
    return Txn(
        tuple(map(_compare_from_message, message.compare)),
        tuple(map(_operation_from_message, message.success)),
        tuple(map(_operation_from_message, message.failure)),
    )


def result_to_message(result: TxnResult) -> store_pb2.StoreTransactResponse:
    """Return the answer to Transact."""
    return store_pb2.StoreTransactResponse(
        succeeded=result.succeeded,
        revision=result.revision,
        results=[
            store_pb2.StoreResult(item=None if item is None else _item_to_message(item))
            for item in result.results
        ],
    )


def result_from_message(message: store_pb2.StoreTransactResponse) -> TxnResult:
    """Return what an answer to Transact holds."""
    return TxnResult(
        message.succeeded,
        message.revision,
        tuple(
            _item_from_message(each.item) if each.HasField("item") else None
            for each in message.results
        ),
    )


def batch_to_message(batch: WatchBatch) -> store_pb2.StoreWatchResponse:
    """Return the message for a batch."""
    events = []
    for event in batch.events:
        item = store_pb2.StoreItem(
            key=event.key,
            value=event.value,
            create_revision=event.create_revision,
            mod_revision=event.revision,
            version=event.version,
            lease=event.lease,
        )
        events.append(store_pb2.StoreEvent(deleted=event.kind == "delete", item=item))
    return store_pb2.StoreWatchResponse(revision=batch.revision, events=events)


def batch_from_message(message: store_pb2.StoreWatchResponse) -> WatchBatch | None:
    """Return the batch in a message, None if it is a sign of life only."""
    if not message.events:
        return None
    return WatchBatch(
        message.revision,
        tuple(
            Event(
                "delete" if event.deleted else "put",
                event.item.key,
                event.item.value,
                event.item.mod_revision,
                event.item.create_revision,
                event.item.version,
                event.item.lease,
            )
            for event in message.events
        ),
    )


def _item_to_message(item: KeyValue) -> store_pb2.StoreItem:
    return store_pb2.StoreItem(
        key=item.key,
        value=item.value,
        create_revision=item.create_revision,
        mod_revision=item.mod_revision,
        version=item.version,
        lease=item.lease,
    )


def _item_from_message(item: store_pb2.StoreItem) -> KeyValue:
    return KeyValue(
        item.key, item.value, item.create_revision, item.mod_revision, item.version, item.lease
    )


def _compare_to_message(compare: Compare) -> store_pb2.StoreCompare:
    if compare.target == "value":
        return store_pb2.StoreCompare(key=compare.key, value=str(compare.operand))
    if compare.target == "exists":
        return store_pb2.StoreCompare(key=compare.key, exists=bool(compare.operand))
    number = int(compare.operand)
    if compare.target == "version":
        return store_pb2.StoreCompare(key=compare.key, version=number)
    if compare.target == "create_revision":
        return store_pb2.StoreCompare(key=compare.key, create_revision=number)
    return store_pb2.StoreCompare(key=compare.key, mod_revision=number)


def _compare_from_message(message: store_pb2.StoreCompare) -> Compare:
    target = message.WhichOneof("target")
    if target is None:
        raise ProtocolError("transaction: a comparison without a target; another version?")
    return Compare(message.key, target, getattr(message, target))


def _operation_to_message(operation: Operation) -> store_pb2.StoreOperation:
    if isinstance(operation, Put):
        put = store_pb2.StorePut(key=operation.key, value=operation.value, lease=operation.lease)
        return store_pb2.StoreOperation(put=put)
    if isinstance(operation, Get):
        return store_pb2.StoreOperation(get=operation.key)
    return store_pb2.StoreOperation(delete=operation.key)


def _operation_from_message(message: store_pb2.StoreOperation) -> Operation:
    kind = message.WhichOneof("operation")
    if kind == "put":
        return Put(message.put.key, message.put.value, message.put.lease)
    if kind == "delete":
        return Delete(message.delete)
    if kind == "get":
        return Get(message.get)
    raise ProtocolError("transaction: an operation without content; another version?")
