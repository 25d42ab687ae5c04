"""Images of the Kubernetes tests: what containerd reads is what was put in."""

from __future__ import annotations

import hashlib
import io
import json
import py_compile
import tarfile
from importlib.metadata import PathDistribution
from importlib.util import cache_from_source
from pathlib import Path

from tests.kubernetes.backstay_image import add_package
from tests.kubernetes.images import ImageConfig, Layer, write_image


def small_layer(program: Path) -> Layer:
    layer = Layer()
    layer.text("etc/passwd", "user:x:1:1::/:/bin/sh\n")
    layer.file("usr/bin/program", program)
    layer.link("bin", "usr/bin")
    return layer


def program(folder: Path) -> Path:
    path = folder / "program"
    path.write_bytes(b"\x7fELF")
    path.chmod(0o700)
    return path


def test_an_image_names_its_layer_and_configuration_by_their_digests(tmp_path: Path) -> None:
    config = ImageConfig(entrypoint=("/bin/program",), environment=("A=b",), user="1:1")
    path = tmp_path / "image.tar"
    write_image(path, "localhost/small:1", small_layer(program(tmp_path)), config)
    with tarfile.open(path) as image:
        parts = {name: image.extractfile(name).read() for name in image.getnames()}  # type: ignore[union-attr]
    (manifest,) = json.loads(parts["manifest.json"])
    assert manifest["RepoTags"] == ["localhost/small:1"]
    text = parts[manifest["Config"]]
    assert manifest["Config"] == hashlib.sha256(text).hexdigest() + ".json"
    found = json.loads(text)
    layer = parts[manifest["Layers"][0]]
    assert found["rootfs"]["diff_ids"] == ["sha256:" + hashlib.sha256(layer).hexdigest()]
    assert found["config"]["User"] == "1:1"
    assert found["config"]["Entrypoint"] == ["/bin/program"]
    assert "A=b" in found["config"]["Env"]
    # Nothing but the image is left in the folder.
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["image.tar", "program"]


def test_files_belong_to_root_and_can_be_read_by_all(tmp_path: Path) -> None:
    file = io.BytesIO()
    small_layer(program(tmp_path)).write(file)
    file.seek(0)
    with tarfile.open(fileobj=file) as layer:
        entries = {entry.name: entry for entry in layer.getmembers()}
    # Folders come before what is in them.
    assert list(entries) == ["etc", "etc/passwd", "usr", "usr/bin", "usr/bin/program", "bin"]
    assert all(entry.uid == entry.gid == 0 for entry in entries.values())
    assert entries["usr/bin/program"].mode == 0o755
    assert entries["etc/passwd"].mode == 0o644
    assert entries["bin"].linkname == "usr/bin"


def test_a_changed_file_changes_the_digest(tmp_path: Path) -> None:
    source = program(tmp_path)
    before = small_layer(source).digest()
    assert small_layer(source).digest() == before
    source.write_bytes(b"\x7fELF and more")
    assert small_layer(source).digest() != before


def test_a_tree_leaves_out_what_it_is_told(tmp_path: Path) -> None:
    for name in ("kept/file", "kept/tests/file", "tests/file"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")
    layer = Layer()
    layer.tree("opt", tmp_path, lambda path: path.name == "tests")
    assert layer.sources() == [tmp_path / "kept" / "file"]


def test_compiled_modules_come_along_with_their_package(tmp_path: Path) -> None:
    # As uv installs a package: it compiles modules, and RECORD does not tell.
    package, module = tmp_path / "small-1.dist-info", tmp_path / "small.py"
    package.mkdir()
    (package / "RECORD").write_text("small.py,,\n")
    module.write_text("")
    py_compile.compile(str(module))
    layer = Layer()
    add_package(layer, PathDistribution(package))
    file = io.BytesIO()
    layer.write(file)
    file.seek(0)
    with tarfile.open(fileobj=file) as tar:
        files = [member.name for member in tar if member.isfile()]
    compiled = Path(cache_from_source(module)).name
    assert files == ["opt/backstay/small.py", f"opt/backstay/__pycache__/{compiled}"]
