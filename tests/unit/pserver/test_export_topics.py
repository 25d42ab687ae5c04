"""Topics of running exports without a broker: what comes next, the messages, keys that go."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from backstay.checkpoint.chain import Followed
from backstay.checkpoint.manifest import Manifest
from backstay.consensus.records.exports import ExportRecord
from backstay.errors import CheckpointDamaged, ConfigError, ExportRefused, InvalidRequest
from backstay.job_spec import ExportsSpec, ExportTopicSpec
from backstay.pserver.ctl.cli import main as pserverctl
from backstay.pserver.exports.topic import key_ledger
from backstay.pserver.exports.topic.key_ledger import KeyLedger
from backstay.pserver.exports.topic.link import ensure_topic
from backstay.pserver.exports.topic.messages import (
    TopicProgress,
    partitions_of,
    row_key_of,
    row_messages,
)
from backstay.pserver.exports.topic.steps import TopicStep, check_run, followed, next_step
from backstay.pserver.metrics.export_figures import ExportsFigures
from tests.unit.serving.elements import base, increment

RUN = base().run
DAMAGED = "damaged"

Read = Callable[[str], Manifest | None]


def folder(*elements: Manifest, **instead: str) -> tuple[list[str], Read]:
    """Return names and reader of a folder; ``instead`` are elements that are damaged."""
    there: Mapping[str, Manifest] = {one.id: one for one in elements}

    def read(name: str) -> Manifest | None:
        if name.replace("-", "_") in instead:
            raise CheckpointDamaged(f"{name} is damaged")
        return there.get(name)

    return sorted(there, key=lambda one: (int(one.split("-")[1]), one)), read


def progress(element: Manifest, **more: object) -> TopicProgress:
    chosen: dict[str, object] = {"run": RUN, "started": "2026-11-26T10:00:00.000+00:00", **more}
    return TopicProgress(
        format=1,
        element=element.id,
        begun=element.begun,
        chain=element.chain,
        reason="",
        generation=element.generation,
        export="serve",
        cluster="c",
        cluster_uid="ab",
        published=element.begun + 1,
        partitions=1,
        **chosen,  # type: ignore[arg-type]
    )


def at(element: Manifest) -> Followed:
    """Return the state of a topic that has an element."""
    _, read = folder(element)
    state = followed(progress(element), RUN, read)
    assert state is not None
    return state


def step_of(found: TopicStep | None) -> TopicStep:
    assert found is not None
    return found


def test_a_topic_begins_with_the_newest_base_and_goes_on_with_increments() -> None:
    first, second = base(), increment(8, [3, 5])
    names, read = folder(first, second)
    step = step_of(next_step(names, read, None, RUN))
    assert step.element is first
    assert step.replaced.tolist() == [0, 1]
    step = step_of(next_step(names, read, step.state, RUN))
    assert step.element is second
    assert (step.slots.tolist(), step.replaced.tolist()) == ([1], [])
    assert next_step(names, read, step.state, RUN) is None
    # A base beside the increments is nothing new.
    beside = base(9, [3, 5], chain=first.chain)
    assert next_step(*folder(first, second, beside), step.state, RUN) is None


def test_a_slot_that_is_whole_in_an_increment_is_replaced() -> None:
    increments = increment(8, [4, 5], since=[3, 0], whole=[0, 1])
    step = step_of(next_step(*folder(base(), increments), at(base()), RUN))
    assert (step.slots.tolist(), step.replaced.tolist()) == ([0, 1], [1])


def test_increments_that_are_gone_are_made_up_for_by_the_newest_base() -> None:
    old, newer = base(20, [9, 9], chain=base().chain), base(30, [11, 9], chain=base().chain)
    there = (old, newer, increment(31, [12, 9], since=[11, 9]))
    state = at(increment(8, [3, 9]))
    step = step_of(next_step(*folder(*there), state, RUN))
    assert step.element is newer
    # Of a slot that did not change there is nothing to do.
    assert step.slots.tolist() == [0]
    assert step_of(next_step(*folder(*there), step.state, RUN)).element is there[2]
    with pytest.raises(CheckpointDamaged, match="missing between them"):
        next_step(*folder(increment(31, [12, 9], since=[11, 9])), state, RUN)


def test_a_damaged_increment_is_named_and_a_newer_base_takes_its_place() -> None:
    bad, after = increment(8, [3, 5]), increment(9, [3, 6], since=[3, 5])
    with pytest.raises(CheckpointDamaged, match="inc-000008-3fa9c1 is damaged"):
        next_step(*folder(base(), bad, after, inc_000008_3fa9c1=DAMAGED), at(base()), RUN)
    beside = base(10, [3, 7], chain=base().chain)
    there = folder(base(), bad, after, beside, inc_000008_3fa9c1=DAMAGED)
    assert step_of(next_step(*there, at(base()), RUN)).element is beside
    # Of bases one that is not damaged.
    there = folder(base(), beside, base_000010_3fa9c1=DAMAGED)
    assert step_of(next_step(*there, None, RUN)).element.number == 7


def test_a_new_chain_is_taken_whole_but_none_of_a_controller_that_was_replaced() -> None:
    anew = base(20, [1, 1], generation=1)
    step = step_of(next_step(*folder(base(), anew), at(base()), RUN))
    assert step.element is anew
    assert step.replaced.tolist() == [0, 1]
    late = base(21, [9, 9], generation=0)
    assert next_step(*folder(anew, late), step.state, RUN) is None


def test_a_topic_whose_element_is_gone_takes_a_base_that_is_surely_newer() -> None:
    known = progress(increment(8, [3, 5], begun=200.0))
    _, read = folder(base())
    assert followed(known, RUN, read) is None
    assert followed(known, "another run", read) is None
    with pytest.raises(CheckpointDamaged, match="may be older"):
        next_step(*folder(base()), None, RUN, not_before=known.begun)
    newer = base(20, chain=base().chain, begun=300.0)
    found = next_step(*folder(base(), newer), None, RUN, not_before=known.begun)
    assert step_of(found).element is newer


def test_elements_of_another_run_are_left_alone() -> None:
    assert next_step(*folder(base()), None, "another run") is None


def test_of_two_exports_the_one_that_was_started_later_has_the_topic() -> None:
    known = progress(base(), run="1", started="2026-11-26T10:00:00.000+00:00")
    check_run(None, "2", "2026")
    check_run(known, "1", "2026-11-26T10:00:00.000+00:00")
    check_run(known, "2", "2026-11-26T10:00:00.001+00:00")
    with pytest.raises(ExportRefused, match="export serve of the cluster c"):
        check_run(known, "2", "2026-11-26T09:59:59.999+00:00")


@given(
    st.lists(st.integers(0, 2**64 - 1), max_size=20, unique=True),
    st.integers(1, 5),
    st.text(min_size=1, max_size=5),
)
def test_messages_of_rows_have_key_table_and_floats(
    keys: list[int], partitions: int, table: str
) -> None:
    array = np.array(keys, np.uint64)
    values = np.arange(2 * len(keys), dtype=np.float32).reshape(-1, 2)
    found = list(row_messages(table.encode(), array, values, partitions))
    assert [row_key_of(one.key) for one in found] == [(key, table.encode()) for key in keys]
    assert [struct.unpack("<2f", one.value or b"") for one in found] == [
        tuple(row) for row in values.tolist()
    ]
    gone = list(row_messages(table.encode(), array, None, partitions))
    # Otherwise the order of a key's messages is lost.
    assert [(one.key, one.partition) for one in gone] == [(one.key, one.partition) for one in found]
    assert all(one.value is None for one in gone)
    assert (partitions_of(array, partitions) < partitions).all()


def test_a_row_of_a_message_that_is_none_is_none() -> None:
    assert row_key_of(b"progress") is None
    assert row_key_of(b"") is None


@pytest.mark.parametrize("kept", [1, 3, 100])
def test_the_last_word_of_each_key_counts(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_ledger, "KEPT", kept)
    keys = np.arange(10, dtype=np.uint64)
    with KeyLedger() as ledger:
        # In the topic: all of them, then 0 without a row. Then rows that stay, of one table.
        ledger.note(0, keys, stays=False)
        ledger.note(1, keys, stays=False)
        ledger.note(0, keys[:1], stays=np.array([True]))
        ledger.note(0, keys[5:], stays=True)
        gone = [(table, key) for table, some in ledger.gone() for key in some.tolist()]
    assert sorted(gone) == [(0, key) for key in range(1, 5)] + [(1, key) for key in range(10)]


def test_a_record_with_a_topic_and_one_from_before_there_were_topics() -> None:
    topic = ExportTopicSpec(
        name="clicks",
        brokers=("a:1", "b:2"),
        settings={"linger.ms": "5"},
        settings_file="/etc/kafka.properties",
    )
    spec = ExportsSpec(url="/x", tables=("*",), topic=topic)
    record = ExportRecord(name="n", run="1", spec=spec, started="2026")
    assert ExportRecord.from_json(record.to_json()) == record
    old = record.to_json().partition(',"topic"')[0] + "}"
    assert ExportRecord.from_json(old).spec.topic is None
    # As it was kept before it went by pushes.
    before = (
        '{"name":"n","run":"1","url":"/x","every_s":1.0,"tables":["*"],"statistics":false,'
        '"score_at_least":null,"started":"2026","stopping":false,"trouble":""}'
    )
    assert ExportRecord.from_json(before) == replace(record, spec=replace(spec, topic=None))
    for wrong in ("[]", "{", before.replace('"run":"1",', ""), before.replace("1.0", "0.0")):
        with pytest.raises(InvalidRequest):
            ExportRecord.from_json(wrong)
    assert topic.is_same(ExportTopicSpec(name="clicks", brokers=("b:2",)))
    assert not topic.is_same(ExportTopicSpec(name="clicks", brokers=("c:3",)))
    for name in ("sasl.password", "sasl.oauthbearer.client.secret", "acks"):
        with pytest.raises(ConfigError, match=name):
            replace(topic, settings={name: "1"})
    with pytest.raises(ConfigError, match="no brokers"):
        replace(topic, brokers=())
    with pytest.raises(ConfigError, match="as Kafka's are"):
        replace(topic, name="two words")


def test_a_node_without_the_client_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(ConfigError, match=r"clicks on this node.*pip install 'backstay\[kafka\]'"):
        ensure_topic(ExportTopicSpec(name="clicks", brokers=("a:1",)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--topic", "t"], "--topic needs --brokers"),
        (["--brokers", "a:1"], "are for --topic NAME"),
        (["--topic", "t", "--brokers", "a:1", "--kafka-setting", "x"], "expected NAME=VALUE"),
    ],
)
def test_options_of_topics_that_do_not_go_together_are_refused(
    options: list[str], said: str
) -> None:
    words = ["export", "start", "n", "/x", "--endpoint", "127.0.0.1:1", *options]
    done = CliRunner().invoke(pserverctl, words)
    assert done.exit_code == 2
    assert said in done.output


def test_what_is_told_of_a_topic_ends_with_its_export() -> None:
    figures = ExportsFigures()
    counter = figures.begin("serve")
    counter.written("base", 1, 100.0, rows=5, size_bytes=50)
    counter.topic(lambda one: one)
    assert figures.to_object() == {
        "serve": {"element": "", "begun": 0.0, "behind_s": 0.0, "trouble": ""}
    }
    figures.end("serve")
    counter.written("increment", 2, 101.0, rows=5, size_bytes=50)
    assert figures.to_object() == {}
