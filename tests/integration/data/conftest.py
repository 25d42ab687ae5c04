"""A broker of Kafka for the tests of one file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kafka.broker import KafkaBroker


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    with KafkaBroker(tmp_path_factory.mktemp("kafka")) as started:
        yield started
