"""Settings that say where a cluster keeps its records, and how a node gets there.

They are part of a server's configuration (``backstay.config``); this module imports
``backstay.settings``, ``backstay.addresses`` and ``backstay.errors`` only, and does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

from backstay.addresses import is_loopback, split_address
from backstay.errors import ConfigError
from backstay.settings import check_name, setting

__all__ = ["StoreConfig", "StoreMember", "parse_addresses", "parse_members"]

STORES = ("embedded", "etcd")
# More members make the embedded store slower and no safer; an even number tolerates no more.
STORE_MEMBER_COUNTS = (1, 3, 5)


@dataclass(frozen=True)
class StoreMember:
    """One member of the embedded store: a node's id, and the address of its Raft port."""

    node_id: str
    raft_address: str

    def __str__(self) -> str:
        """Return it as it is written in the setting: ``id=host:port``."""
        return f"{self.node_id}={self.raft_address}"


def parse_members(text: str) -> tuple[StoreMember, ...]:
    """Return the members written as ``"ps-0=host:port,ps-1=host:port"``.

    Raises:
        ConfigError: An entry is not of that form.
    """
    members = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        node_id, separator, address = entry.partition("=")
        if not separator:
            raise ConfigError(f"store_members: {entry!r} is not of the form node-id=host:port")
        members.append(StoreMember(node_id.strip(), address.strip()))
    return tuple(members)


def parse_addresses(text: str) -> tuple[str, ...]:
    """Return the addresses written as ``"host:port,host:port"``; each is judged later."""
    return tuple(filter(None, (part.strip() for part in text.split(","))))


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """Where the cluster keeps its records. The first settings of a server."""

    store: str = setting(
        "embedded",
        "Where the cluster keeps its records: embedded or etcd.",
        choices=STORES,
    )
    store_endpoints: tuple[str, ...] = setting(
        (),
        "Addresses (host:port,...) of etcd; or control addresses of the embedded store's "
        "members, at a node that is none.",
        parse=parse_addresses,
    )
    store_members: tuple[StoreMember, ...] = setting(
        (),
        "The 1, 3 or 5 members of the embedded store with their Raft addresses: "
        "id=host:port,...; the same on each. Empty: this node alone.",
        parse=parse_members,
    )
    store_data_dir: str | None = setting(
        None,
        "Folder for the embedded store's journal. Not set: memory only.",
    )
    store_secret: str | None = setting(
        None,
        "Shared secret of the embedded store's members; needed unless all are on loopback.",
        secret=True,
    )
    store_username: str | None = setting(None, "User name at etcd.")
    store_password: str | None = setting(None, "Password at etcd.", secret=True)
    store_tls_ca_file: str | None = setting(
        None, "PEM file with the trusted authorities of etcd's servers. It turns TLS on."
    )
    store_tls_cert_file: str | None = setting(
        None, "PEM file with this node's certificate for etcd."
    )
    store_tls_key_file: str | None = setting(
        None, "PEM file with the private key of store_tls_cert_file."
    )
    store_deadline_ms: int = setting(
        2000, "Time limit of one call to the store.", minimum=100, maximum=60_000
    )

    def check_store(self, node_id: str) -> None:
        """Check these settings together.

        Args:
            node_id: The node whose settings they are.

        Raises:
            ConfigError: One is wrong, or does not go with another.
        """
        endpoints: object = self.store_endpoints
        if not (isinstance(endpoints, tuple) and all(isinstance(text, str) for text in endpoints)):
            raise ConfigError(f"store_endpoints: {endpoints!r} is not a list of host:port")
        for endpoint in self.store_endpoints:
            split_address("store_endpoints", endpoint)
        if self.store == "etcd":
            self._check_etcd()
        else:
            self._check_embedded(node_id)
        if (self.store_tls_cert_file is None) != (self.store_tls_key_file is None):
            raise ConfigError(
                "store_tls_cert_file: needs store_tls_key_file, and the other way round"
            )
        if self.store_tls_cert_file is not None and self.store_tls_ca_file is None:
            raise ConfigError("store_tls_cert_file: needs store_tls_ca_file, which turns TLS on")
        if (self.store_username is None) != (self.store_password is None):
            raise ConfigError("store_username: needs store_password, and vice versa")

    def _check_etcd(self) -> None:
        if not self.store_endpoints:
            raise ConfigError("store_endpoints: must name etcd's addresses, as host:port,...")
        for name in ("store_members", "store_data_dir", "store_secret"):
            if getattr(self, name):
                raise ConfigError(f"{name}: is for the embedded store, but store is etcd")

    def _check_embedded(self, node_id: str) -> None:
        for name in (
            "store_username",
            "store_password",
            "store_tls_ca_file",
            "store_tls_cert_file",
        ):
            if getattr(self, name) is not None:
                raise ConfigError(f"{name}: is for etcd, but store is embedded")
        members: object = self.store_members
        if not (
            isinstance(members, tuple) and all(isinstance(one, StoreMember) for one in members)
        ):
            raise ConfigError(f"store_members: {members!r} is not a list of node-id=host:port")
        ids = [member.node_id for member in self.store_members]
        for member in self.store_members:
            check_name("store_members", member.node_id)
            if split_address("store_members", member.raft_address)[1] == 0:
                raise ConfigError(f"store_members: {str(member)!r} needs a port other than 0")
        addresses = [member.raft_address for member in self.store_members]
        for name, values in (("node id", ids), ("address", addresses)):
            twice = sorted({value for value in values if values.count(value) > 1})
            if twice:
                raise ConfigError(f"store_members: {name} {twice[0]!r} is in the list twice")
        if ids and len(ids) not in STORE_MEMBER_COUNTS:
            raise ConfigError(f"store_members: {len(ids)} members; there may be 1, 3 or 5")
        if ids and node_id not in ids and not self.store_endpoints:
            raise ConfigError(
                f"store_members: this node, {node_id!r}, is not in the list "
                f"({', '.join(ids)}); give it store_endpoints, the members' control addresses"
            )
        if self.store_secret is None and not all(
            is_loopback(split_address("store_members", address)[0]) for address in addresses
        ):
            raise ConfigError(
                "store_secret: must be set, because store_members can be reached from other "
                "machines, and anyone who reaches one could run code in it"
            )

    def is_store_member(self, node_id: str) -> bool:
        """Tell whether a node with these settings keeps the embedded store."""
        if self.store != "embedded":
            return False
        if not self.store_members:
            return not self.store_endpoints
        return any(member.node_id == node_id for member in self.store_members)

    def keeps_store_alone(self, node_id: str) -> bool:
        """Tell whether a node with these settings is the only member of the embedded store."""
        return self.is_store_member(node_id) and len(self.store_members) <= 1
