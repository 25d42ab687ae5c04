"""One contract for every place of checkpoints: a local folder, and S3 from a real server."""

from __future__ import annotations

import itertools
import os
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backstay.checkpoint.manifest import MANIFEST_FILE
from backstay.checkpoint.reading import CheckpointReader
from backstay.checkpoint.retention import surplus
from backstay.checkpoint.storage import CheckpointStorage
from backstay.checkpoint.verification import verify
from backstay.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    CheckpointUnavailable,
    ConfigError,
    InvalidRequest,
)
from backstay.pserver.free_ports import free_ports
from tests.s3 import s3_server
from tests.unit.checkpoint_files import (
    ADS,
    FULL,
    SECOND,
    THIRD,
    Content,
    full_content,
    make_checkpoint,
    seal,
)

PART = "part-6b1f0c2a-0000.safetensors"
numbers = itertools.count()


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with s3_server(tmp_path_factory.mktemp("s3")) as options:
        import s3fs

        s3fs.S3FileSystem(**options).mkdir("bucket")
        yield options


Open = Callable[[], CheckpointStorage]


@pytest.fixture(params=["local", "file URL", "memory", "s3"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """How to open one more client of the same, empty place."""
    if request.param == "local":
        return lambda: CheckpointStorage(tmp_path / "deep" / "root")
    if request.param == "file URL":
        return lambda: CheckpointStorage((tmp_path / "größer root").as_uri())
    if request.param == "memory":
        # Not a real place, but one where fsspec renames, as it does on HDFS and SFTP.
        url = f"memory://root{next(numbers)}"
        return lambda: CheckpointStorage(url)
    options, name = request.getfixturevalue("s3"), next(numbers)
    return lambda: CheckpointStorage(f"s3://bucket/some/folder{name}/", options)


def test_a_checkpoint_exists_when_its_manifest_does(opened: Open, tmp_path: Path) -> None:
    storage, other = opened(), opened()
    assert storage.ids() == storage.unfinished() == []
    with pytest.raises(CheckpointNotFound, match=FULL):
        storage.read_manifest(FULL)
    path = tmp_path / PART
    path.write_bytes(b"begun")
    storage.create(SECOND)
    storage.create(SECOND)
    storage.publish(SECOND, path, PART)
    # Others see it at once, whatever they have looked at before.
    assert other.unfinished() == [SECOND]
    assert other.ids() == []
    with pytest.raises(CheckpointNotFound, match=f"no finished checkpoint {SECOND}"):
        other.read_manifest(SECOND)
    manifest = make_checkpoint(storage, tmp_path, FULL, full_content())
    assert other.ids() == [FULL]
    assert other.unfinished() == [SECOND]
    assert other.read_manifest(FULL) == manifest
    with pytest.raises(InvalidRequest, match="finished already"):
        other.create(FULL)
    other.write_manifest(manifest)
    with pytest.raises(InvalidRequest, match="finished already"):
        other.write_manifest(replace(manifest, generation=9))
    assert other.read_manifest(FULL) == manifest


def test_ids_are_in_the_order_of_their_numbers(opened: Open, tmp_path: Path) -> None:
    storage = opened()
    for checkpoint_id in ("ckpt-1000000-000000", THIRD, FULL, "ckpt-000003-ffffff"):
        make_checkpoint(storage, tmp_path, checkpoint_id, Content())
    assert storage.ids() == [FULL, THIRD, "ckpt-000003-ffffff", "ckpt-1000000-000000"]


def test_parts_go_there_and_come_back(opened: Open, tmp_path: Path) -> None:
    storage = opened()
    path = tmp_path / PART
    path.write_bytes(os.urandom(100_000))
    storage.create(FULL)
    storage.publish(FULL, path, PART)
    assert storage.size_of(FULL, PART) == 100_000
    came = storage.fetch(FULL, PART, tmp_path / "into")
    assert seal(came) == seal(path)
    if storage.is_local:
        assert came == storage.part_path(FULL, PART)
    else:
        assert came.is_relative_to(tmp_path / "into")
        with pytest.raises(InvalidRequest, match="not a folder of this machine"):
            storage.part_path(FULL, PART)
    with pytest.raises(CheckpointDamaged, match=f"{SECOND}/{PART}: missing"):
        storage.size_of(SECOND, PART)
    with pytest.raises(CheckpointDamaged, match=f"{SECOND}/{PART}: missing"):
        storage.fetch(SECOND, PART, tmp_path)


def test_a_manifest_is_not_written_before_its_parts(opened: Open, tmp_path: Path) -> None:
    storage = opened()
    manifest = make_checkpoint(storage, tmp_path, FULL, full_content())
    storage.delete(FULL)
    storage.create(FULL)
    with pytest.raises(CheckpointDamaged, match=f"{FULL}/{PART}: missing"):
        storage.write_manifest(manifest)
    short = tmp_path / PART
    short.write_bytes(b"short")
    storage.publish(FULL, short, PART)
    with pytest.raises(CheckpointDamaged, match=f"{FULL}/{PART}: 5 bytes, the manifest says"):
        storage.write_manifest(manifest)
    assert storage.ids() == []


def test_names_that_lead_out_of_the_folder_go_nowhere(opened: Open, tmp_path: Path) -> None:
    storage = opened()
    for bad in ("../../x", "/etc/passwd", MANIFEST_FILE):
        with pytest.raises(InvalidRequest):
            storage.fetch(FULL, bad, tmp_path)
        with pytest.raises(InvalidRequest):
            storage.publish(FULL, tmp_path / "x", bad)
        for call in (storage.create, storage.delete, storage.read_manifest, storage.chain):
            with pytest.raises(InvalidRequest, match="no checkpoint id"):
                call(bad)


def test_a_deleted_checkpoint_is_gone_whole(opened: Open, tmp_path: Path) -> None:
    storage = opened()
    make_checkpoint(storage, tmp_path, FULL, full_content())
    make_checkpoint(storage, tmp_path, SECOND, full_content())
    storage.delete(FULL)
    storage.delete(FULL)
    assert storage.ids() == [SECOND]
    assert storage.unfinished() == []
    assert verify(opened(), SECOND).ok


def test_a_deletion_that_was_cut_off_leaves_none(opened: Open, tmp_path: Path) -> None:
    storage = opened()
    manifest = make_checkpoint(storage, tmp_path, FULL, full_content())
    # What delete() does first; then the process ends.
    storage._root.remove(FULL, MANIFEST_FILE)
    assert opened().ids() == []
    assert opened().unfinished() == [FULL]
    assert storage.size_of(FULL, manifest.parts[0].file) > 0
    opened().delete(FULL)
    assert opened().unfinished() == []


def test_a_chain_is_read_verified_and_thinned_out(opened: Open, tmp_path: Path) -> None:
    storage = opened()
    make_checkpoint(storage, tmp_path, FULL, full_content())
    make_checkpoint(storage, tmp_path, SECOND, Content({ADS: {7: 7.0}}), base=FULL)
    make_checkpoint(storage, tmp_path, THIRD, full_content(3))
    reader_side = opened()
    assert [each.id for each in reader_side.chain(SECOND)] == [FULL, SECOND]
    with CheckpointReader(reader_side, SECOND, scratch=tmp_path) as reader:
        assert reader.row_count(ADS.name) == 41
    assert not list(tmp_path.glob("backstay-*"))
    assert verify(reader_side, SECOND, scratch=tmp_path).ok
    manifests = [storage.read_manifest(each) for each in storage.ids()]
    for each in surplus(manifests, keep_last=1):
        storage.delete(each)
    assert opened().ids() == [THIRD]


def test_other_things_in_the_root_are_left_alone(opened: Open, tmp_path: Path) -> None:
    storage = opened()
    make_checkpoint(storage, tmp_path, FULL, full_content())
    for folder in ("lost+found", "ckpt-1-old", "ckpt-000002-bbbbbb.tmp"):
        storage._root.make_folder(folder)
        storage._root.write(folder, "file", b"of somebody else")
    assert opened().ids() == [FULL]
    assert opened().unfinished() == []


# -- a folder ------------------------------------------------------------------------------


def test_what_is_there_for_a_reader_was_synced_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []
    fsync, rename = os.fsync, Path.replace

    def traced_fsync(descriptor: int) -> None:
        done.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def traced_replace(self: Path, target: Path) -> Path:
        done.append(("rename", str(target)))
        return rename(self, target)

    storage = CheckpointStorage(tmp_path / "root")
    manifest = make_checkpoint(storage, tmp_path, FULL, full_content())
    path = tmp_path / "root" / FULL / MANIFEST_FILE
    path.unlink()
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("the names of open files are read from /proc")
    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(Path, "replace", traced_replace)
    storage.write_manifest(manifest)
    folder = str(path.parent)
    assert done == [
        ("fsync", folder), ("fsync", f"{path}.tmp"), ("rename", str(path)), ("fsync", folder),
    ]  # fmt: skip


def test_a_manifest_that_was_cut_off_while_written_is_none(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path / "root")
    make_checkpoint(storage, tmp_path, FULL, full_content())
    path = tmp_path / "root" / FULL / MANIFEST_FILE
    path.rename(path.with_name("manifest.json.tmp"))
    assert storage.ids() == []
    assert storage.unfinished() == [FULL]


def test_a_pipe_in_the_place_of_a_file_stops_nobody(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path)
    storage.create(FULL)
    os.mkfifo(tmp_path / FULL / MANIFEST_FILE)
    os.mkfifo(tmp_path / FULL / PART)
    assert storage.unfinished() == [FULL]
    with pytest.raises(CheckpointNotFound):
        storage.read_manifest(FULL)
    with pytest.raises(CheckpointDamaged, match="missing"):
        storage.fetch(FULL, PART, tmp_path)


def test_a_link_in_the_place_of_a_checkpoint_is_not_followed(tmp_path: Path) -> None:
    elsewhere = CheckpointStorage(tmp_path / "elsewhere")
    make_checkpoint(elsewhere, tmp_path, FULL, full_content())
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / FULL).symlink_to(tmp_path / "elsewhere" / FULL)
    assert CheckpointStorage(tmp_path / "root").ids() == []
    assert elsewhere.ids() == [FULL]


def test_a_place_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    storage = CheckpointStorage(tmp_path / "file")
    for call in (storage.ids, lambda: storage.create(FULL)):
        with pytest.raises(CheckpointUnavailable, match="file"):
            call()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(CheckpointUnavailable, match="Permission denied"):
        CheckpointStorage(tmp_path / "root").create(FULL)


# -- URLs ----------------------------------------------------------------------------------


def test_a_storage_that_is_down_is_not_an_empty_one(s3: dict[str, Any]) -> None:
    down = f"http://127.0.0.1:{free_ports(1)[0]}"
    config = {"connect_timeout": 1, "retries": {"max_attempts": 0}}
    options = s3 | {"endpoint_url": down, "config_kwargs": config}
    storage = CheckpointStorage("s3://bucket/root", options)
    calls: list[Callable[[], object]] = [
        storage.ids,
        storage.unfinished,
        lambda: storage.read_manifest(FULL),
        lambda: storage.delete(FULL),
    ]
    for call in calls:
        with pytest.raises(CheckpointUnavailable, match="s3://bucket/root: "):
            call()


def test_a_bucket_that_does_not_exist_is_not_made(s3: dict[str, Any], tmp_path: Path) -> None:
    storage = CheckpointStorage("s3://nobody-made-this/root", s3)
    storage.create(FULL)
    path = tmp_path / PART
    path.write_bytes(b"rows")
    with pytest.raises(CheckpointUnavailable, match=r"s3://nobody-made-this/root: .*bucket"):
        storage.publish(FULL, path, PART)


def test_a_protocol_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    # Another name of the protocol than the other tests use: fsspec remembers what it has found.
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match=r"s3a://bucket needs .*'backstay\[s3\]'"):
        CheckpointStorage("s3a://bucket")


@pytest.mark.parametrize("url", ["", "nope://bucket/x", "file://host/x"])
def test_a_url_that_leads_nowhere_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        CheckpointStorage(url)


def test_a_password_in_a_url_is_never_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        CheckpointStorage("nope://user:hunter2@host/root")
    assert "hunter2" not in str(caught.value)
    assert "nope://host/root" in str(caught.value)
