"""Disks that are full, read-only, slow, failing or gone, and bits that flip on them."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from backstay.checkpoint.storage import CheckpointStorage
from backstay.checkpoint.verification import verify
from backstay.errors import CheckpointDamaged, CheckpointUnavailable
from backstay.pserver.checkpoints.restoring import choose
from backstay.pserver.ctl.cli import main as pserverctl
from backstay.pserver.local_cluster import LocalCluster
from backstay.trainer import Client
from tests.integration.checkpoint_load import (
    KEYS,
    SLOTS,
    Saving,
    ask_cluster,
    check_all,
    counted,
    ended_ids,
    fill,
    loading,
    pushing,
    settings,
    wait_for_file,
)

# Each of them takes seconds: `make test-slow`.
pytestmark = pytest.mark.slow

SCENARIO_LIMIT_S = 120.0
FLIPS = 60


# -- mounts -------------------------------------------------------------------------------------


def namespace() -> list[str]:
    """Return the command that runs another one in a mount namespace."""
    command = ["unshare", "--mount", "--propagation", "private"]
    return [*command, *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--"]


def why_no_mounts(folder: Path) -> str:
    """Return why nothing can be mounted here; empty if it can."""
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        return "unshare or mount is not installed"
    probe = ["mount", "-t", "tmpfs", "-o", "size=64k", "probe", str(folder)]
    done = subprocess.run([*namespace(), *probe], capture_output=True, timeout=30, check=False)
    text = done.stderr.decode(errors="replace").strip()
    return f"no mount namespace, or no tmpfs in it, is permitted: {text}" if done.returncode else ""


@pytest.mark.parametrize("scenario", ["full", "read_only"])
def test_a_disk_that_takes_nothing(tmp_path: Path, scenario: str) -> None:
    if reason := why_no_mounts(tmp_path):
        pytest.skip(reason)
    folder = tmp_path / "disk"
    folder.mkdir()
    program = [sys.executable, "-m", "tests.integration.checkpoint_disks", scenario, str(folder)]
    done = subprocess.run(
        [*namespace(), *program],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        timeout=SCENARIO_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")


@pytest.mark.parametrize("what", ["checkpoint", "root"])
def test_a_folder_that_vanishes_while_it_is_written_to(tmp_path: Path, what: str) -> None:
    root = tmp_path / "root"
    more = settings(root)
    with LocalCluster(2, settings=more) as cluster, Client(cluster.endpoints) as client:
        fill(client)
        asked = cluster.endpoints[0]
        with pushing(cluster.endpoints) as load:
            first = Saving(asked, load).result()
            ctl(asked, "config", "set", "checkpoint_bytes_per_s=30000")
            saving = Saving(asked, load, kind="full")
            writing = wait_for_file(root, "ckpt-000002-*/part-*.tmp")
            (root if what == "root" else writing.parent).rename(tmp_path / "elsewhere")
            failure = saving.failure()
            assert isinstance(failure, CheckpointUnavailable)
            assert str(root) in str(failure)
            assert ended_ids(tmp_path / "root") == ([] if what == "root" else [first.id])
            ctl(asked, "config", "set", "checkpoint_bytes_per_s=0")
            again = Saving(asked, load).result()
            # Where nothing is left there is nothing to add to.
            assert again.kind == ("full" if what == "root" else "incremental")
        assert counted(client) == [load.acknowledged]
    check_all(root)


# -- fsync --------------------------------------------------------------------------------------


@pytest.fixture
def fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let servers that are started from now on have an fsync that does as it is told."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) is installed")
    library, control = tmp_path / "slow_fsync.so", tmp_path / "fsync"
    source = Path(__file__).with_name("slow_fsync.c")
    build = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-o", str(library), str(source), "-ldl"]
    subprocess.run(build, check=True, timeout=60)
    control.write_text("")
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("BACKSTAY_TEST_FSYNC", str(control))

    def tell(text: str) -> None:
        aside = control.with_suffix(".new")
        aside.write_text(text)
        aside.replace(control)

    return tell


@pytest.mark.parametrize(
    "order", ["fail .safetensors.tmp", "fail manifest.json.tmp", "fail ckpt-000002", "manifest"]
)
def test_an_fsync_that_fails(tmp_path: Path, fsync: Callable[[str], None], order: str) -> None:
    root = tmp_path / "root"
    with (
        LocalCluster(2, settings=settings(root)) as cluster,
        Client(cluster.endpoints) as client,
    ):
        fill(client)
        asked = cluster.endpoints[0]
        with pushing(cluster.endpoints) as load:
            first = Saving(asked, load).result()
            fsync(order)
            failure = Saving(asked, load).failure()
            assert isinstance(failure, CheckpointUnavailable)
            assert "Input/output error" in str(failure)
            load.wait_for(3)
            # Who was told that nothing counts as written must not find it.
            assert ended_ids(root) == [first.id]
            fsync("")
            assert Saving(asked, load).result().base == first.id
        assert counted(client) == [load.acknowledged]
    check_all(root)


def test_an_fsync_that_takes_long_holds_up_nobody(
    tmp_path: Path, fsync: Callable[[str], None]
) -> None:
    root = tmp_path / "root"
    with (
        LocalCluster(2, settings=settings(root, lease_ttl_ms=2000)) as cluster,
        Client(cluster.endpoints) as client,
    ):
        fill(client)
        asked = cluster.endpoints[0]
        before = ask_cluster(asked)
        with pushing(cluster.endpoints) as load:
            load.slowest_s = 0.0
            # Longer than a lease, for each of half a dozen calls.
            fsync(f"sleep 2500 {root}")
            saving = Saving(asked, load)
            load.wait_for(50)
            saved = saving.result()
            assert load.slowest_s < 2.0
        after = ask_cluster(asked)
        assert (after.routing_version, after.generation) == (
            before.routing_version,
            before.generation,
        )
        assert counted(client) == [load.acknowledged]
    fsync("")
    check_all(root)
    with loading(root, saved.id) as client:
        counts = counted(client)
        assert saving.floor <= counts[0] <= counts[-1] <= saving.ceiling


# -- flipped bits -------------------------------------------------------------------------------


def ctl(endpoint: str, *arguments: str) -> str:
    done = CliRunner().invoke(pserverctl, ["--endpoint", endpoint, *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def write_chain(endpoint: str, client: Client) -> list[str]:
    """Write a full checkpoint and two with changes; the counts are 1, 2 and 3."""
    made = []
    for _ in range(3):
        client.push("count", KEYS, np.full((len(KEYS), 1), -1.0))
        made.append(Saving(endpoint).result())
    assert [one.kind for one in made] == ["full", "incremental", "incremental"]
    return [one.id for one in made]


def flip(folder: Path, ids: list[str], draw: random.Random) -> tuple[str, str]:
    """Flip one bit of any file of some checkpoints; return the checkpoint's id and the file."""
    path = draw.choice(sorted(path for each in ids for path in (folder / each).iterdir()))
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    return path.parent.name, path.name


def test_a_flipped_bit_is_found_and_named(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with LocalCluster(2, settings=settings(root)) as cluster, Client(cluster.endpoints) as client:
        fill(client)
        ids = write_chain(cluster.endpoints[0], client)
    for seed in range(FLIPS):
        copy = tmp_path / "copy"
        shutil.copytree(root, copy)
        damaged, file = flip(copy, ids, random.Random(seed))
        storage, first_bad = CheckpointStorage(copy), ids.index(damaged)
        for at, each in enumerate(ids):
            found = verify(storage, each)
            assert found.ok == (at < first_bad), (seed, each, found.complaints)
            if not found.ok:
                assert any(f"{damaged}/{file}" in text for text in found.complaints)
        with pytest.raises(CheckpointDamaged, match=f"{damaged}/{file}"):
            choose(storage, "", slot_count=SLOTS, fallback=False)
        if first_bad == 0:
            with pytest.raises(CheckpointDamaged, match="no checkpoint is sound"):
                choose(storage, "", slot_count=SLOTS, fallback=True)
        else:
            chosen = choose(storage, "", slot_count=SLOTS, fallback=True)
            assert chosen.manifest.id == ids[first_bad - 1]
            assert len(chosen.passed_over) == len(ids) - first_bad
        shutil.rmtree(copy)


@pytest.mark.parametrize("at", [1, 2])
def test_a_cluster_falls_back_behind_a_flipped_bit(tmp_path: Path, at: int) -> None:
    more = settings(tmp_path)
    with LocalCluster(2, settings=more) as cluster, Client(cluster.endpoints) as client:
        fill(client)
        endpoint = cluster.endpoints[0]
        ids = write_chain(endpoint, client)
        damaged, file = flip(tmp_path, [ids[at]], random.Random(at))
        command = ["--endpoint", endpoint, "checkpoint", "restore", "--yes", "--json"]
        said = CliRunner().invoke(pserverctl, command)
        assert said.exit_code == 3
        assert f"{damaged}/{file}" in said.output
        assert counted(client) == [3]
        done = json.loads(ctl(endpoint, *command[2:], "--fallback"))
        assert (done["id"], done["state"]) == (ids[at - 1], "done")
        # What is damaged does not keep what is new from being kept, nor old ones from going.
        with Client(cluster.endpoints) as fresh:
            assert counted(fresh) == [at]
        ctl(endpoint, "config", "set", "checkpoint_keep_last=1", "checkpoint_full_every=1")
        last = Saving(endpoint).result().id
        left = set(CheckpointStorage(tmp_path).ids())
        # What the cluster was restored from stays, with what it builds on.
        restored = ids[:at]
        assert left <= {last, damaged, *restored}
        if damaged in left:
            ctl(endpoint, "checkpoint", "delete", damaged)
        assert ended_ids(tmp_path) == [*restored, last]
