"""Brokers of Kafka for tests: what their programs are called with."""

from __future__ import annotations

from uuid import UUID

import pytest

pytest.importorskip("confluent_kafka")

from tests.kafka.broker import format_words


def test_a_cluster_id_that_begins_with_a_hyphen_is_no_option() -> None:
    assert format_words(UUID(int=0xF8 << 120))[-1] == "--cluster-id=-AAAAAAAAAAAAAAAAAAAAA"
