"""Checkpoints as files: format, manifests, storage back ends, verification, export.

What a node writes and reads of rows is done by the data plane; here are the names, the manifests
and everything that works on a checkpoint without a cluster. Imports nothing of servers and
trainers.
"""

if __name__ != "backstay.checkpoint":
    raise ImportError(f"import this package as backstay.checkpoint, not as {__name__}")
