"""The sections ``kubernetes`` and ``schedule`` of a job file: the Pods of a job, and when it runs.

Imports ``backstay.settings`` and ``backstay.errors`` only; does no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, ClassVar

from backstay.errors import ConfigError
from backstay.settings import check, setting

__all__ = ["KubernetesSpec", "MoreMemorySpec", "PodSpec", "ScheduleSpec", "amount", "high_share"]

PULL_POLICIES = ("Always", "IfNotPresent", "Never")
# What a volume may be, and what Kubernetes calls its source and the field of its name there.
VOLUME_KINDS = {
    "claim_name": ("persistentVolumeClaim", "claimName"),
    "host_path": ("hostPath", "path"),
    "config_map": ("configMap", "name"),
    "secret": ("secret", "secretName"),
}
_VOLUME_FIELDS = (*VOLUME_KINDS, "mount_path", "sub_path", "read_only")
_TOLERATION_FIELDS = ("key", "operator", "value", "effect", "tolerationSeconds")
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE]-?[0-9]+)?")
_UNITS = {
    "m": 1e-3,
    **{unit: 1000.0**power for power, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", 1)},
}
# RFC 1123: what Kubernetes takes as a name.
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_SHARE = re.compile(r"[01]?\.[0-9]+|[01]")
# The fields of a cron expression: lowest and highest value, and names for them.
_CRON_FIELDS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "minute": (0, 59, ()),
    "hour": (0, 23, ()),
    "day of the month": (1, 31, ()),
    "month": (
        1,
        12,
        ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"),
    ),
    "day of the week": (0, 6, ("sun", "mon", "tue", "wed", "thu", "fri", "sat")),
}
_CRON_WORDS = ("@hourly", "@daily", "@midnight", "@weekly", "@monthly", "@yearly", "@annually")
_CRON_PART = re.compile(r"(?:[*?]|([0-9]+|[a-z]{3})(?:-([0-9]+|[a-z]{3}))?)(?:/([0-9]+))?")


@dataclass(frozen=True, kw_only=True)
class PodSpec:
    """The Pods of one role: job master, worker or pserver."""

    image: str = setting("", "Image of this role. Empty: `kubernetes.image`.")
    requests: Mapping[str, str] = setting(dict, 'What a Pod asks for, such as `{cpu: "1"}`.')
    limits: Mapping[str, str] = setting(dict, "What a Pod may use at most.")
    priority_class: str = setting(
        "",
        'PriorityClass. For workers also a share such as `"0.3"`: so many get `high`, the '
        "others `low`.",
    )
    node_selector: Mapping[str, str] = setting(dict, "Labels that a node must have.")
    tolerations: tuple[Mapping[str, Any], ...] = setting((), "Taints of nodes that the Pods bear.")
    volumes: tuple[Mapping[str, Any], ...] = setting(
        (),
        "More volumes: `mount_path` and one of `claim_name`, `host_path`, `config_map`, `secret`; "
        "also `sub_path`, `read_only`.",
    )
    env: Mapping[str, str] = setting(dict, "More environment variables.")
    pod_template: Mapping[str, Any] = setting(
        dict, "More of the Pod (`metadata`, `spec`); it wins."
    )

    def __post_init__(self) -> None:
        """Check the values."""
        # YAML reads cpu: 2 as a number; Kubernetes takes numbers and strings.
        for name in ("requests", "limits"):
            _put(self, name, _texts_of_numbers(getattr(self, name)))
        _put(self, "priority_class", _text_of_number(self.priority_class))
        check(self)
        for name in ("requests", "limits"):
            for resource, quantity in getattr(self, name).items():
                if not _QUANTITY.fullmatch(quantity):
                    raise ConfigError(
                        f"{name}.{resource}: {quantity!r} is not a quantity, such as 500m, 2 or 4Gi"
                    )
        if self.priority_class and high_share(self.priority_class) is None:
            _check_name("priority_class", self.priority_class, _SUBDOMAIN)
        _check_volumes(self.volumes)
        for number, one in enumerate(self.tolerations):
            _check_fields(f"tolerations.{number}", one, _TOLERATION_FIELDS)
        _check_template(self.pod_template)


@dataclass(frozen=True, kw_only=True)
class MoreMemorySpec:
    """What workers get that begin after one has run out of memory."""

    factor: float = setting(
        1.5,
        "Their limit is so many times that of the worker that ran out of memory; their request "
        "grows with it.",
        minimum=1.01,
        maximum=10.0,
    )
    max: str = setting(..., "The highest limit, such as `16Gi`.")

    def __post_init__(self) -> None:
        """Check the values."""
        _put(self, "max", _text_of_number(self.max))
        check(self)
        if not _QUANTITY.fullmatch(self.max):
            raise ConfigError(f"max: {self.max!r} is not a quantity, such as 16Gi")


@dataclass(frozen=True, kw_only=True)
class KubernetesSpec:
    """How a job runs on Kubernetes."""

    namespace: str = setting("", "Namespace of the Pods. Empty: that of the kubeconfig's context.")
    image: str = setting(..., "Image of all Pods.")
    pull_policy: str = setting(
        "IfNotPresent", "When a node pulls the image.", choices=PULL_POLICIES
    )
    pull_secrets: tuple[str, ...] = setting((), "Secrets for the registry of the image.")
    service_account: str = setting("backstay-job-master", "ServiceAccount of the job master.")
    secrets: tuple[str, ...] = setting(
        (),
        "Secrets whose keys become variables of all Pods, such as `BACKSTAY_TOKEN`.",
    )
    insecure: bool = setting(
        False,
        "Listen with neither token nor TLS; for a guarded network.",
    )
    model_folder: str = setting(
        "",
        "Folder of the image with the model file. Empty: the command carries the file.",
    )
    volumes: tuple[Mapping[str, Any], ...] = setting(
        (), "Volumes of all Pods, as `kubernetes.worker.volumes`."
    )
    env: Mapping[str, str] = setting(dict, "Environment variables of all Pods.")
    master: PodSpec = setting(PodSpec, "The Pod of the job master.")
    worker: PodSpec = setting(PodSpec, "The Pods of the workers.")
    pserver: PodSpec = setting(PodSpec, "The Pods of the job's own servers.")
    more_memory: MoreMemorySpec | None = setting(
        None,
        "Workers that begin after one ran out of memory get more than "
        "`kubernetes.worker.limits.memory`. Left out: as much as before.",
    )

    def __post_init__(self) -> None:
        """Check the values, each alone and then together."""
        check(self)
        if not self.image or any(one.isspace() for one in self.image):
            raise ConfigError(f"image: {self.image!r} is not the name of an image")
        if self.namespace:
            _check_name("namespace", self.namespace, _LABEL)
        for field in ("pull_secrets", "secrets"):
            for name in getattr(self, field):
                _check_name(field, name, _SUBDOMAIN)
        _check_name("service_account", self.service_account, _SUBDOMAIN)
        if self.model_folder and not PurePosixPath(self.model_folder).is_absolute():
            raise ConfigError(f"model_folder: {self.model_folder!r} is not an absolute path")
        _check_volumes(self.volumes)
        for role in ("master", "pserver"):
            priority_class = getattr(self, role).priority_class
            if high_share(priority_class) is not None:
                raise ConfigError(
                    f"{role}.priority_class: {priority_class!r} is a share, which is for workers; "
                    "name a PriorityClass"
                )
        for role in ("master", "worker", "pserver"):
            _check_mount_paths(role, (*self.volumes, *getattr(self, role).volumes))
        if self.more_memory is not None:
            _check_more_memory(self.more_memory, self.worker)


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """When Kubernetes runs a job, again and again."""

    SHORT: ClassVar[str] = "cron"

    cron: str = setting(
        ...,
        "Minute, hour, day of the month, month, day of the week, such as `0 3 * * *`; or "
        "`@hourly`, `@daily`, `@weekly`, `@monthly`, `@yearly`.",
    )
    time_zone: str = setting("Etc/UTC", "Time zone of `cron`, such as `Europe/Berlin`.")
    runs_kept: int = setting(
        3,
        "How many runs that went well are kept, and how many that failed.",
        minimum=0,
        maximum=1000,
    )
    service_account: str = setting("backstay-job-schedule", "ServiceAccount of the runs.")

    def __post_init__(self) -> None:
        """Check the values."""
        check(self)
        _check_cron(self.cron)
        if not self.time_zone or any(one.isspace() for one in self.time_zone):
            raise ConfigError(f"time_zone: {self.time_zone!r} is not the name of a time zone")
        _check_name("service_account", self.service_account, _SUBDOMAIN)


def high_share(priority_class: str) -> float | None:
    """Return the share of the workers that get the class ``high``; None: it names a class."""
    if not _SHARE.fullmatch(priority_class):
        return None
    share = float(priority_class)
    return share if share <= 1 else None


def amount(quantity: str) -> float:
    """Return the number that a quantity of Kubernetes stands for, such as 0.5 for ``500m``.

    Raises:
        ConfigError: It is no quantity.
    """
    found = _QUANTITY.fullmatch(quantity)
    if found is None:
        raise ConfigError(f"{quantity!r} is not a quantity, such as 500m, 2 or 4Gi")
    number, unit = found[1], found[2] or ""
    return float(number) * _UNITS[unit] if unit in _UNITS else float(number + unit)


def _check_more_memory(more: MoreMemorySpec, worker: PodSpec) -> None:
    limit = worker.limits.get("memory")
    if limit is None:
        raise ConfigError("more_memory: needs worker.limits.memory, from which it goes on")
    if amount(more.max) <= amount(limit):
        raise ConfigError(
            f"more_memory.max: {more.max} is not more than worker.limits.memory, {limit}"
        )


def _put(spec: object, name: str, value: Any) -> None:
    object.__setattr__(spec, name, value)


def _texts_of_numbers(quantities: Any) -> Any:
    if not isinstance(quantities, Mapping):
        return quantities
    return {name: _text_of_number(one) for name, one in quantities.items()}


def _text_of_number(value: Any) -> Any:
    return str(value) if type(value) in (int, float) else value


def _check_name(field: str, name: str, allowed: re.Pattern[str]) -> None:
    if not allowed.fullmatch(name):
        raise ConfigError(
            f"{field}: {name!r} is not a name of Kubernetes: small letters, digits and - between"
        )


def _check_template(template: Mapping[str, Any]) -> None:
    """Refuse a template whose parts cannot be merged; Kubernetes checks the rest."""
    for name, part in template.items():
        if name not in ("metadata", "spec"):
            raise ConfigError(
                f"pod_template.{name}: no such part of a Pod; there are metadata and spec"
            )
        _check_mapping(f"pod_template.{name}", part)
    metadata, spec = template.get("metadata", {}), template.get("spec", {})
    for name in ("labels", "annotations"):
        if name in metadata:
            _check_mapping(f"pod_template.metadata.{name}", metadata[name])
    for name in ("containers", "initContainers", "volumes"):
        where, parts = f"pod_template.spec.{name}", spec.get(name, ())
        if not isinstance(parts, (list, tuple)):
            raise ConfigError(f"{where}: {parts!r} is not a list; leave it out to say nothing")
        for number, one in enumerate(parts):
            _check_mapping(f"{where}.{number}", one)
            if not isinstance(one.get("name"), str):
                raise ConfigError(f"{where}.{number}.name: is missing")


def _check_mapping(where: str, part: object) -> None:
    if not isinstance(part, Mapping):
        raise ConfigError(f"{where}: {part!r} has no fields; leave it out to say nothing")


def _check_cron(cron: str) -> None:
    if cron in _CRON_WORDS:
        return
    texts = cron.lower().split()
    if len(texts) != len(_CRON_FIELDS):
        raise ConfigError(
            f"cron: {cron!r} does not have five fields ({', '.join(_CRON_FIELDS)}), and is none of "
            f"{', '.join(_CRON_WORDS)}"
        )
    for text, (field, (low, high, names)) in zip(texts, _CRON_FIELDS.items(), strict=True):
        for part in text.split(","):
            if not _is_cron_part(part, low, high, names):
                raise ConfigError(
                    f"cron: {part!r} is not a {field}: {low} to {high}, a range such as "
                    f"{low}-{high}, or *; with /N every N-th of them"
                )


def _is_cron_part(part: str, low: int, high: int, names: tuple[str, ...]) -> bool:
    found = _CRON_PART.fullmatch(part)
    if found is None:
        return False
    first, last, step = found.groups()
    values = [low + names.index(one) if one in names else one for one in (first, last) if one]
    numbers = [int(one) for one in values if str(one).isdecimal()]
    is_inside = len(numbers) == len(values) and all(low <= one <= high for one in numbers)
    return is_inside and numbers == sorted(numbers) and step not in ("0", "00")


def _check_fields(where: str, one: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in one:
        if name not in known:
            raise ConfigError(f"{where}.{name}: no such field; there are {', '.join(known)}")


def _check_volumes(volumes: tuple[Mapping[str, Any], ...]) -> None:
    for number, one in enumerate(volumes):
        where = f"volumes.{number}"
        _check_fields(where, one, _VOLUME_FIELDS)
        kinds = [kind for kind in VOLUME_KINDS if kind in one]
        if len(kinds) != 1:
            raise ConfigError(f"{where}: give one of {', '.join(VOLUME_KINDS)}")
        for name in (kinds[0], "mount_path", "sub_path"):
            if name in one and (not isinstance(one[name], str) or not one[name]):
                raise ConfigError(f"{where}.{name}: {one[name]!r} is not a string")
        if not str(one.get("mount_path", "")).startswith("/"):
            raise ConfigError(f"{where}.mount_path: give an absolute path in the container")
        if not isinstance(one.get("read_only", False), bool):
            raise ConfigError(f"{where}.read_only: {one['read_only']!r} is not true or false")


def _check_mount_paths(role: str, volumes: tuple[Mapping[str, Any], ...]) -> None:
    paths = [str(PurePosixPath(one["mount_path"])) for one in volumes]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(f"{role}.volumes: two volumes have the mount_path {path}")
