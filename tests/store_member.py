"""One member of the embedded store as a process, with its gRPC service: to be killed by tests.

Usage: ``python -m tests.store_member LISTEN MEMBERS CONTROL [DATA_DIR]``
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from backstay._proto.v1 import store_pb2_grpc
from backstay.config import ServerConfig
from backstay.consensus.store.embedded import EmbeddedStore
from backstay.control_server import ControlServer
from backstay.pserver.services.store import StoreService


async def serve(store: EmbeddedStore, listen_control: str) -> ControlServer:
    """Start the gRPC service of a store in this process."""
    server = ControlServer(ServerConfig(listen_control=listen_control))
    service = StoreService(store, lambda: store.leader is not None)
    store_pb2_grpc.add_StoreServiceServicer_to_server(service, server.services)
    await server.start(["backstay.v1.StoreService"])
    return server


async def main() -> None:
    """Run until killed."""
    logging.basicConfig(level=logging.INFO)
    listen, members, control = sys.argv[1:4]
    folder = Path(sys.argv[4]) if len(sys.argv) > 4 else None
    store = EmbeddedStore(listen, members.split(","), data_dir=folder)
    await store.start()
    server = await serve(store, control)
    await asyncio.Event().wait()
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(main())
