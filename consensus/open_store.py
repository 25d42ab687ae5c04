"""Which coordination store a process uses: its settings, and opening it.

The only module that knows all kinds. It reads certificate files; everything else is done by the
store that it opens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from backstay.addresses import split_address
from backstay.config import SecurityConfig
from backstay.consensus.embedded_store import EmbeddedStore, check_members
from backstay.consensus.etcd_store import EtcdStore, EtcdTls
from backstay.consensus.memory_store import MemoryStore
from backstay.consensus.remote_store import RemoteStore
from backstay.consensus.store import CoordinationStore
from backstay.errors import ConfigError

__all__ = ["StoreConfig", "StoreKind", "open_store"]

StoreKind: TypeAlias = Literal["memory", "etcd", "embedded", "remote"]
DEADLINE_MS_MIN = 100
DEADLINE_MS_MAX = 60_000


@dataclass(frozen=True)
class StoreConfig:
    """Settings of a process's coordination store.

    Attributes:
        kind: ``etcd``; ``embedded``: this process is a member; ``remote``: members are reached
            by gRPC; ``memory``: within this process only.
        cluster: Name of the cluster; with etcd, all keys lie below ``/<cluster>/``.
        endpoints: etcd: client addresses of its members. remote: control addresses of pservers
            that are members.
        username: etcd only.
        password: etcd only; never shown.
        tls_ca_file: etcd only: the authority of its certificates; turns TLS on.
        tls_cert_file: etcd only: this client's certificate.
        tls_key_file: etcd only: the key of that certificate.
        listen: embedded only: this member's ``host:port`` in the Raft group.
        members: embedded only: all members, 1, 3 or 5; the same list everywhere.
        secret: embedded only: shared by the members; wanted beyond loopback; never shown.
        data_dir: embedded only: keeps log and snapshots over restarts.
        security: remote only: token and TLS of the cluster.
        deadline_ms: For each call as a whole.
    """

    kind: StoreKind
    cluster: str
    endpoints: tuple[str, ...] = ()
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls_ca_file: str | None = None
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    listen: str | None = None
    members: tuple[str, ...] = ()
    secret: str | None = field(default=None, repr=False)
    data_dir: str | None = None
    security: SecurityConfig | None = None
    deadline_ms: int = 3000

    def __post_init__(self) -> None:
        """Check the values, and that each belongs to the kind."""
        if self.kind not in get_args(StoreKind):
            kinds = ", ".join(get_args(StoreKind))
            raise ConfigError(f"store: {self.kind!r} is not one of {kinds}")
        if not self.cluster or "/" in self.cluster or not self.cluster.isprintable():
            raise ConfigError(f"cluster: {self.cluster!r} must be printable, without a slash")
        if not DEADLINE_MS_MIN <= self.deadline_ms <= DEADLINE_MS_MAX:
            raise ConfigError(
                f"store_deadline_ms: {self.deadline_ms} is not {DEADLINE_MS_MIN} to "
                f"{DEADLINE_MS_MAX}"
            )
        if self.kind in ("etcd", "remote"):
            if not self.endpoints:
                raise ConfigError(f"store_endpoints: none given; {self.kind} needs host:port")
            for endpoint in self.endpoints:
                split_address("store_endpoints", endpoint)
        if self.kind == "embedded":
            if self.listen is None:
                raise ConfigError("store_listen: not set; a member of the embedded store needs it")
            check_members(self.listen, self.members, self.secret)
        if (self.username is None) != (self.password is None):
            raise ConfigError("store_username, store_password: give both or neither")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ConfigError("store_tls_cert_file, store_tls_key_file: give both or neither")
        if self.tls_cert_file is not None and self.tls_ca_file is None:
            raise ConfigError("store_tls_cert_file: needs store_tls_ca_file, which turns TLS on")
        self._refuse_strangers()

    def _refuse_strangers(self) -> None:
        """Refuse a setting that this kind would ignore: somebody meant something else."""
        owner: dict[str, tuple[StoreKind, ...]] = {
            "endpoints": ("etcd", "remote"),
            "username": ("etcd",),
            "tls_ca_file": ("etcd",),
            "listen": ("embedded",),
            "members": ("embedded",),
            "secret": ("embedded",),
            "data_dir": ("embedded",),
        }
        for name, kinds in owner.items():
            if self.kind not in kinds and getattr(self, name):
                raise ConfigError(
                    f"store_{name}: is for {' and '.join(kinds)}, but store is {self.kind!r}"
                )


async def open_store(config: StoreConfig) -> CoordinationStore:
    """Return the store of a configuration; close it in the end.

    It need not be reachable yet: calls wait for it within their deadline.

    Raises:
        ConfigError: A certificate file cannot be read.
        ListenError: The embedded store's address cannot be listened on.
    """
    if config.kind == "etcd":
        return EtcdStore(
            config.endpoints,
            config.cluster,
            username=config.username,
            password=config.password,
            tls=_read_tls(config),
            deadline_ms=config.deadline_ms,
        )
    if config.kind == "remote":
        return RemoteStore(config.endpoints, config.security, deadline_ms=config.deadline_ms)
    if config.kind == "memory":
        return MemoryStore()
    assert config.listen is not None
    store = EmbeddedStore(
        config.listen,
        config.members,
        secret=config.secret,
        data_dir=None if config.data_dir is None else Path(config.data_dir),
        deadline_ms=config.deadline_ms,
    )
    await store.start()
    return store


def _read_tls(config: StoreConfig) -> EtcdTls | None:
    if config.tls_ca_file is None:
        return None
    ca = _read_pem("store_tls_ca_file", config.tls_ca_file)
    if config.tls_cert_file is None or config.tls_key_file is None:
        return EtcdTls(ca)
    return EtcdTls(
        ca,
        _read_pem("store_tls_cert_file", config.tls_cert_file),
        _read_pem("store_tls_key_file", config.tls_key_file),
    )


def _read_pem(setting: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror or error}") from error
