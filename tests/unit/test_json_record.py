"""The JSON form of records: what is refused, and how the error says where it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest

from backstay.errors import InvalidRequest
from backstay.json_record import Count, JsonRecord


@dataclass(frozen=True)
class Part(JsonRecord, what="part"):
    name: str
    sizes: tuple[Count, ...] = ()

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidRequest("part: name is empty")


@dataclass(frozen=True)
class Whole(JsonRecord, what="whole", names={"number": "id"}, added=("note",)):
    format: Literal[1] = field(default=1, kw_only=True)
    number: int
    parts: tuple[Part, ...] = ()
    note: str = ""


WHOLE = Whole(7, (Part("a", (1, 2)), Part("b")), "new")
TEXT = (
    '{"format":1,"id":7,"parts":[{"name":"a","sizes":[1,2]},{"name":"b","sizes":[]}],"note":"new"}'
)


def test_json_leads_back() -> None:
    assert WHOLE.to_json() == TEXT
    assert Whole.from_json(TEXT) == WHOLE


def test_a_text_may_lack_only_the_fields_that_were_added_later() -> None:
    assert Whole.from_json('{"format":1,"id":7,"parts":[]}') == Whole(7)
    with pytest.raises(InvalidRequest, match="whole: parts: Field required"):
        Whole.from_json('{"format":1,"id":7}')


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"sizes":[1,2]', '"sizes":[1,"x"]', "whole: parts[0].sizes[1]: Input should be a valid"),
        ('"sizes":[1,2]', '"sizes":[1,true]', "whole: parts[0].sizes[1]: Input should be a valid"),
        ('"sizes":[1,2]', '"sizes":[-1]', "whole: parts[0].sizes[0]: Input should be greater"),
        ('"name":"b"', '"name":""', "whole: parts[1]: part: name is empty"),
        ('"name":"b"', '"name":"b","more":1', "whole: parts[1].more: Unexpected keyword argument"),
        ('"id":7', '"id":7.0', "whole: id: Input should be a valid integer"),
        ('"id":7', '"number":7', "whole: id: Field required (and 1 more)"),
        ('"format":1', '"format":2', "whole: format: 2; this version reads format 1 only"),
        (TEXT, "[]", "whole: Input should be an object"),
        (TEXT, "{", "whole: Invalid JSON"),
    ],
)
def test_an_error_names_what_is_wrong_and_where(old: str, new: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Whole.from_json(TEXT.replace(old, new))
    assert str(refused.value).startswith(says)


def test_a_record_that_checks_itself_is_named_once() -> None:
    with pytest.raises(InvalidRequest) as refused:
        Part.from_json('{"name":"","sizes":[]}')
    assert str(refused.value) == "part: name is empty"


def test_half_a_character_does_not_make_a_record_unreadable() -> None:
    # As os.fsdecode gives the name of a file that is not UTF-8.
    record = Whole(7, note="no such file: caf\udce9 \N{GRINNING FACE}")
    assert Whole.from_json(record.to_json()).note == "no such file: caf? \N{GRINNING FACE}"
