"""Container images without docker: files -> a tar file that ``ctr image import`` reads.

A ``Layer`` collects the files; ``write_image`` writes them with their configuration in the
format of ``docker save``. Imports the standard library only.
"""

from __future__ import annotations

import hashlib
import io
import json
import stat
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

__all__ = ["ImageConfig", "Layer", "write_image"]


@dataclass(frozen=True)
class ImageConfig:
    """What a container of the image runs, and as whom."""

    entrypoint: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    """Each ``NAME=value``."""
    user: str = ""
    """Numbers, ``uid:gid``: Kubernetes cannot tell whether a name is root. Empty: root."""
    working_folder: str = "/"


class Layer:
    """Files of an image, by their path without the leading slash. All belong to root."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[tarfile.TarInfo, Path | bytes | None]] = {}

    def folder(self, name: str, mode: int = 0o755) -> None:
        """Add a folder, and the ones above it that are missing."""
        entry = tarfile.TarInfo(name)
        entry.type = tarfile.DIRTYPE
        entry.mode = mode
        self._add(entry, None)

    def text(self, name: str, text: str, mode: int = 0o644) -> None:
        """Add a file with this text."""
        entry = tarfile.TarInfo(name)
        entry.mode = mode
        entry.size = len(text.encode())
        self._add(entry, text.encode())

    def link(self, name: str, target: str) -> None:
        """Add a symbolic link."""
        entry = tarfile.TarInfo(name)
        entry.type = tarfile.SYMTYPE
        entry.linkname = target
        self._add(entry, None)

    def file(self, name: str, source: Path) -> None:
        """Add a file of this machine, readable by everybody. A link is followed."""
        status = source.stat()
        entry = tarfile.TarInfo(name)
        entry.mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
        entry.size = status.st_size
        # Python takes a .pyc file only if it names its source's time.
        entry.mtime = int(status.st_mtime)
        self._add(entry, source)

    def tree(self, name: str, source: Path, leave_out: Callable[[Path], bool]) -> None:
        """Add a folder of this machine with what is in it; links are followed."""
        for path in sorted(source.iterdir()):
            if leave_out(path):
                continue
            if path.is_dir():
                self.tree(f"{name}/{path.name}", path, leave_out)
            elif path.is_file():
                self.file(f"{name}/{path.name}", path)

    def sources(self) -> list[Path]:
        """Return the files of this machine that are in the layer."""
        return [content for _, content in self._entries.values() if isinstance(content, Path)]

    def digest(self) -> str:
        """Name what is in the layer, from texts, and from sizes and times of files."""
        digest = hashlib.sha256()
        for name, (entry, content) in sorted(self._entries.items()):
            text = content if isinstance(content, bytes) else entry.linkname.encode()
            line = f"{name}\0{entry.mode}\0{entry.size}\0{entry.mtime}\0".encode()
            digest.update(line + text + b"\n")
        return digest.hexdigest()

    def write(self, file: BinaryIO) -> None:
        """Write the layer as a tar file."""
        with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for entry, content in self._entries.values():
                if isinstance(content, Path):
                    with content.open("rb") as source:
                        tar.addfile(entry, source)
                else:
                    tar.addfile(entry, io.BytesIO(content or b""))

    def _add(self, entry: tarfile.TarInfo, content: Path | bytes | None) -> None:
        above = entry.name.rpartition("/")[0]
        if above and above not in self._entries:
            self.folder(above)
        self._entries[entry.name] = (entry, content)


def write_image(path: Path, name: str, layer: Layer, config: ImageConfig) -> None:
    """Write an image of one layer; the file appears when it is whole.

    Args:
        path: The tar file.
        name: The image's name with its tag, ``localhost/pause:1``.
        layer: Its files.
        config: How its containers start.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="image-") as aside:
        layer_path = Path(aside, "layer.tar")
        with layer_path.open("wb") as file:
            layer.write(file)
        digest = hashlib.sha256(layer_path.read_bytes()).hexdigest()
        text = json.dumps(_configuration(config, digest)).encode()
        config_name = f"{hashlib.sha256(text).hexdigest()}.json"
        manifest = [{"Config": config_name, "RepoTags": [name], "Layers": ["layer.tar"]}]
        image_path = Path(aside, "image.tar")
        with tarfile.open(image_path, "w") as tar:
            for file_name, data in (
                (config_name, text),
                ("manifest.json", json.dumps(manifest).encode()),
            ):
                entry = tarfile.TarInfo(file_name)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
            tar.add(layer_path, "layer.tar")
        image_path.rename(path)


def _configuration(config: ImageConfig, layer_digest: str) -> dict[str, object]:
    created = "1970-01-01T00:00:00Z"
    return {
        "architecture": "amd64",
        "os": "linux",
        "created": created,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
        "config": {
            "Entrypoint": list(config.entrypoint) or None,
            "Env": ["PATH=/usr/local/bin:/usr/bin:/bin", *config.environment],
            "User": config.user,
            "WorkingDir": config.working_folder,
        },
        "history": [{"created": created, "created_by": "tests/kubernetes/images.py"}],
    }
