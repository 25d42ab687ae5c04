"""Where a trainer finds its place in the job, and who opens a session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from backstay.errors import ConfigError
from backstay.trainer.adapter.session import (
    Session,
    TrainerEnvironment,
    connection,
    current_session,
    numbered,
    set_session_factory,
)

SERVERS = {"PADDLE_PSERVERS_IP_PORT_LIST": "a:1,b:2"}
TWO_SERVERS = {"PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.1:7000, 10.0.0.2:7000"}


class Connected:
    """Stands for a client: these tests look at names and at who is asked, never at servers."""

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def no_factory() -> Iterator[None]:
    before = set_session_factory(None)
    yield
    set_session_factory(before)


@pytest.mark.parametrize(
    ("names", "place"),
    [
        ({"RANK": "1", "WORLD_SIZE": "4"}, (1, 4)),
        ({"RANK": "0"}, (0, 1)),
        # Paddle's names win, as a pair: a rank of other processes is not mixed in.
        ({"PADDLE_TRAINER_ID": "2", "PADDLE_TRAINERS_NUM": "3", "RANK": "7"}, (2, 3)),
        ({"PADDLE_TRAINER_ID": "0", "RANK": "7", "WORLD_SIZE": "8"}, (0, 1)),
        ({"PADDLE_TRAINER_ID": " ", "RANK": "1", "WORLD_SIZE": "2"}, (1, 2)),
    ],
)
def test_a_trainers_number_by_either_framework(
    names: dict[str, str], place: tuple[int, int]
) -> None:
    read = TrainerEnvironment.read({**SERVERS, **names})
    assert (read.trainer_id, read.trainers_num) == place


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"PADDLE_TRAINERS_NUM": "2", "RANK": "1"}, "PADDLE_TRAINER_ID is not set"),
        ({"RANK": "first"}, "RANK is 'first'.*an integer"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK.* is 2.*0 to 1"),
    ],
)
def test_a_wrong_number_is_named(names: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainerEnvironment.read({**SERVERS, **names})


def test_servers_by_either_name() -> None:
    assert TrainerEnvironment.read({"BACKSTAY_ENDPOINT": "c:3, d:4"}).endpoints == ("c:3", "d:4")
    both = {**SERVERS, "BACKSTAY_ENDPOINT": "c:3"}
    assert TrainerEnvironment.read(both).endpoints == ("a:1", "b:2")


@pytest.mark.usefixtures("no_factory")
def test_a_factory_opens_the_session_that_is_missing() -> None:
    opened: list[Session] = []

    def factory() -> Session:
        opened.append(Session(cast(Any, Connected()), TrainerEnvironment(("a:1",)), "job"))
        return opened[-1]

    assert current_session() is None
    assert set_session_factory(factory) is None
    # A caller with a client needs no session, and opens none.
    other = cast(Any, Connected())
    assert connection(other) == (other, None)
    assert not opened
    client, session = connection(None)
    assert session is opened[0]
    assert client is session.client
    assert current_session() is session
    session.close()
    assert current_session() is not session  # asked again
    assert len(opened) == 2
    opened[1].close()
    assert set_session_factory(None) is factory
    with pytest.raises(ConfigError, match=r"init\(\)"):
        connection(None)


def test_names_are_numbered_by_client_and_kind() -> None:
    first, second = cast(Any, Connected()), cast(Any, Connected())
    names = [
        numbered(first, "embedding"),
        numbered(first, "optimizer"),
        numbered(second, "embedding"),
    ]
    assert names == ["embedding_0", "optimizer_0", "embedding_0"]
    assert numbered(first, "embedding") == "embedding_1"


def test_an_environment_of_paddle() -> None:
    assert TrainerEnvironment.read(TWO_SERVERS) == TrainerEnvironment(
        ("10.0.0.1:7000", "10.0.0.2:7000"), 0, 1
    )
    names = {**TWO_SERVERS, "PADDLE_TRAINER_ID": "1", "PADDLE_TRAINERS_NUM": "4"}
    assert TrainerEnvironment.read(names).trainer_id == 1
    explicit = TrainerEnvironment.read(names, endpoints="a:1", trainer_id=3)
    assert explicit == TrainerEnvironment(("a:1",), 3, 4)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({}, "set PADDLE_PSERVERS_IP_PORT_LIST"),
        ({"PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.1"}, "host:port"),
        (
            {"PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.1:99999"},
            "PADDLE_PSERVERS_IP_PORT_LIST.*99999",
        ),
        ({**TWO_SERVERS, "TRAINING_ROLE": "PSERVER"}, "pserver serve"),
        ({**TWO_SERVERS, "TRAINING_ROLE": "HETER"}, "TRAINER or PSERVER"),
        ({**TWO_SERVERS, "PADDLE_TRAINER_ID": "x"}, "PADDLE_TRAINER_ID is 'x'.*an integer"),
        ({**TWO_SERVERS, "PADDLE_TRAINERS_NUM": "2"}, "PADDLE_TRAINER_ID is not set"),
        ({**TWO_SERVERS, "PADDLE_TRAINER_ID": "2", "PADDLE_TRAINERS_NUM": "2"}, "0 to 1"),
        ({**TWO_SERVERS, "PADDLE_TRAINERS_NUM": "0"}, "1 or more"),
    ],
)
def test_a_wrong_environment_is_told(names: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainerEnvironment.read(names)
