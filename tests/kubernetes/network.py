"""The bridge of the Pods, and the machine's settings that the cluster changes.

Pods reach each other and this machine, nothing else. ``take_down`` puts back what ``set_up`` and
the cluster's programs changed. Imports the standard library only.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.kubernetes.config import BRIDGE, GATEWAY, NETWORK_NAME, SERVICE_RANGE

__all__ = ["add_address", "remains", "set_up", "take_down"]

SYSCTLS = Path("/proc/sys")
# These are set here; the kubelet sets the others.
FORWARDING = ("net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables")
KUBELETS = ("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops")
SAVED_SYSCTLS = "sysctls.json"
ADDRESSES_OF_PODS = Path("/var/lib/cni/results")
# Nothing goes from the bridge to another device.
BARRIER = ("FORWARD", "-i", BRIDGE, "!", "-o", BRIDGE, "-j", "DROP")
COMMAND_LIMIT_S = 60.0


def set_up(state: Path) -> None:
    """Make the bridge; note in the folder what is changed for it."""
    _run("ip", "link", "add", BRIDGE, "type", "bridge")
    _run("ip", "address", "add", f"{GATEWAY}/16", "dev", BRIDGE)
    _run("ip", "link", "set", BRIDGE, "up")
    # An unknown Service's address would take the default route and leave the machine.
    _run("ip", "route", "replace", SERVICE_RANGE, "dev", BRIDGE)
    before = {
        name: (SYSCTLS / name).read_text()
        for name in (*FORWARDING, *KUBELETS)
        if (SYSCTLS / name).exists()
    }
    (state / SAVED_SYSCTLS).write_text(json.dumps(before))
    for name in FORWARDING:
        if name in before:
            (SYSCTLS / name).write_text("1")
    _run("iptables", "--wait", "-I", *BARRIER)


def add_address(address: str) -> None:
    """Give the bridge a node's address."""
    _run("ip", "address", "replace", f"{address}/32", "dev", BRIDGE)


def take_down(state: Path, kube_proxy: Path) -> None:
    """Remove the bridge, the Pods' network namespaces and the rules; put the settings back."""
    for result in ADDRESSES_OF_PODS.glob(f"{NETWORK_NAME}-*"):
        found = json.loads(result.read_text())
        loopback = f"cni-loopback-{found['containerId']}-lo"
        (ADDRESSES_OF_PODS / loopback).unlink(missing_ok=True)
        for interface in found["result"].get("interfaces", ()):
            namespace = Path(interface.get("sandbox", ""))
            if namespace.name.startswith("cni-") and namespace.exists():
                _run("ip", "netns", "delete", namespace.name)
        result.unlink()
    if _there("ip", "link", "show", BRIDGE):
        _run("ip", "link", "delete", BRIDGE)
    if kube_proxy.exists():
        _there(str(kube_proxy), "--cleanup")
    for command in ("iptables", "ip6tables"):
        for chain in ("INPUT", "OUTPUT"):
            _there(command, "--wait", "-D", chain, "-j", "KUBE-FIREWALL")
        _there(command, "--wait", "-F", "KUBE-FIREWALL")
        _there(command, "--wait", "-X", "KUBE-FIREWALL")
    while _there("iptables", "--wait", "-D", *BARRIER):
        pass
    saved = state / SAVED_SYSCTLS
    if saved.exists():
        for name, value in json.loads(saved.read_text()).items():
            (SYSCTLS / name).write_text(value)


def remains() -> list[str]:
    """Return a line for each trace of the cluster in the machine's network."""
    lines = []
    for command in ("iptables-save", "ip6tables-save"):
        text = subprocess.run([command], capture_output=True, text=True, check=False).stdout
        lines += [line for line in text.splitlines() if "KUBE-" in line or BRIDGE in line]
    if _there("ip", "link", "show", BRIDGE):
        lines.append(f"device {BRIDGE}")
    return lines


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, timeout=COMMAND_LIMIT_S, check=True)


def _there(*command: str) -> bool:
    done = subprocess.run(command, capture_output=True, timeout=COMMAND_LIMIT_S, check=False)
    return done.returncode == 0
