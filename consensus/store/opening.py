"""Opens the coordination store that a node's settings name.

The only module that knows all kinds. It reads certificate files; everything else is done by the
store that it opens.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from backstay.config import ServerConfig
from backstay.consensus.store import CoordinationStore
from backstay.consensus.store.embedded import EmbeddedStore
from backstay.consensus.store.etcd import EtcdStore, EtcdTls
from backstay.consensus.store.remote import RemoteStore
from backstay.errors import ConfigError

__all__ = ["OpenedStore", "open_etcd", "open_store"]


@dataclass(frozen=True)
class OpenedStore:
    """A store, and what people should know about it.

    Attributes:
        store: The store; close it in the end.
        embedded: The same, if this node is a member of the embedded one.
        description: Where it is, for the log.
        is_shared: Whether it is a store of its own, which others may use too: an etcd.
    """

    store: CoordinationStore
    embedded: EmbeddedStore | None
    description: str
    is_shared: bool


async def open_store(config: ServerConfig) -> OpenedStore:
    """Return the store; it need not answer yet. Call it while the event loop runs.

    Calls to the store wait for it within their deadline.

    Raises:
        ConfigError: A setting is wrong or a file cannot be read.
        ListenError: This member of the embedded store cannot listen.
    """
    endpoints = ", ".join(config.store_endpoints)
    if config.store == "etcd":
        etcd = open_etcd(config, config.cluster)
        return OpenedStore(etcd, None, f"etcd at {endpoints}", is_shared=True)
    if not config.is_store_member(config.node_id):
        remote = RemoteStore(config.store_endpoints, config, deadline_ms=config.store_deadline_ms)
        where = f"embedded, in the nodes at {endpoints}"
        return OpenedStore(remote, None, where, is_shared=False)
    members = {member.node_id: member.raft_address for member in config.store_members}
    if not members:
        members = {config.node_id: _free_loopback_address()}
    embedded = EmbeddedStore(
        members[config.node_id],
        tuple(members.values()),
        secret=config.store_secret,
        data_dir=None if config.store_data_dir is None else Path(config.store_data_dir),
        deadline_ms=config.store_deadline_ms,
    )
    await embedded.start()
    return OpenedStore(embedded, embedded, f"embedded, in {', '.join(members)}", is_shared=False)


def open_etcd(config: ServerConfig, cluster: str) -> EtcdStore:
    """Return the records of a cluster in the etcd that the settings name.

    Raises:
        ConfigError: A file cannot be read.
    """
    return EtcdStore(
        config.store_endpoints,
        cluster,
        username=config.store_username,
        password=config.store_password,
        tls=_read_tls(config),
        deadline_ms=config.store_deadline_ms,
    )


def _free_loopback_address() -> str:
    """Return an address for a store of one member, which no other process calls."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{bound.getsockname()[1]}"


def _read_tls(config: ServerConfig) -> EtcdTls | None:
    if config.store_tls_ca_file is None:
        return None
    ca = _read_pem("store_tls_ca_file", config.store_tls_ca_file)
    if config.store_tls_cert_file is None or config.store_tls_key_file is None:
        return EtcdTls(ca)
    return EtcdTls(
        ca,
        _read_pem("store_tls_cert_file", config.store_tls_cert_file),
        _read_pem("store_tls_key_file", config.store_tls_key_file),
    )


def _read_pem(setting: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror or error}") from error
