"""Addresses of the form ``host:port``: taking them apart and judging them.

This module imports ``backstay.errors`` only and never resolves a name.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from backstay.errors import ConfigError

__all__ = ["is_host_name", "is_loopback", "parse_endpoints", "split_address"]

PORT_MAX = 65535
ENDPOINTS_MAX = 4096
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9.])?")


def split_address(setting: str, address: str) -> tuple[str, int]:
    """Return host and port of ``"host:port"`` or ``"[ipv6]:port"`` (brackets are kept).

    Args:
        setting: The name of the setting, for the error.
        address: The text to take apart.

    Raises:
        ConfigError: It is not of that form.
    """
    host, separator, port = address.rpartition(":")
    valid_host = _is_bracketed_ipv6(host) or _HOST.fullmatch(host)
    if not separator or not valid_host or not (port.isascii() and port.isdigit()):
        raise ConfigError(f"{setting}: {address!r} is not of the form host:port")
    if int(port) > PORT_MAX:
        raise ConfigError(f"{setting}: port {port} of {address!r} is over {PORT_MAX}")
    return host, int(port)


def is_host_name(host: str) -> bool:
    """Return whether a host name, or an IPv4 address, looks like this."""
    return _HOST.fullmatch(host) is not None


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach an address on that host.

    A name other than ``localhost`` counts as reachable: what it resolves to can change.
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def parse_endpoints(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return the addresses written as ``"host:port,host:port"``, or several such strings.

    Raises:
        ConfigError: There is none, there are too many, or one is not of that form.
    """
    text = given if isinstance(given, str) else ",".join(given)
    endpoints = tuple(filter(None, (part.strip() for part in text.split(","))))
    if not endpoints:
        raise ConfigError("endpoint: no address given; it should look like host:port")
    if len(endpoints) > ENDPOINTS_MAX:
        raise ConfigError(f"endpoint: {len(endpoints)} addresses; at most {ENDPOINTS_MAX}")
    for endpoint in endpoints:
        split_address("endpoint", endpoint)
    return endpoints


def _is_bracketed_ipv6(host: str) -> bool:
    if not (host.startswith("[") and host.endswith("]")):
        return False
    try:
        ipaddress.IPv6Address(host[1:-1])
    except ValueError:
        return False
    return True
