"""The map of the slots: what a cell says, how it fits a line, and its text."""

from __future__ import annotations

import io
import json
import re

import numpy as np
import pytest
from rich.console import Console

from backstay.consensus.records import NO_MASTER, NodeRecord, RoutingTable, SlotReplicas
from backstay.pserver.ctl.slot_map import labels, slot_map
from backstay.pserver.ctl.slots import _show, slots_report

WHOLE = SlotReplicas(0, (1,))
OTHER = SlotReplicas(1, (0,))
MENDED = SlotReplicas(1, (), (0,))
MOVED = SlotReplicas(0, (1,), (2,))
SHORT = SlotReplicas(2)
LOST = SlotReplicas(NO_MASTER, (2,))


def routing(*held: SlotReplicas, nodes: int = 3, replicas: int = 2) -> RoutingTable:
    return RoutingTable(
        version=9,
        nodes=tuple(
            NodeRecord(f"ps-{index}", f"h:{7000 + index}", f"h:{7100 + index}", 1 + index)
            for index in range(nodes)
        ),
        replicas=replicas,
        replicas_of_slot=held,
        term_of_slot=np.arange(1, len(held) + 1, dtype=np.uint64),
        epoch_of_slot=np.ones(len(held), dtype=np.uint64),
    )


EACH_KIND = (WHOLE, OTHER, MENDED, MOVED, SHORT, LOST, WHOLE, WHOLE)


def test_a_cell_tells_the_master_and_the_worst() -> None:
    drawn = slot_map(routing(*EACH_KIND), 80)
    assert drawn.slots_per_cell == 1
    (line,) = drawn.lines
    names = labels(3)
    assert [cell.text(names) for cell in line] == ["A ", "B ", "B+", "A+", "C-", ".!", "A ", "A "]


def test_a_cell_of_several_slots_tells_most_of_them_and_the_worst_of_any() -> None:
    held = (WHOLE, WHOLE, OTHER, MENDED, LOST, LOST, WHOLE, SHORT) * 32
    drawn = slot_map(routing(*held), 8)
    # 32 lines of 4 cells of 2 characters are what there is.
    assert (drawn.slots_per_cell, len(drawn.lines), len(drawn.lines[0])) == (2, 32, 4)
    assert [cell.text(labels(3)) for cell in drawn.lines[0]] == ["A ", "B+", ".!", "A-"]
    assert [line[0].first_slot for line in drawn.lines[:3]] == [0, 8, 16]


@pytest.mark.parametrize(("width", "per_line"), [(1, 1), (16, 8), (31, 8), (200, 8)])
def test_lines_fit_the_width_and_are_no_longer_than_there_are_slots(
    width: int, per_line: int
) -> None:
    drawn = slot_map(routing(*EACH_KIND), width)
    assert {len(line) for line in drawn.lines} == {per_line}
    assert sum(map(len, drawn.lines)) == 8


def test_every_slot_of_the_largest_cluster_is_in_a_cell() -> None:
    drawn = slot_map(routing(*(WHOLE, OTHER) * 32_768), 140)
    assert drawn.slots_per_cell * sum(map(len, drawn.lines)) == 65_536
    assert (len(drawn.lines), len(drawn.lines[0])) == (32, 64)


def test_letters_are_of_one_length_and_distinct() -> None:
    assert labels(3) == ["A", "B", "C"]
    assert labels(26)[-1] == "Z"
    assert labels(27)[0] == "AA"
    many = labels(1000)
    assert len(set(many)) == 1000
    assert {len(name) for name in many} == {3}


def test_the_report_names_the_nodes_of_each_slot() -> None:
    report = slots_report(routing(*EACH_KIND))
    assert json.loads(json.dumps(report)) == report
    assert (report["slots_without_master"], report["slots_short_of_copies"]) == (1, 3)
    assert report["slots_catching_up"] == 2
    assert report["nodes"][0] == {
        "node_id": "ps-0", "status": "unknown",
        "master_slots": 4, "in_sync_slots": 1, "catching_up_slots": 1,
    }  # fmt: skip
    assert report["slots"][3] == {
        "slot": 3, "term": 4, "master": "ps-0", "in_sync": ["ps-1"], "catching_up": ["ps-2"],
    }  # fmt: skip
    assert report["slots"][5]["master"] is None


def shown(*, colours: bool) -> str:
    table = routing(*EACH_KIND)
    file = io.StringIO()
    console = Console(
        file=file,
        width=80,
        force_terminal=colours,
        color_system="standard" if colours else None,
        legacy_windows=False,
    )
    _show(console, table, slots_report(table))
    return file.getvalue()


def test_without_colours_the_letters_say_it_all(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(colours=False)
    assert "\x1b" not in text
    assert "0  A B B+A+C-.!A A \n" in text
    assert [line.split() for line in text.splitlines() if " ps-2 " in line] == [
        ["C", "ps-2", "unknown", "1", "1", "1"]
    ]
    said = capsys.readouterr().out
    assert "8 slots, 2 copies, routing version 9: 3 have too few copies" in said
    assert "+ a copy is catching up, - copies are missing, ! no master" in said


def test_with_colours_the_text_is_the_same_and_nodes_differ() -> None:
    text = shown(colours=True)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "0  A B B+A+C-.!A A \n" in plain
    background = dict(re.findall(r"\x1b\[30;(\d+)m([ABC]) \x1b", text))
    assert sorted(background.values()) == ["A", "B"]
    assert re.search(r"41m\.!", text), "no master is red"
