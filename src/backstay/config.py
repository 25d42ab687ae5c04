"""Settings of a server and of a client: what they are and what is allowed.

Every setting is a field of a frozen dataclass that checks its values when it is made, so a
configuration that exists is a valid one. ``load`` fills it from, in this order, explicit
arguments, a TOML file, the environment (``BACKSTAY_<FIELD>``) and the defaults.

Those of the coordination store are in ``backstay.store_config``. This module imports that one,
``backstay.settings``, ``backstay.profiles``, ``backstay.addresses``, ``backstay.errors`` only, and
reads nothing when it is imported.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

from backstay.addresses import is_host_name, is_loopback, split_address
from backstay.errors import ConfigError
from backstay.profiles import PROFILES
from backstay.settings import (
    ENVIRONMENT_PREFIX,
    Loaded,
    check,
    check_name,
    load,
    read_section,
    setting,
    suggestion,
)
from backstay.store_config import StoreConfig

__all__ = [
    "MEMORY_LIMIT_MIN_BYTES",
    "ClientConfig",
    "FoundEndpoints",
    "Pems",
    "SecurityConfig",
    "ServerConfig",
    "find_endpoints",
    "required_endpoints",
]

ConfigT = TypeVar("ConfigT", bound="SecurityConfig")

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
SLOT_COUNT_MAX = 65536
REPLICAS_MAX = 3
# The process alone takes most of this; with less there would be no room for rows.
MEMORY_LIMIT_MIN_BYTES = 134_217_728
NODES_MAX = 1000
# Names the TOML file if no argument does.
FILE_VARIABLE = ENVIRONMENT_PREFIX + "CONFIG"
# Where a cluster is, for commands and for ``init()``; no setting of a server or of a client.
ENDPOINT_VARIABLE = ENVIRONMENT_PREFIX + "ENDPOINT"
PADDLE_ENDPOINT_VARIABLE = "PADDLE_PSERVERS_IP_PORT_LIST"
ENDPOINT_VARIABLES = (ENDPOINT_VARIABLE, PADDLE_ENDPOINT_VARIABLE)
# What programs of ours tell each other, and the hooks of a job.
OWN_VARIABLES = frozenset(
    ENVIRONMENT_PREFIX + name
    for name in (
        *("BUILDER", "JOB", "JOB_CHECKPOINT", "JOB_PASS", "JOB_REASON", "JOB_RESULT"),
        *("LAST_WORDS", "LIFELINE", "RUN"),
    )
)

log = logging.getLogger(__name__)


class FoundEndpoints(NamedTuple):
    """Where a cluster is, and what says so.

    Attributes:
        endpoints: Control addresses as they were written. The caller checks each.
        variable: The environment variable that names them; empty if an argument or a file does.
    """

    endpoints: tuple[str, ...]
    variable: str = ""


def find_endpoints(
    environment: Mapping[str, str],
    argument: str | Sequence[str] | None = None,
    *,
    file: Sequence[str] = (),
    variables: Sequence[str] = ENDPOINT_VARIABLES,
) -> FoundEndpoints | None:
    """Return the endpoints of the cluster to use: of the argument, else the file, else a variable.

    Every command and ``init()`` decide by this function. A caller with a default uses it where
    this function returns None.

    Args:
        environment: The variables of the process.
        argument: What the caller was given, with commas or one by one. None: nothing was given.
        file: What the job file says.
        variables: Names of the variables that count, the first one first.
    """
    if argument is not None:
        return FoundEndpoints(_parts(argument) if isinstance(argument, str) else tuple(argument))
    if file:
        return FoundEndpoints(tuple(file))
    for name in variables:
        if text := environment.get(name):
            return FoundEndpoints(_parts(text), name)
    return None


def required_endpoints(environment: Mapping[str, str], argument: str | None) -> tuple[str, ...]:
    """Return the endpoints that ``--endpoint`` or the environment names.

    Raises:
        ConfigError: None is named.
    """
    found = find_endpoints(environment, argument)
    if found is None or not found.endpoints:
        raise ConfigError(
            f"endpoint: give --endpoint HOST:PORT or set {' or '.join(ENDPOINT_VARIABLES)}"
        )
    return found.endpoints


def _parts(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))


@dataclass(frozen=True)
class Pems:
    """The content of the certificate files; None where none is set."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class SecurityConfig:
    """Who may talk, and whether others can listen in. The same on both planes."""

    file_section: ClassVar[str] = ""

    token: str | None = setting(
        None,
        "Secret that every caller must show; 8 to 1024 visible characters.",
        secret=True,
    )
    tls_cert_file: str | None = setting(
        None, "PEM file with this process's certificate (chain). It turns TLS on at a server."
    )
    tls_key_file: str | None = setting(None, "PEM file with the private key of the certificate.")
    tls_ca_file: str | None = setting(
        None,
        "PEM file with the trusted authorities. It turns TLS on at a client.",
    )
    job_tls_name: str | None = setting(
        None,
        "Name in the certificates of job masters and workers. Not set: the host at which "
        "each is called.",
    )

    def __post_init__(self) -> None:
        """Check the values, each alone and then together."""
        check(self)
        if self.token is not None and not re.fullmatch(r"[!-~]{8,1024}", self.token):
            raise ConfigError("token: must be 8 to 1024 visible ASCII characters (value not shown)")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            names = ["tls_cert_file", "tls_key_file"]
            given, lacking = names if self.tls_key_file is None else reversed(names)
            raise ConfigError(
                f"{given}: {getattr(self, given)!r}, but {lacking} is not set: give both or neither"
            )
        if self.job_tls_name is not None:
            if not is_host_name(self.job_tls_name):
                raise ConfigError(f"job_tls_name: {self.job_tls_name!r} is no host name")
            if self.tls_ca_file is None:
                raise ConfigError("job_tls_name: needs tls_ca_file, which turns TLS on")

    @classmethod
    def load(
        cls: type[ConfigT],
        *,
        file: str | Path | None = None,
        environment: Mapping[str, str] | None = None,
        explicit: Mapping[str, object] | None = None,
    ) -> ConfigT:
        """Return a configuration; see ``load_with_sources``."""
        loaded = cls.load_with_sources(file=file, environment=environment, explicit=explicit)
        return loaded.config

    @classmethod
    def load_with_sources(
        cls: type[ConfigT],
        *,
        file: str | Path | None = None,
        environment: Mapping[str, str] | None = None,
        explicit: Mapping[str, object] | None = None,
    ) -> Loaded[ConfigT]:
        """Return a configuration and where each value came from.

        Args:
            file: A TOML file; default: the one that ``BACKSTAY_CONFIG`` names, if any.
            environment: Default: ``os.environ``.
            explicit: Values by field name, which win over everything; None means not given.

        Raises:
            ConfigError: A value is not allowed, or the file is unreadable or has an unknown key.
        """
        environment = os.environ if environment is None else environment
        _warn_of_unknown_variables(environment)
        path = file if file is not None else environment.get(FILE_VARIABLE) or None
        section: Mapping[str, object] = {}
        if path is not None:
            known_keys = {
                kind.file_section: {item.name for item in fields(kind)}
                for kind in (ServerConfig, ClientConfig)
            }
            section = read_section(Path(path), cls.file_section, known_keys)
        return load(cls, section, environment, explicit or {}, file=str(path))

    @property
    def security(self) -> SecurityConfig:
        """Only the settings that concern who may talk."""
        return SecurityConfig(
            token=self.token,
            tls_cert_file=self.tls_cert_file,
            tls_key_file=self.tls_key_file,
            tls_ca_file=self.tls_ca_file,
            job_tls_name=self.job_tls_name,
        )

    def read_pems(self) -> Pems:
        """Read the certificate files.

        Raises:
            ConfigError: One cannot be read or holds no PEM block.
        """
        return Pems(
            ca=_read_pem("tls_ca_file", self.tls_ca_file),
            cert=_read_pem("tls_cert_file", self.tls_cert_file),
            key=_read_pem("tls_key_file", self.tls_key_file),
        )


@dataclass(frozen=True, kw_only=True)
class ServerConfig(StoreConfig, SecurityConfig):
    """Settings of one node (``pserver serve``)."""

    file_section: ClassVar[str] = "server"

    node_id: str = setting("ps-0", "Name of this node, unique in the cluster.")
    cluster: str = setting("default", "Name of the cluster; the same on every node.")
    listen_control: str = setting(
        "127.0.0.1:7000", "Address of the gRPC services; port 0: the system chooses."
    )
    listen_data: str = setting(
        "127.0.0.1:7100", "Address of the data plane; port 0: the system chooses."
    )
    metrics: str | None = setting(
        None,
        "Address of /metrics, /live and /ready (HTTP, no token); port 0: the system chooses. "
        "Not set: none.",
    )
    advertise_host: str | None = setting(
        None,
        "Host under which others reach this node; needed with a wildcard address such as 0.0.0.0.",
    )
    host: str | None = setting(
        None,
        "Name of the machine: copies of a slot go to different ones. Default: the system's "
        "host name.",
    )
    slot_count: int = setting(
        1024,
        "Slots of the cluster; a power of two, the same on every node.",
        minimum=1,
        maximum=SLOT_COUNT_MAX,
    )
    profile: str | None = setting(
        None,
        "How long jobs run: test, short or long. A new cluster takes replicas, "
        "checkpoint_every_s, restore and on_slot_loss from it where they are not set.",
        choices=PROFILES,
    )
    replicas: int | None = setting(
        None,
        "Copies of each slot. Default of a new cluster: the profile's, else 2, or 1 if "
        "initial_nodes is 1.",
        minimum=1,
        maximum=REPLICAS_MAX,
    )
    initial_nodes: int | None = setting(
        None,
        "Nodes that must join before slots are handed out. Default of a new cluster: 1.",
        minimum=1,
        maximum=NODES_MAX,
    )
    numbered_nodes: bool = setting(
        False,
        "Node names end in numbers from 0 on, as in a StatefulSet. A resize to n empties the "
        "nodes from number n on, and ends none.",
    )
    replaces_cluster: str | None = setting(
        None,
        "An earlier cluster in the same etcd. This node removes its records once none of its nodes "
        "is registered any more.",
    )
    lease_ttl_ms: int = setting(
        3000,
        "A node that does not renew its lease for this time counts as lost.",
        minimum=1000,
        maximum=600_000,
    )
    return_grace_ms: int = setting(
        30_000,
        "How long the cluster waits for a vanished node without evidence of its death, before "
        "slots of which only it has a copy are lost.",
        minimum=0,
        maximum=86_400_000,
    )
    trainer_ttl_ms: int = setting(
        10_000,
        "A trainer that is silent for this time counts as gone.",
        minimum=1000,
        maximum=600_000,
    )
    read_lease_ms: int = setting(
        400,
        "How long a backup's read lease lasts; at most a third of lease_ttl_ms.",
        minimum=50,
        maximum=60_000,
    )
    prepare_timeout_ms: int = setting(
        1000,
        "A backup that answers nothing for this time is reported as silent.",
        minimum=50,
        maximum=60_000,
    )
    copy_bytes_per_s: int = setting(
        50_331_648,
        "Most bytes a second that a master copies to new replicas.",
        minimum=65_536,
        maximum=2**40,
    )
    memory_limit_bytes: int | None = setting(
        None,
        "Most memory of this process; pushes whose new rows need more are refused. 0: no limit. "
        "Default: 80% of what the control group allows or the machine has.",
        minimum=0,
    )
    stream_grace_s: int = setting(
        604_800,
        "How long a server remembers a task's pushes after the last one (default: 7 days). Then it "
        "refuses further pushes of the task. A job that pauses longer must restore a checkpoint.",
        minimum=3600,
        maximum=31_536_000,
    )
    checkpoint_url: str | None = setting(
        None,
        "Of a new cluster: where checkpoints go. Later: `pserverctl config set`.",
    )
    checkpoint_every_s: int | None = setting(
        None,
        "Of a new cluster: seconds between checkpoints. Default: the profile's, else 0 "
        "(none). Later: `pserverctl config set`.",
        minimum=0,
        maximum=31_536_000,
    )
    restore: str | None = setting(
        None,
        "What a new cluster begins with: no (empty), latest (the newest checkpoint, if any) "
        "or the id of one. Default: the profile's, else no.",
    )
    restore_fallback: bool = setting(
        False,
        "If that checkpoint is damaged, begin with the newest sound one before it. This "
        "reads every file once more.",
    )
    max_tables: int = setting(10_000, "Most tables in the cluster.", minimum=1, maximum=10_000)
    io_threads: int = setting(2, "Threads of the data plane.", minimum=1, maximum=256)
    max_frame_bytes: int = setting(
        268_435_456, "Largest frame on the data plane.", minimum=65_536, maximum=2**31 - 1
    )
    max_keys_per_request: int = setting(
        4_194_304, "Most keys in one request on the data plane.", minimum=1, maximum=2**28
    )
    max_connections: int = setting(
        4096, "Most open connections to the data plane.", minimum=1, maximum=1_000_000
    )
    handshake_timeout_ms: int = setting(
        5000,
        "Time limit of a new connection's handshake.",
        minimum=10,
        maximum=600_000,
    )
    stall_timeout_ms: int = setting(
        30_000, "A connection whose frame stands still for this time is closed.",
        minimum=10, maximum=3_600_000,
    )  # fmt: skip
    control_deadline_ms: int = setting(
        5000, "Time limit of one call from node to node.", minimum=10, maximum=600_000
    )
    stop_grace_ms: int = setting(
        10_000,
        "Time to hand over slots when the node stops, and again to finish the requests under way.",
        minimum=0,
        maximum=3_600_000,
    )
    log_level: str = setting(
        "info",
        "Least severe message to log: debug, info, warning or error.",
        choices=LOG_LEVELS,
    )
    log_format: str = setting("text", "text, or json (one object a line).", choices=LOG_FORMATS)
    trace_pushes: bool = setting(False, "Log each push's way through this node, at any log_level.")
    tls_require_client_cert: bool = setting(
        False, "Refuse clients without a certificate of an authority in tls_ca_file."
    )
    insecure: bool = setting(
        False, "Allow an address other than loopback with neither a token nor TLS."
    )

    def __post_init__(self) -> None:
        """Check the values, each alone and then together."""
        super().__post_init__()
        check_name("node_id", self.node_id)
        check_name("cluster", self.cluster)
        self._check_replaces()
        for name in ("listen_control", "listen_data"):
            split_address(name, getattr(self, name))
        if self.metrics is not None:
            split_address("metrics", self.metrics)
        if self.slot_count & (self.slot_count - 1):
            raise ConfigError(f"slot_count: {self.slot_count} is not a power of two")
        if 0 < (self.memory_limit_bytes or 0) < MEMORY_LIMIT_MIN_BYTES:
            raise ConfigError(
                f"memory_limit_bytes: {self.memory_limit_bytes} leaves no room for rows beside the "
                f"process itself; allowed is at least {MEMORY_LIMIT_MIN_BYTES}, or 0 for no limit"
            )
        for name in ("advertise_host", "host"):
            if getattr(self, name) is not None:
                split_address(name, f"{getattr(self, name)}:0")
        if self.restore and not re.fullmatch(r"no|latest|ckpt-\d{6,12}-[0-9a-f]{6}", self.restore):
            raise ConfigError(
                f"restore: {self.restore!r} is neither no, latest nor the id of a checkpoint, "
                "such as ckpt-000007-3fa9c1"
            )
        if self.checkpoint_url and not re.match(r"/|[a-z][a-z0-9+.-]*://.", self.checkpoint_url):
            raise ConfigError(
                f"checkpoint_url: {self.checkpoint_url!r} is neither an absolute path nor a URL"
            )
        for name, value in (
            ("restore", self.restore if self.restore != "no" else None),
            ("checkpoint_every_s", self.checkpoint_every_s),
        ):
            if value and not self.checkpoint_url:
                raise ConfigError(f"{name}: {value!r} needs checkpoint_url, which is not set")
        self._check_profile()
        self.check_store(self.node_id)
        self._check_cluster()
        self._check_exposure()
        self._reachable_host(split_address("listen_control", self.listen_control)[0])
        self._reachable_host(split_address("listen_data", self.listen_data)[0])
        if self.tls_require_client_cert and self.tls_ca_file is None:
            raise ConfigError("tls_require_client_cert: needs tls_ca_file to check clients against")

    def _check_replaces(self) -> None:
        if self.replaces_cluster is None:
            return
        check_name("replaces_cluster", self.replaces_cluster)
        if self.replaces_cluster == self.cluster:
            raise ConfigError(f"replaces_cluster: {self.cluster!r} is this cluster itself")
        if self.store != "etcd":
            raise ConfigError("replaces_cluster: needs store = etcd, which clusters share")

    def _check_cluster(self) -> None:
        if self.initial_nodes_wanted > self.slot_count:
            raise ConfigError(
                f"initial_nodes: {self.initial_nodes} nodes, but only {self.slot_count} slots"
            )
        if 3 * self.read_lease_ms > self.lease_ttl_ms:
            raise ConfigError(
                f"read_lease_ms: {self.read_lease_ms} is more than a third of lease_ttl_ms, "
                f"{self.lease_ttl_ms}"
            )
        alone = self.keeps_store_alone(self.node_id) and self.initial_nodes_wanted == 1
        if not alone and self.tls_cert_file is not None and self.tls_ca_file is None:
            raise ConfigError("tls_ca_file: must be set so that this node can trust the others")

    def _check_profile(self) -> None:
        if self.profile is None:
            return
        if self.from_profile.get("checkpoint_every_s") and not self.checkpoint_url:
            raise ConfigError(
                f"profile: {self.profile!r} writes checkpoints, and there is no place for them: "
                "set checkpoint_url (--checkpoint-url) to a folder that every node has under this "
                "absolute path, or to a URL such as s3://bucket/path"
            )

    def _check_exposure(self) -> None:
        """Refuse to be open to the network by accident."""
        if self.token is not None or self.tls_cert_file is not None or self.insecure:
            return
        for name in ("listen_control", "listen_data"):
            address = getattr(self, name)
            if not is_loopback(split_address(name, address)[0]):
                raise ConfigError(
                    f"{name}: {address!r} can be reached from other machines, and anyone who "
                    "reaches it could read and change the model. Set token (and TLS), or listen on "
                    "127.0.0.1, or say --insecure if the network itself is guarded"
                )

    @property
    def from_profile(self) -> Mapping[str, object]:
        """What the profile decides, by the names of settings: the settings that are not set."""
        if self.profile is None:
            return {}
        decided = PROFILES[self.profile].server_settings(self.initial_nodes_wanted)
        return {name: value for name, value in decided.items() if getattr(self, name) is None}

    @property
    def checkpoint_every_s_wanted(self) -> int:
        """Seconds between checkpoints of a cluster that this node creates; 0: none by time."""
        decided = self.from_profile.get("checkpoint_every_s", self.checkpoint_every_s or 0)
        return int(str(decided))

    @property
    def restores_lost_slots(self) -> bool:
        """Whether slots that lost all copies come back from the newest checkpoint."""
        return bool(self.profile and PROFILES[self.profile].has_checkpoints and self.checkpoint_url)

    @property
    def restore_wanted(self) -> str:
        """What a cluster that this node creates begins with."""
        if not self.checkpoint_url:
            return "no"
        return str(self.from_profile.get("restore", self.restore or "no"))

    @property
    def replicas_wanted(self) -> int:
        """Copies of each slot in a cluster that this node creates."""
        if self.replicas is not None:
            return self.replicas
        if "replicas" in self.from_profile:
            return int(str(self.from_profile["replicas"]))
        return 1 if self.initial_nodes_wanted == 1 else 2

    @property
    def initial_nodes_wanted(self) -> int:
        """Nodes that a cluster which this node creates begins with."""
        return self.initial_nodes if self.initial_nodes is not None else 1

    @property
    def control_host(self) -> str:
        """The host under which others reach the control plane."""
        return self._reachable_host(split_address("listen_control", self.listen_control)[0])

    @property
    def data_host(self) -> str:
        """The host under which others reach the data plane."""
        return self._reachable_host(split_address("listen_data", self.listen_data)[0])

    def _reachable_host(self, listen_host: str) -> str:
        if self.advertise_host is not None:
            return self.advertise_host
        if listen_host not in ("0.0.0.0", "[::]"):
            return listen_host
        raise ConfigError(
            f"advertise_host: must be set, because {listen_host} listens on all addresses and "
            "does not say under which one others reach this node"
        )


@dataclass(frozen=True, kw_only=True)
class ClientConfig(SecurityConfig):
    """Settings of a trainer's client, and of the commands that call a cluster."""

    file_section: ClassVar[str] = "client"

    deadline_ms: int = setting(
        60_000, "Time limit of a pull or push with all its retries.",
        minimum=1, maximum=3_600_000,
    )  # fmt: skip
    connect_timeout_ms: int = setting(
        5000, "Time limit of one attempt to connect.", minimum=1, maximum=600_000
    )
    first_contact_timeout_ms: int = setting(
        30_000,
        "Time limit of the first answer of any address. 0: no limit.",
        minimum=0,
        maximum=3_600_000,
    )
    stall_timeout_ms: int = setting(
        30_000,
        "A connection whose frame stands still for this time is given up.",
        minimum=10,
        maximum=3_600_000,
    )
    max_pushes_in_flight: int = setting(
        16, "Most unanswered pushes; the next one waits.", minimum=1, maximum=64
    )
    max_frame_bytes: int = setting(
        268_435_456, "Largest frame sent or taken.", minimum=65_536, maximum=2**31 - 1
    )
    part_bytes: int = setting(
        1_048_576,
        "Larger requests to one server travel in parts of about this size.",
        minimum=4096,
        maximum=2**30,
    )
    update_settings: bool = setting(
        False,
        "Whether an existing table takes other settings that a trainer asks for. Jobs have "
        "their own rule.",
    )
    compensation: str = setting(
        "ignore",
        "What servers do about stale gradients, in tables of layers and optimizers: ignore, or "
        "scale (divide the learning rate by the staleness). `compensation=` of a layer goes first; "
        "a job has `mode.compensation`.",
        choices=("ignore", "scale"),
    )
    measure_staleness: bool = setting(
        False,
        "Measure how stale the gradients of this trainer are. Workers of jobs in mode async or "
        "bounded always do.",
    )


_warned_of: set[str] = set()


def _warn_of_unknown_variables(environment: Mapping[str, str]) -> None:
    """Log the variables with our prefix that nothing reads: mostly, a setting's name is misspelt.

    It is no error, as in a file: the environment belongs to other programs too.
    """
    known = {FILE_VARIABLE, ENDPOINT_VARIABLE} | {
        ENVIRONMENT_PREFIX + item.name.upper()
        for kind in (ServerConfig, ClientConfig)
        for item in fields(kind)
    }
    for name in sorted(environment.keys() - known - OWN_VARIABLES - _warned_of):
        if name.startswith(ENVIRONMENT_PREFIX):
            # Once in a process: its settings are read in several places.
            _warned_of.add(name)
            log.warning(
                "environment variable %s is no setting of a server or client%s",
                name,
                suggestion(name, sorted(known)),
            )


def _read_pem(name: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {path!r}: {error.strerror}") from error
    if b"-----BEGIN " not in content:
        raise ConfigError(f"{name}: {path!r} is not a PEM file (no '-----BEGIN' line)")
    return content
