"""Make the native data plane of a client.

Imports the native module, the settings and what the directory says of the cluster. Opens no
connection: the native client does so when it is asked to.
"""

from __future__ import annotations

import os
import secrets
import socket

from backstay._native import DataClient
from backstay.cluster.directory import ClusterInfo
from backstay.config import ClientConfig
from backstay.trainer.watch import set_routing


def make_data_plane(config: ClientConfig, info: ClusterInfo) -> DataClient:
    """Return a native client of that cluster, going by the routing in ``info``.

    Raises:
        ConfigError: A TLS file cannot be read or is damaged.
    """
    pems = config.read_pems()
    native = DataClient(
        cluster_id=info.cluster_id,
        client_name=f"{socket.gethostname()}:{os.getpid()}",
        # 64 random bits name this client's stream of pushes.
        stream_job=secrets.randbits(64),
        token=config.token,
        tls_ca_pem=pems.ca,
        tls_cert_pem=pems.cert,
        tls_key_pem=pems.key,
        connect_timeout_ms=config.connect_timeout_ms,
        stall_timeout_ms=config.stall_timeout_ms,
        max_frame_bytes=config.max_frame_bytes,
        part_bytes=config.part_bytes,
        max_pushes_in_flight=config.max_pushes_in_flight,
    )
    set_routing(native, info)
    return native
