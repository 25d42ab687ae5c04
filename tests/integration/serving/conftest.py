"""A broker of Kafka for the tests of one file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.kafka.broker import KafkaBroker


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    # The client is an extra; the other tests of this folder do without.
    from tests.kafka.broker import KafkaBroker

    with KafkaBroker(tmp_path_factory.mktemp("kafka")) as started:
        yield started
