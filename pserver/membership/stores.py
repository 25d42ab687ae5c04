"""Opens the coordination store that a node's settings name.

It only translates settings; what a store does is in ``backstay.consensus``.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from backstay.config import ServerConfig
from backstay.consensus.embedded_store import EmbeddedStore
from backstay.consensus.open_store import StoreConfig, open_store
from backstay.consensus.store import CoordinationStore

__all__ = ["OpenedStore", "open_for_node"]


@dataclass(frozen=True)
class OpenedStore:
    """A store, and what people should know about it.

    Attributes:
        store: The store.
        embedded: The same, if this node is a member of the embedded one.
        description: Where it is, for the log.
        is_shared: Whether it is a store of its own, which others may use too: an etcd.
    """

    store: CoordinationStore
    embedded: EmbeddedStore | None
    description: str
    is_shared: bool


async def open_for_node(config: ServerConfig) -> OpenedStore:
    """Return the store; it need not answer yet. Call it while the event loop runs.

    Raises:
        ConfigError: A setting is wrong or a file cannot be read.
        ListenError: This member of the embedded store cannot listen.
    """
    settings, description = _settings_of(config)
    store = await open_store(settings)
    embedded = store if isinstance(store, EmbeddedStore) else None
    return OpenedStore(store, embedded, description, is_shared=settings.kind == "etcd")


def _settings_of(config: ServerConfig) -> tuple[StoreConfig, str]:
    if config.store == "etcd":
        settings = StoreConfig(
            kind="etcd",
            cluster=config.cluster,
            endpoints=config.store_endpoints,
            username=config.store_username,
            password=config.store_password,
            tls_ca_file=config.store_tls_ca_file,
            tls_cert_file=config.store_tls_cert_file,
            tls_key_file=config.store_tls_key_file,
            deadline_ms=config.store_deadline_ms,
        )
        return settings, f"etcd at {', '.join(config.store_endpoints)}"
    if not config.is_store_member(config.node_id):
        settings = StoreConfig(
            kind="remote",
            cluster=config.cluster,
            endpoints=config.store_endpoints,
            security=config,
            deadline_ms=config.store_deadline_ms,
        )
        return settings, f"embedded, in the nodes at {', '.join(config.store_endpoints)}"
    members = {member.node_id: member.raft_address for member in config.store_members}
    if not members:
        members = {config.node_id: _free_loopback_address()}
    settings = StoreConfig(
        kind="embedded",
        cluster=config.cluster,
        listen=members[config.node_id],
        members=tuple(members.values()),
        secret=config.store_secret,
        data_dir=config.store_data_dir,
        deadline_ms=config.store_deadline_ms,
    )
    return settings, f"embedded, in {', '.join(members)}"


def _free_loopback_address() -> str:
    """Return an address for a member that has nobody to talk to."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{bound.getsockname()[1]}"
