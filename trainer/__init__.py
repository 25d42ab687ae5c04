"""What a trainer uses: the client and the adapters for frameworks."""

if __name__ != "backstay.trainer":
    raise ImportError("import this package as backstay.trainer: the folder is a part of backstay")

from backstay.cluster.directory import ClusterInfo
from backstay.consensus.clock import clock_s
from backstay.trainer.client import Client, ClientStats
from backstay.trainer.pending import Pending
from backstay.trainer.table import KeyBatch, Table
from backstay.trainer.task_stream import TaskStream

__all__ = [
    "Client",
    "ClientStats",
    "ClusterInfo",
    "KeyBatch",
    "Pending",
    "Table",
    "TaskStream",
    "clock_s",
]
