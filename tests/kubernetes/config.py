"""What each part of the cluster is told: arguments and configuration files, as values.

Pure: it reads and writes nothing. What differs from Kubernetes' defaults is there because
everything runs on one machine, and because of what such a machine may lack: systemd,
CAP_SYS_RESOURCE, cgroups of version 2 and a dummy network device.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tests.kubernetes.build import PAUSE_IMAGE
from tests.kubernetes.processes import NODE_CGROUP

__all__ = ["Layout", "Node"]

BRIDGE = "backstay-kube"
# The machine's address on the bridge: the API server's, and the DNS server's.
GATEWAY = "10.244.0.1"
POD_RANGE = "10.244.0.0/16"
SERVICE_RANGE = "10.96.0.0/16"
FIRST_SERVICE = "10.96.0.1"
API_PORT = 16443
ETCD_PORT = 12379
ETCD_PEER_PORT = 12380
CONTROLLER_MANAGER_PORT = 12257
SCHEDULER_PORT = 12259
KUBELET_HEALTH_PORT = 12300
NETWORK_NAME = "backstay-kubernetes"
# Silent for so long, and a node is NotReady; its Pods are evicted 5 s later.
NODE_GRACE_S = 12
EVICTION_GRACE_S = 5
# Each node believes that it has the whole machine; this is left to everybody else.
RESERVED_MEMORY = "4Gi"
# containerd would look for each and warn.
SNAPSHOTTERS_UNUSED = ("aufs", "btrfs", "devmapper", "zfs")


@dataclass(frozen=True)
class Node:
    """A node by its number, from 1 to 99."""

    number: int

    @property
    def name(self) -> str:
        """``node1``."""
        return f"node{self.number}"

    @property
    def address(self) -> str:
        """Where its kubelet listens."""
        return f"10.244.255.{self.number}"


@dataclass(frozen=True)
class Layout:
    """Where programs and the cluster's files are."""

    programs: Path
    state: Path

    def key(self, name: str) -> Path:
        """Private key."""
        return self.state / "pki" / f"{name}.key"

    def certificate(self, name: str) -> Path:
        """Certificate of that key."""
        return self.state / "pki" / f"{name}.pem"

    def kubeconfig(self, name: str) -> Path:
        """How a program of this name reaches the API server."""
        return self.state / f"{name}.kubeconfig"

    def log(self, process: str) -> Path:
        """What the process prints."""
        return self.state / "log" / f"{process}.log"

    def node(self, node: Node) -> Path:
        """The node's own files."""
        return self.state / node.name

    def containerd_socket(self, node: Node) -> Path:
        """Where the node's containerd listens."""
        return self.node(node) / "run" / "containerd.sock"

    def etcd_arguments(self) -> list[str | Path]:
        """Etcd without syncs to disk: the data need not survive a power cut."""
        client = f"http://127.0.0.1:{ETCD_PORT}"
        return [
            self.programs / "etcd",
            f"--data-dir={self.state / 'etcd'}",
            "--unsafe-no-fsync",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls=http://127.0.0.1:{ETCD_PEER_PORT}",
            "--log-level=warn",
        ]

    def api_server_arguments(self) -> list[str | Path]:
        """The API server on the bridge, where Pods reach it."""
        return [
            self.programs / "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{ETCD_PORT}",
            f"--bind-address={GATEWAY}",
            f"--secure-port={API_PORT}",
            f"--tls-cert-file={self.certificate('api-server')}",
            f"--tls-private-key-file={self.key('api-server')}",
            f"--client-ca-file={self.certificate('ca')}",
            f"--kubelet-client-certificate={self.certificate('kubelet-client')}",
            f"--kubelet-client-key={self.key('kubelet-client')}",
            "--kubelet-preferred-address-types=InternalIP",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self.key('service-account')}",
            f"--service-account-signing-key-file={self.key('service-account')}",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            f"--default-not-ready-toleration-seconds={EVICTION_GRACE_S}",
            f"--default-unreachable-toleration-seconds={EVICTION_GRACE_S}",
        ]

    def controller_manager_arguments(self) -> list[str | Path]:
        """All controllers; a silent node is noticed soon."""
        return [
            self.programs / "kube-controller-manager",
            *self._kubeconfigs("controller-manager"),
            f"--service-account-private-key-file={self.key('service-account')}",
            f"--root-ca-file={self.certificate('ca')}",
            f"--cluster-signing-cert-file={self.certificate('ca')}",
            f"--cluster-signing-key-file={self.key('ca')}",
            "--use-service-account-credentials=true",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--secure-port={CONTROLLER_MANAGER_PORT}",
            "--node-monitor-period=1s",
            f"--node-monitor-grace-period={NODE_GRACE_S}s",
        ]

    def scheduler_arguments(self) -> list[str | Path]:
        """The scheduler."""
        return [
            self.programs / "kube-scheduler",
            *self._kubeconfigs("scheduler"),
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--secure-port={SCHEDULER_PORT}",
        ]

    def proxy_arguments(self) -> list[str | Path]:
        """One kube-proxy for all nodes, which share the machine's network."""
        return [
            self.programs / "kube-proxy",
            f"--kubeconfig={self.kubeconfig('proxy')}",
            "--proxy-mode=iptables",
            "--iptables-localhost-nodeports=false",
            f"--cluster-cidr={POD_RANGE}",
            # It leaves the machine's settings of conntrack alone.
            "--conntrack-max-per-core=0",
            "--conntrack-min=0",
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
            "--bind-address=127.0.0.1",
            f"--hostname-override={Node(1).name}",
        ]

    def dns_arguments(self) -> list[str | Path]:
        """The cluster's DNS server."""
        return [
            self.programs / "kube-dns",
            f"--kubeconfig={self.kubeconfig('dns')}",
            f"--listen={GATEWAY}:53",
        ]

    def containerd_arguments(self, node: Node) -> list[str | Path]:
        """A containerd for each node."""
        return ["containerd", "--config", self.node(node) / "containerd.toml"]

    def kubelet_arguments(self, node: Node) -> list[str | Path]:
        """A kubelet for each node."""
        folder = self.node(node)
        return [
            self.programs / "kubelet",
            f"--config={folder / 'kubelet.json'}",
            f"--kubeconfig={self.kubeconfig(node.name)}",
            f"--root-dir={folder / 'kubelet'}",
            f"--cert-dir={folder / 'kubelet' / 'pki'}",
            f"--hostname-override={node.name}",
            f"--node-ip={node.address}",
            "--v=2",
        ]

    def node_files(self, node: Node) -> dict[str, str]:
        """Return the files that a node needs, by their path below its folder."""
        return {
            "containerd.toml": self._containerd(node),
            "kubelet.json": json.dumps(self._kubelet(node), indent=1),
            "cni/10-bridge.conflist": json.dumps(self._network(node), indent=1),
            # No Pod asks the machine's DNS servers.
            "resolv.conf": "",
        }

    def _kubeconfigs(self, name: str) -> list[str]:
        path = self.kubeconfig(name)
        uses = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
        return [f"--{use}={path}" for use in uses]

    def _containerd(self, node: Node) -> str:
        """Quoted strings of JSON are strings of TOML, too."""
        folder = self.node(node)
        unused = ("internal.v1.opt", *(f"snapshotter.v1.{kind}" for kind in SNAPSHOTTERS_UNUSED))
        return f"""version = 2
root = "{folder / "containerd"}"
state = "{folder / "run"}"
oom_score = 0  # a lower one needs CAP_SYS_RESOURCE
disabled_plugins = {json.dumps([f"io.containerd.{plugin}" for plugin in unused])}
[grpc]
  address = "{self.containerd_socket(node)}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder / "cni"}"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"""

    def _kubelet(self, node: Node) -> dict[str, object]:
        folder = self.node(node)
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": node.address,
            "port": 10250,
            "healthzBindAddress": "127.0.0.1",
            "healthzPort": KUBELET_HEALTH_PORT + node.number,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(self.certificate("ca"))},
            },
            "authorization": {"mode": "Webhook"},
            "containerRuntimeEndpoint": f"unix://{self.containerd_socket(node)}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{NODE_CGROUP.format(node.name)}",
            "cgroupsPerQOS": True,
            "enforceNodeAllocatable": ["pods"],
            "failSwapOn": False,
            "failCgroupV1": False,
            "oomScoreAdj": 0,
            "makeIPTablesUtilChains": False,
            "podLogsDir": str(folder / "logs"),
            "volumePluginDir": str(folder / "volume-plugins"),
            "resolvConf": str(folder / "resolv.conf"),
            "clusterDomain": "cluster.local",
            "clusterDNS": [GATEWAY],
            "evictionHard": {
                "memory.available": "200Mi",
                "nodefs.available": "100Mi",
                "imagefs.available": "100Mi",
            },
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "systemReserved": {"memory": RESERVED_MEMORY},
            "nodeStatusUpdateFrequency": "2s",
            "nodeStatusReportFrequency": "10s",
            "nodeLeaseDurationSeconds": 10,
        }

    def _network(self, node: Node) -> dict[str, object]:
        """Addresses 10.244.NUMBER.10 to 250 on the one bridge."""
        prefix = f"10.244.{node.number}"
        addresses = {
            "subnet": POD_RANGE,
            "rangeStart": f"{prefix}.10",
            "rangeEnd": f"{prefix}.250",
            "gateway": GATEWAY,
        }
        bridge = {
            "type": "bridge",
            "bridge": BRIDGE,
            "isGateway": False,
            "ipMasq": False,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "dataDir": str(self.node(node) / "addresses"),
                "ranges": [[addresses]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
        return {"cniVersion": "0.4.0", "name": NETWORK_NAME, "plugins": [bridge]}
