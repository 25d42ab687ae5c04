"""The Rust half of backstay: the data plane of a node and of a trainer.

Bulk arrays cross here without a copy wherever they are contiguous, and the GIL is released
for the whole of every call that may take time.
"""

from typing import final

import numpy as np
from numpy.typing import NDArray

__version__: str
PROTOCOL_VERSION: int

def table_id(name: str) -> int:
    """Return the 64-bit id under which a table travels: a fixed hash of its name."""

def slots_of(keys: NDArray[np.uint64], slot_count: int) -> NDArray[np.uint32]:
    """Return the slot of each key, in the order given."""

def canonical_table(spec_json: str) -> str:
    """Check a table's JSON description and return it with every default filled in.

    Raises:
        ConfigError: A field is unknown, missing or out of range; the message names it.
    """

@final
class DataServer:
    """One node's data plane: rows, optimizers and sockets, on threads of its own."""

    def __init__(
        self,
        *,
        listen: str,
        cluster_id: str,
        node_id: str,
        instance: int,
        slot_count: int,
        token: str | None = None,
        tls_cert_pem: bytes | None = None,
        tls_key_pem: bytes | None = None,
        tls_client_ca_pem: bytes | None = None,
        io_threads: int = 2,
        max_frame_bytes: int = 268435456,
        max_keys_per_request: int = 4194304,
        max_connections: int = 4096,
        handshake_timeout_ms: int = 5000,
        stall_timeout_ms: int = 30000,
        memory_limit_bytes: int = 0,
    ) -> None: ...
    @property
    def address(self) -> str:
        """The bound ``host:port`` (the port is chosen by the system if 0 was asked for)."""
    def set_routing(self, version: int, owned: NDArray[np.bool_]) -> None:
        """Serve exactly the slots marked in ``owned`` [slot_count], as of this version."""
    def create_table(self, spec_json: str) -> None:
        """Create a table; a second call with the same settings changes nothing.

        Raises:
            TableConflict: The name exists with other settings.
        """
    def tables_json(self) -> str:
        """A JSON list: ``[{"spec": {...}, "id": n, "rows": n, "bytes": n}, ...]``."""
    def stats_json(self) -> str:
        """A JSON object of counters and gauges of this node."""
    def export_slot(
        self, table: str, slot: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.float32], NDArray[np.float32]]:
        """Return ``(keys [n], weights [n, dim], state [n, state_elements])``, sorted by key."""
    def import_slot(
        self,
        table: str,
        slot: int,
        keys: NDArray[np.uint64],
        weights: NDArray[np.float32],
        state: NDArray[np.float32],
    ) -> None:
        """Replace the rows of one slot of one table."""
    def slot_digest(self, slot: int) -> tuple[int, int]:
        """Return ``(position, digest)``; equal rows and stream memory give equal digests."""
    def stop(self, grace_ms: int) -> bool:
        """Stop taking requests, answer those being served, close. False if cut off by grace."""
