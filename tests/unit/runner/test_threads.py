"""How many threads the processes of a job compute with; the user's own word wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from backstay.job_spec import JobSpec
from backstay.runner.threads import chosen_threads, usable_cores


def spec_of(folder: Path, model: str = "import torch\n", **fields: object) -> JobSpec:
    (folder / "model.py").write_text(model)
    document = {"name": "c", "model": str(folder / "model.py"), "training": "d.csv", **fields}
    return JobSpec.from_mapping(document)


@pytest.mark.parametrize(
    ("cores", "processes", "count"), [(1, 1, 1), (2, 1, 1), (2, 4, 1), (16, 1, 8), (16, 3, 4)]
)
def test_the_cores_are_shared(tmp_path: Path, cores: int, processes: int, count: int) -> None:
    chosen = chosen_threads(spec_of(tmp_path), {}, processes=processes, cores=cores)
    assert chosen.environment == {"OMP_NUM_THREADS": str(count)}
    assert chosen.text.startswith(f"{count} thread")
    assert f"{cores} cores" in chosen.text


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_what_the_user_has_set_stays(tmp_path: Path, name: str) -> None:
    workers = {"initial": 2, "env": {name: "3"}}
    for spec, environment in (
        (spec_of(tmp_path), {name: "3"}),
        (spec_of(tmp_path, workers=workers), {}),
    ):
        chosen = chosen_threads(spec, environment, processes=2, cores=16)
        assert chosen.environment == {}
        assert chosen.text == f"3 threads a process ({name})"


@pytest.mark.parametrize(
    ("model", "framework"),
    [("import numpy\nimport paddle\n", "auto"), ("from net import Net\n", "paddle")],
)
def test_paddle_chooses_for_itself(tmp_path: Path, model: str, framework: str) -> None:
    spec = spec_of(tmp_path, model, framework=framework)
    assert chosen_threads(spec, {}, processes=1, cores=16).environment == {}


def test_there_is_a_core_to_use() -> None:
    assert usable_cores() >= 1
