"""Opens the coordination store that a node's settings name.

It only builds; what a store does is in ``backstay.consensus``.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from backstay.consensus.embedded_store import EmbeddedStore
from backstay.consensus.remote_store import RemoteStore

from backstay.config import ServerConfig
from backstay.consensus.etcd_store import EtcdStore, EtcdTls
from backstay.consensus.store import CoordinationStore
from backstay.errors import ConfigError

__all__ = ["OpenedStore", "open_store"]


@dataclass(frozen=True)
class OpenedStore:
    """A store, and what people should know about it.

    Attributes:
        store: The store.
        embedded: The same, if this node is a member of the embedded one.
        description: Where it is, for the log.
    """

    store: CoordinationStore
    embedded: EmbeddedStore | None
    description: str


def open_store(config: ServerConfig) -> OpenedStore:
    """Return the store; nothing is connected yet. Call it while the event loop runs.

    Raises:
        ConfigError: A setting is wrong or a file cannot be read.
    """
    if config.store == "etcd":
        return _open_etcd(config)
    if not config.is_store_member(config.node_id):
        remote = RemoteStore(config.store_endpoints, config, deadline_ms=config.store_timeout_ms)
        where = ", ".join(config.store_endpoints)
        return OpenedStore(remote, None, f"embedded, in the nodes at {where}")
    members = {member.node_id: member.raft_address for member in config.store_members}
    if not members:
        members = {config.node_id: _free_loopback_address()}
    embedded = EmbeddedStore(
        members[config.node_id],
        list(members.values()),
        secret=config.store_secret,
        data_dir=Path(config.store_directory) if config.store_directory else None,
        deadline_ms=config.store_timeout_ms,
    )
    return OpenedStore(embedded, embedded, f"embedded, in {', '.join(members)}")


def _open_etcd(config: ServerConfig) -> OpenedStore:
    tls = None
    if config.store_ca_file is not None:
        tls = EtcdTls(
            _read("store_ca_file", config.store_ca_file),
            _read("store_cert_file", config.store_cert_file) if config.store_cert_file else None,
            _read("store_key_file", config.store_key_file) if config.store_key_file else None,
        )
    store = EtcdStore(
        config.store_endpoints,
        config.cluster,
        username=config.store_username,
        password=config.store_password,
        tls=tls,
        deadline_ms=config.store_timeout_ms,
    )
    return OpenedStore(store, None, f"etcd at {', '.join(config.store_endpoints)}")


def _free_loopback_address() -> str:
    """Return an address for a member that has nobody to talk to."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{bound.getsockname()[1]}"


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {path!r}: {error.strerror}") from error
