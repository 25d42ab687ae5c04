"""Who this process is and where its servers are, from the names that users know.

May import the client, addresses and configuration; no framework. Never starts a process; reads the
environment only when ``init`` or ``TrainerEnvironment.read`` is called, and an explicit argument
wins over it.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from weakref import WeakKeyDictionary

from backstay.addresses import parse_endpoints
from backstay.config import (
    ENDPOINT_VARIABLE,
    PADDLE_ENDPOINT_VARIABLE,
    ClientConfig,
    find_endpoints,
)
from backstay.errors import ConfigError
from backstay.trainer.client import Client
from backstay.trainer.registration import TrainerName

__all__ = [
    "Session",
    "SessionFactory",
    "TrainerEnvironment",
    "connection",
    "current_session",
    "dense_prefix",
    "init",
    "numbered",
    "open_session",
    "opened_client",
    "opened_session",
    "set_session_factory",
]

# Paddle's names, then torchrun's.
ENDPOINTS = PADDLE_ENDPOINT_VARIABLE
TRAINER_ID = "PADDLE_TRAINER_ID"
TRAINERS_NUM = "PADDLE_TRAINERS_NUM"
RANK = "RANK"
WORLD_SIZE = "WORLD_SIZE"
ROLE = "TRAINING_ROLE"


@dataclass(frozen=True)
class TrainerEnvironment:
    """One trainer's place in the job.

    Attributes:
        endpoints: Control addresses of the pservers, "host:port"; any of them may be asked first.
        trainer_id: This trainer, from 0.
        trainers_num: How many trainers share the job.
    """

    endpoints: tuple[str, ...]
    trainer_id: int = 0
    trainers_num: int = 1

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ConfigError(
                f"no pserver address: set {ENDPOINTS} to 'host:port,host:port' or pass endpoints="
            )
        try:
            parse_endpoints(",".join(self.endpoints))
        except ConfigError as error:
            named = f"{ENDPOINTS}, {ENDPOINT_VARIABLE} or endpoints="
            raise ConfigError(f"{named}: {error}") from None
        if self.trainers_num < 1:
            raise ConfigError(
                f"{TRAINERS_NUM} (or {WORLD_SIZE}) is {self.trainers_num}; it must be 1 or more"
            )
        if not 0 <= self.trainer_id < self.trainers_num:
            raise ConfigError(
                f"{TRAINER_ID} (or {RANK}) is {self.trainer_id}; with {self.trainers_num} trainers "
                f"it must be 0 to {self.trainers_num - 1}"
            )

    @classmethod
    def read(
        cls,
        environ: Mapping[str, str],
        *,
        endpoints: str | Sequence[str] | None = None,
        trainer_id: int | None = None,
        trainers_num: int | None = None,
    ) -> TrainerEnvironment:
        """Return what the arguments say and, where they are None, what ``environ`` says.

        Number and count come from Paddle's names if one of these is set, else from the variables
        that ``torchrun`` sets: never one from here and one from there.

        Raises:
            ConfigError: A value is missing or wrong, or the role is that of a server.
        """
        _refuse_server(environ)
        # A trainer reads Paddle's own variable first, as it does with all of Paddle's.
        found = find_endpoints(environ, endpoints, variables=(ENDPOINTS, ENDPOINT_VARIABLE))
        id_name, num_name = TRAINER_ID, TRAINERS_NUM
        if not environ.get(TRAINER_ID, "").strip() and not environ.get(TRAINERS_NUM, "").strip():
            id_name, num_name = RANK, WORLD_SIZE
        if trainer_id is None:
            trainer_id = _integer(environ, id_name)
        if trainers_num is None:
            trainers_num = _integer(environ, num_name)
        trainers_num = 1 if trainers_num is None else trainers_num
        if trainer_id is None:
            if trainers_num > 1:
                # Two trainers that both take themselves for number 0 would train on the same
                # examples, unnoticed.
                raise ConfigError(
                    f"{id_name} is not set, with {trainers_num} trainers: set it to this "
                    f"trainer's number, 0 to {trainers_num - 1}"
                )
            trainer_id = 0
        return cls(() if found is None else found.endpoints, trainer_id, trainers_num)


class Session:
    """A connected trainer: its client and its place among the trainers. A context manager.

    Attributes:
        client: Connected to the whole cluster.
        trainer_id: This trainer, from 0.
        trainers_num: How many trainers share the job.
        job: Comes before the name of every table made through this session, so that two jobs
            can share a cluster.
    """

    def __init__(self, client: Client, environment: TrainerEnvironment, job: str = "") -> None:
        self.client = client
        self.trainer_id = environment.trainer_id
        self.trainers_num = environment.trainers_num
        self.job = job

    def table_name(self, name: str) -> str:
        """Return ``name`` with the job before it."""
        return f"{self.job}/{name}" if self.job else name

    def close(self) -> None:
        """Wait for pushes in flight and disconnect. Harmless when called again."""
        global _current
        if _current is self:
            _current = None
        self.client.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


SessionFactory = Callable[[], Session]

_current: Session | None = None
_factory: SessionFactory | None = None
# How many things of each kind a client's tables were named for, so far.
_numbers: WeakKeyDictionary[Client, Counter[str]] = WeakKeyDictionary()
_numbers_lock = threading.Lock()


def init(
    endpoints: str | Sequence[str] | None = None,
    *,
    trainer_id: int | None = None,
    trainers_num: int | None = None,
    job: str = "",
    update_settings: bool | None = None,
    config: ClientConfig | None = None,
    trainer: TrainerName | None = None,
) -> Session:
    """Connect this trainer; layers and optimizers made afterwards use the session by themselves.

    Args:
        endpoints: Pserver addresses, "host:port", one or several, or several in one string with
            commas. Default: ``PADDLE_PSERVERS_IP_PORT_LIST``, else ``BACKSTAY_ENDPOINT``.
        trainer_id: Default: ``PADDLE_TRAINER_ID``, else ``RANK``; 0 if there is one trainer only.
        trainers_num: Default: ``PADDLE_TRAINERS_NUM``, else ``WORLD_SIZE``, else 1.
        job: Comes before the names of all tables, as "job/name".
        update_settings: Give tables that are there the settings of this program, such as another
            learning rate. False: refuse that. Default: ``BACKSTAY_UPDATE_SETTINGS``, else False.
        config: Timeouts, token and TLS. Default: from the ``BACKSTAY_*`` names.
        trainer: What ``pserverctl trainers`` shows it to work for. Default: ``job``.

    Raises:
        ConfigError: A value is missing or wrong, ``TRAINING_ROLE`` is ``PSERVER``, or a session
            is open already.
        ServerUnavailable: No server answers.
    """
    _refuse_second()
    environment = TrainerEnvironment.read(
        os.environ, endpoints=endpoints, trainer_id=trainer_id, trainers_num=trainers_num
    )
    if update_settings is not None:
        config = replace(config or ClientConfig.load(), update_settings=update_settings)
    client = Client(environment.endpoints, config=config, trainer=trainer or TrainerName(job))
    return open_session(Session(client, environment, job))


def open_session(session: Session) -> Session:
    """Have a session that was made be the one that is open, and return it.

    Raises:
        ConfigError: Another one is open.
    """
    global _current
    _refuse_second()
    _current = session
    return session


def _refuse_second() -> None:
    if _current is not None:
        raise ConfigError("a session is open already; close() it before another init()")


def set_session_factory(factory: SessionFactory | None) -> SessionFactory | None:
    """Have sessions opened when they are first needed; return the factory set before.

    A program that may or may not turn out to need servers sets one instead of calling ``init``:
    the first layer or optimizer that looks for a session calls it.

    Args:
        factory: Returns an open session, which is current until it is closed. None: no factory.
    """
    global _factory
    before, _factory = _factory, factory
    return before


def current_session() -> Session | None:
    """Return the session that is open, or the one that the factory opens now; None: neither."""
    global _current
    if _current is None and _factory is not None:
        _current = _factory()
    return _current


def opened_session() -> Session | None:
    """Return the session that is open; the factory is not asked."""
    return _current


def opened_client() -> Client | None:
    """Return the client of the session that is open; the factory is not asked."""
    return None if _current is None else _current.client


def connection(client: Client | None) -> tuple[Client, Session | None]:
    """Return the client to use, and the session if it is by that: it names the tables.

    Raises:
        ConfigError: There is neither a client nor a session.
    """
    if client is not None:
        return client, None
    session = current_session()
    if session is None:
        raise ConfigError("no connection: call init() of the adapter first, or pass client=")
    return session.client, session


def dense_prefix(client: Client) -> str:
    """Return what comes before the names of dense tables that go through this client."""
    in_session = _current is not None and _current.client is client
    return _current.table_name("dense.") if _current is not None and in_session else "dense."


def numbered(client: Client, kind: str) -> str:
    """Return "kind_0", then "kind_1", ...: the same names in each trainer that runs one program."""
    with _numbers_lock:
        counts = _numbers.setdefault(client, Counter())
        counts[kind] += 1
        return f"{kind}_{counts[kind] - 1}"


def _refuse_server(environ: Mapping[str, str]) -> None:
    role = environ.get(ROLE, "TRAINER").strip().upper()
    if role == "PSERVER":
        raise ConfigError(
            f"{ROLE} is PSERVER, but this program is a trainer: backstay's servers run no user "
            "code. Start each server with 'pserver serve' (see 'pserver serve --help'), or all "
            "on this machine with 'backstay local -- python your_script.py'"
        )
    if role != "TRAINER":
        raise ConfigError(f"{ROLE} is {environ[ROLE]!r}; it must be TRAINER or PSERVER")


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}; it must be an integer") from None
