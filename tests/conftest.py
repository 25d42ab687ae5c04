"""Options of every test run: a share of the tests by a seed, workers, Hypothesis' examples."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator

import pytest
from hypothesis import settings

from backstay.pserver.local_cluster import LocalCluster
from tests.examples import examples
from tests.frameworks import Kit, kit_of

# PyTorch's threads wait for each other by turning round: where tests run side by side, for long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# An example may wait for a core that another test has.
settings.register_profile("backstay", max_examples=examples(100), deadline=None)
settings.load_profile("backstay")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("backstay")
    group.addoption(
        "--share",
        type=float,
        default=1.0,
        help="run this share of the tests that are asked for: 0.25 runs every fourth",
    )
    group.addoption("--share-seed", default="", help="which tests --share chooses: any text")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the share, in the order of the files."""
    share = config.getoption("share")
    if share >= 1.0 or not items:
        return
    count = max(1, round(len(items) * share))
    draw = random.Random(config.getoption("share_seed"))
    kept = set(draw.sample(range(len(items)), count))
    left_out = [item for number, item in enumerate(items) if number not in kept]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for number, item in enumerate(items) if number in kept]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Start two workers for each core where `-n auto` is given: most tests wait."""
    return 2 * (os.cpu_count() or 1)


# One for each file: a server that nobody uses still takes a fiftieth of a core.
@pytest.fixture(scope="module")
def one_server() -> Iterator[LocalCluster]:
    """A cluster of one server, for tests that differ by their tables: see ``own_name``."""
    with LocalCluster(1, settings={"slot_count": 64}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def three_servers() -> Iterator[LocalCluster]:
    """A cluster of three servers with two copies, as ``one_server``."""
    with LocalCluster(3) as cluster:
        yield cluster


@pytest.fixture
def own_name(request: pytest.FixtureRequest) -> str:
    """A name for a job or a table of this test alone."""
    return re.sub(r"[^A-Za-z0-9_.]", ".", f"{request.module.__name__}.{request.node.name}")


@pytest.fixture
def kit(request: pytest.FixtureRequest) -> Kit:
    """The framework that a test of every adapter runs with: see ``tests.frameworks``."""
    return kit_of(request.param)
