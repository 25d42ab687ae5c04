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
