"""Who this process is and where its servers are, from the names that Paddle's users know.

May import the client, addresses and configuration. Never starts a process; reads the environment
only when ``init`` or ``TrainerEnvironment.read`` is called, and an explicit argument wins over it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from backstay.addresses import parse_endpoints
from backstay.config import ClientConfig
from backstay.errors import ConfigError
from backstay.trainer.client import Client

__all__ = ["Session", "TrainerEnvironment", "current_session", "init"]

ENDPOINTS = "PADDLE_PSERVERS_IP_PORT_LIST"
TRAINER_ID = "PADDLE_TRAINER_ID"
TRAINERS_NUM = "PADDLE_TRAINERS_NUM"
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
            raise ConfigError(f"{ENDPOINTS} or endpoints=: {error}") from None
        if self.trainers_num < 1:
            raise ConfigError(f"{TRAINERS_NUM} is {self.trainers_num}; it must be 1 or more")
        if not 0 <= self.trainer_id < self.trainers_num:
            raise ConfigError(
                f"{TRAINER_ID} is {self.trainer_id}; with {TRAINERS_NUM}={self.trainers_num} it "
                f"must be 0 to {self.trainers_num - 1}"
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

        Raises:
            ConfigError: A value is missing or wrong, or the role is that of a server.
        """
        role = environ.get(ROLE, "TRAINER").strip().upper()
        if role == "PSERVER":
            raise ConfigError(
                f"{ROLE} is PSERVER, but this program is a trainer: backstay's servers run no user "
                "code. Start each server with 'pserver serve' (see 'pserver serve --help'), or all "
                "on this machine with 'backstay local -- python your_script.py'"
            )
        if role != "TRAINER":
            raise ConfigError(f"{ROLE} is {environ[ROLE]!r}; it must be TRAINER or PSERVER")
        if endpoints is None:
            endpoints = environ.get(ENDPOINTS, "")
        if isinstance(endpoints, str):
            endpoints = [part.strip() for part in endpoints.split(",") if part.strip()]
        if trainer_id is None:
            trainer_id = _integer(environ, TRAINER_ID)
        if trainers_num is None:
            trainers_num = _integer(environ, TRAINERS_NUM)
        trainers_num = 1 if trainers_num is None else trainers_num
        if trainer_id is None:
            if trainers_num > 1:
                # Two trainers that both take themselves for number 0 would train on the same
                # examples, and nobody would notice.
                raise ConfigError(
                    f"{TRAINER_ID} is not set, with {TRAINERS_NUM}={trainers_num}: set it to this "
                    f"trainer's number, 0 to {trainers_num - 1}"
                )
            trainer_id = 0
        return cls(tuple(endpoints), trainer_id, trainers_num)


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


_current: Session | None = None


def init(
    endpoints: str | Sequence[str] | None = None,
    *,
    trainer_id: int | None = None,
    trainers_num: int | None = None,
    job: str = "",
    config: ClientConfig | None = None,
) -> Session:
    """Connect this trainer; layers and optimizers made afterwards use the session by themselves.

    Args:
        endpoints: Pserver addresses, "host:port", one or several, or several in one string with
            commas. Default: ``PADDLE_PSERVERS_IP_PORT_LIST``.
        trainer_id: Default: ``PADDLE_TRAINER_ID``; 0 if there is one trainer only.
        trainers_num: Default: ``PADDLE_TRAINERS_NUM``, else 1.
        job: Comes before the names of all tables, as "job/name".
        config: Timeouts, token and TLS. Default: from the ``BACKSTAY_*`` names.

    Raises:
        ConfigError: A value is missing or wrong, ``TRAINING_ROLE`` is ``PSERVER``, or a session
            is open already.
        ServerUnavailable: No server answers.
    """
    global _current
    if _current is not None:
        raise ConfigError("a session is open already; close() it before another init()")
    environment = TrainerEnvironment.read(
        os.environ, endpoints=endpoints, trainer_id=trainer_id, trainers_num=trainers_num
    )
    _current = Session(Client(environment.endpoints, config=config), environment, job)
    return _current


def current_session() -> Session | None:
    """Return the session that ``init`` opened and nobody has closed."""
    return _current


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}; it must be a whole number") from None
