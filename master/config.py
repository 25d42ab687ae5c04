"""Settings of a job master's process.

Imports ``backstay.config``; reads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from backstay.addresses import is_loopback, split_address
from backstay.config import ClientConfig, Pems
from backstay.errors import ConfigError

__all__ = ["MasterConfig"]

LEASE_TTL_MS_MIN = 1000
LEASE_TTL_MS_MAX = 600_000


@dataclass(frozen=True, kw_only=True)
class MasterConfig:
    """Settings of a job master.

    Attributes:
        endpoints: Control addresses of pservers.
        client: Token, TLS and deadlines, as for any client of the cluster.
        listen_control: Address to listen on; port 0 lets the system choose.
        advertise_host: Host under which workers reach this process; default: that of
            ``listen_control``.
        lease_ttl_ms: How long a job master that died without a trace is waited for.
        replaces: Instance of a job master that is surely gone, and need not be waited for.
        fresh: Begin the job anew, whatever is recorded of it.
        run: Uid of the job in this run of its schedule: a job of another uid is begun anew. Empty:
            the job has no schedule.
        owner: Of the job on Kubernetes, the uid of its Deployment: a job that has ended under it
            is not opened again. Empty: the job runs elsewhere.
        linger_ms: How long, at most, workers are waited for when the job is over.
        servers_end: Whether the servers end with this job: it is saved before it is stopped.
        insecure: Listen on an address other than loopback with neither token nor TLS.
    """

    endpoints: tuple[str, ...]
    client: ClientConfig
    listen_control: str = "127.0.0.1:0"
    advertise_host: str | None = None
    lease_ttl_ms: int = 3000
    replaces: int = 0
    fresh: bool = False
    run: str = ""
    owner: str = ""
    linger_ms: int = 10_000
    servers_end: bool = False
    insecure: bool = False

    def __post_init__(self) -> None:
        """Check the values, each alone and then together."""
        if not self.endpoints:
            raise ConfigError("endpoints: none given; give the control address of a pserver")
        for endpoint in self.endpoints:
            split_address("endpoints", endpoint)
        host = split_address("listen", self.listen_control)[0]
        if not LEASE_TTL_MS_MIN <= self.lease_ttl_ms <= LEASE_TTL_MS_MAX:
            raise ConfigError(
                f"lease_ttl_ms: {self.lease_ttl_ms} is not {LEASE_TTL_MS_MIN} to {LEASE_TTL_MS_MAX}"
            )
        if self.client.tls_ca_file is not None and self.client.tls_cert_file is None:
            raise ConfigError(
                "tls_cert_file: must be set: with tls_ca_file workers expect the job master to use "
                "TLS, and it needs a certificate for that"
            )
        if host in ("0.0.0.0", "[::]") and self.advertise_host is None:
            raise ConfigError(
                f"advertise_host: must be set, because no worker can connect to {host}"
            )
        guarded = self.client.token is not None or self.client.tls_cert_file is not None
        if not (guarded or self.insecure or is_loopback(host)):
            raise ConfigError(
                f"listen: {self.listen_control!r} can be reached from other machines. Set token "
                "(and TLS), or listen on 127.0.0.1, or give --insecure if the network is guarded. "
                "On Kubernetes, name the Secret that has BACKSTAY_TOKEN in kubernetes.secrets, or "
                "set kubernetes.insecure: true"
            )

    @property
    def token(self) -> str | None:
        """What every caller must show."""
        return self.client.token

    @property
    def tls_require_client_cert(self) -> bool:
        """Whether callers must show a certificate: the token is what counts here."""
        return False

    @property
    def host(self) -> str:
        """The host under which workers reach this process."""
        return self.advertise_host or split_address("listen", self.listen_control)[0]

    def read_pems(self) -> Pems:
        """Read the certificate files."""
        return self.client.read_pems()
