"""The image ``localhost/etcd:test``: the etcd of this machine, as deploy/Dockerfile takes Debian's.

It has no shell and no etcdctl: the manifests need etcd only.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.etcd import require_etcd
from tests.kubernetes.build import cache_folder, prune
from tests.kubernetes.images import ImageConfig, Layer, write_image

__all__ = ["IMAGE", "etcd_image"]

IMAGE = "localhost/etcd:test"
# For the names of the other members; the program loads them by itself.
NAME_SERVICES = ("libnss_files.so.2", "libnss_dns.so.2", "libresolv.so.2")


def etcd_image() -> Path:
    """Return the image's tar file, written if etcd has changed."""
    program = Path(require_etcd())
    layer = Layer()
    for name in ("bin", "lib", "lib64"):
        layer.folder(f"usr/{name}")
        layer.link(name, f"usr/{name}")
    layer.folder("tmp", mode=0o1777)
    layer.text("etc/nsswitch.conf", "hosts: files dns\n")
    layer.file("usr/bin/etcd", program)
    done = subprocess.run(["ldd", program], capture_output=True, text=True, timeout=60, check=False)
    libraries = [
        Path(one) for one in re.findall(r"^\t(?:\S+ => )?(/\S+) \(", done.stdout, re.MULTILINE)
    ]
    beside = libraries[0].parent if libraries else Path("/nowhere")
    libraries += [beside / name for name in NAME_SERVICES if (beside / name).exists()]
    for library in libraries:
        layer.file(f"usr/{str(library).removeprefix('/usr').lstrip('/')}", library)
    path = cache_folder() / f"etcd-{layer.digest()[:16]}.tar"
    if not path.exists():
        write_image(path, IMAGE, layer, ImageConfig())
    path.touch()
    prune("etcd-*.tar")
    return path
