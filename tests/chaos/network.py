"""A network of namespaces on one bridge, and the faults in it.

Each host is a network namespace with one interface. Rules of nft in the namespace drop, cut,
reset and duplicate; delay and reordering are done by ``delay.py`` behind a queue, because many
kernels come without netem; a token bucket makes a link slow. Without namespaces ``Loopback``
stands in: everything on 127.0.0.1, and no fault of the network.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Protocol

__all__ = ["Host", "Loopback", "Namespaces", "Network", "NetworkFaultImpossible"]

# In a network namespace of its own, so it can collide with nothing.
PREFIX = "10.77.0."
BRIDGE_ADDRESS = PREFIX + "1"
FIRST_HOST = 10
QUEUE = 7
# Small frames are acknowledgements and answers; a larger one is a part of a longer frame.
MID_FRAME_BYTES = 600
COMMAND_LIMIT_S = 20


class NetworkFaultImpossible(Exception):
    """This fault needs namespaces."""


class Host:
    """One machine of the network."""

    def __init__(self, name: str, address: str, prefix: Sequence[str]) -> None:
        """Describe it.

        Args:
            name: For people.
            address: Its IP address.
            prefix: Put before a command, so that it runs on this host.
        """
        self.name = name
        self.address = address
        self.prefix = tuple(prefix)


class Network(Protocol):
    """What the cluster and the faults need of a network."""

    has_faults: bool

    def add_host(self, name: str) -> Host:
        """Make a host."""

    def apply(self, host: Host, rules: Sequence[str], out_rules: Sequence[str] = ()) -> None:
        """Put rules for what comes in, and for what goes out, in place of those there are."""

    def duplicate(self, host: Host, peers: Sequence[Host], percent: int) -> None:
        """Send some packets from a host to its peers twice."""

    def delay(self, host: Host, delay_ms: int, jitter_ms: int) -> None:
        """Hold back every packet that leaves a host; jitter reorders them."""

    def slow(self, host: Host, kbit: int) -> None:
        """Limit what leaves a host."""

    def heal(self, host: Host) -> None:
        """End every fault at a host."""

    def close(self) -> None:
        """Remove everything."""


class Loopback:
    """No namespaces: one address, no faults of the network."""

    has_faults = False

    def add_host(self, name: str) -> Host:
        return Host(name, "127.0.0.1", ())

    def apply(self, host: Host, rules: Sequence[str], out_rules: Sequence[str] = ()) -> None:
        raise NetworkFaultImpossible(host.name)

    def duplicate(self, host: Host, peers: Sequence[Host], percent: int) -> None:
        raise NetworkFaultImpossible(host.name)

    def delay(self, host: Host, delay_ms: int, jitter_ms: int) -> None:
        raise NetworkFaultImpossible(host.name)

    def slow(self, host: Host, kbit: int) -> None:
        raise NetworkFaultImpossible(host.name)

    def heal(self, host: Host) -> None:
        """There is nothing to end."""

    def close(self) -> None:
        """There is nothing to remove."""


class Namespaces:
    """Hosts as network namespaces, inside the one that ``sandbox`` made."""

    has_faults = True

    def __init__(self) -> None:
        """Make the bridge."""
        self._hosts: dict[str, subprocess.Popen[bytes]] = {}
        self._links: list[str] = []
        self._delays: dict[str, subprocess.Popen[bytes]] = {}
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        _run("ip", "address", "add", f"{BRIDGE_ADDRESS}/24", "dev", "br0")
        _run("ip", "link", "set", "br0", "up")

    def add_host(self, name: str) -> Host:
        number = len(self._hosts) + FIRST_HOST
        address = f"{PREFIX}{number}"
        # A process that does nothing keeps the namespace; it ends when its input closes.
        keeper = subprocess.Popen(
            ["unshare", "--net", "--", "sh", "-c", "echo up; exec cat >/dev/null"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._hosts[name] = keeper
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == b"up\n", f"no namespace for {name}"
        host = Host(name, address, ("nsenter", f"--net=/proc/{keeper.pid}/ns/net", "--"))
        ours, pid = f"v{number}", str(keeper.pid)
        _run("ip", "link", "add", ours, "type", "veth", "peer", "name", "eth0", "netns", pid)
        self._links.append(ours)
        _run("ip", "link", "set", ours, "master", "br0", "up")
        _run(*host.prefix, "ip", "link", "set", "lo", "up")
        _run(*host.prefix, "ip", "address", "add", f"{address}/24", "dev", "eth0")
        _run(*host.prefix, "ip", "link", "set", "eth0", "up")
        return host

    def apply(self, host: Host, rules: Sequence[str], out_rules: Sequence[str] = ()) -> None:
        text = f"""
            table inet chaos {{}}
            delete table inet chaos
            table inet chaos {{
              chain in {{
                type filter hook input priority 0;
                iifname lo accept
                {_lines(rules)}
              }}
              chain out {{
                type filter hook output priority 0;
                oifname lo accept
                {_lines(out_rules)}
              }}
            }}
        """
        _run(*host.prefix, "nft", "-f", "-", text=text)

    def duplicate(self, host: Host, peers: Sequence[Host], percent: int) -> None:
        rules = [
            f"numgen random mod 100 < {percent} ip daddr {peer.address} "
            f"dup to {peer.address} device eth0"
            for peer in peers
        ]
        text = f"""
            table ip chaos_dup {{
              chain out {{
                type filter hook output priority 0;
                {_lines(rules)}
              }}
            }}
        """
        _run(*host.prefix, "nft", "-f", "-", text=text)

    def delay(self, host: Host, delay_ms: int, jitter_ms: int) -> None:
        arguments = [str(QUEUE), str(delay_ms), str(jitter_ms)]
        holder = subprocess.Popen(
            [*host.prefix, sys.executable, "-m", "tests.chaos.delay", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._delays[host.name] = holder
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"up\n", f"no delay at {host.name}"
        rule = ["OUTPUT", "-o", "eth0", "-j", "NFQUEUE", "--queue-num", str(QUEUE)]
        _run(*host.prefix, "iptables", "-A", *rule, "--queue-bypass")

    def slow(self, host: Host, kbit: int) -> None:
        bucket = ["rate", f"{kbit}kbit", "burst", "64kb", "latency", "400ms"]
        _run(*host.prefix, "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *bucket)

    def heal(self, host: Host) -> None:
        self.apply(host, ())
        _run(
            *host.prefix, "nft", "-f", "-", text="table ip chaos_dup {}\ndelete table ip chaos_dup"
        )
        holder = self._delays.pop(host.name, None)
        if holder is not None:
            _run(*host.prefix, "iptables", "-F", "OUTPUT")
            # It lets go of what it holds before it ends.
            _end(holder)
        _run(*host.prefix, "sh", "-c", "tc qdisc del dev eth0 root 2>/dev/null || true")

    def close(self) -> None:
        # A kernel takes a namespace down some time after its last process: a link that went only
        # with it would stand in the way of the next network's of the same name.
        try:
            for link in self._links:
                _run("ip", "link", "delete", link)
        finally:
            for holder in [*self._delays.values(), *self._hosts.values()]:
                _end(holder)
            self._links.clear()
            self._delays.clear()
            self._hosts.clear()
        _run("ip", "link", "delete", "br0")


def drop_from(peers: Sequence[Host]) -> list[str]:
    """Rules that drop what comes from these hosts."""
    return [f"ip saddr {peer.address} drop" for peer in peers]


def drop_to(peers: Sequence[Host]) -> list[str]:
    """Rules that drop what goes to these hosts."""
    return [f"ip daddr {peer.address} drop" for peer in peers]


def drop_some(percent: int) -> list[str]:
    """Rules that lose a share of all packets."""
    return [f"numgen random mod 100 < {percent} drop"]


def reset_some(per_thousand: int, *, longer_than: int = MID_FRAME_BYTES) -> list[str]:
    """Rules that answer some packets in the middle of a frame with a reset.

    Only on connections that are established: a refused connection would be evidence that the
    process is gone.
    """
    return [
        f"meta l4proto tcp ct state established meta length > {longer_than} "
        f"numgen random mod 1000 < {per_thousand} reject with tcp reset"
    ]


def _lines(rules: Sequence[str]) -> str:
    return "\n".join(rules)


def _end(holder: subprocess.Popen[bytes]) -> None:
    assert holder.stdin is not None
    assert holder.stdout is not None
    holder.stdin.close()
    holder.wait(COMMAND_LIMIT_S)
    holder.stdout.close()


def _run(*command: str, text: str | None = None) -> None:
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()} {text or ''}")
