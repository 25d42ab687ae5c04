"""``backstay master``: runs the job master until the job is over.

The only module of the job master that reads arguments and prints. Exit codes: 0 the job is done or
was stopped, 1 this process cannot go on, 2 a setting, the job or its data is wrong, 3 it cannot
listen, 4 another process is the job master now, 5 the job failed, or its last checkpoint could not
be written.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

import click

from backstay import lifeline
from backstay.addresses import parse_endpoints
from backstay.cluster.directory import reach
from backstay.config import ENDPOINT_VARIABLES, ClientConfig, required_endpoints
from backstay.consensus.records.jobs import RunState
from backstay.errors import (
    BackstayError,
    ConfigError,
    DataError,
    InvalidRequest,
    JobRefused,
    ListenError,
    NotJobMaster,
    StoreAuthError,
)
from backstay.exits import EXIT_WRONG_SETTING
from backstay.job_spec import JobSpec
from backstay.lifeline import Lifeline
from backstay.logs import set_up_logging
from backstay.master.config import MasterConfig
from backstay.master.host import MasterHost

__all__ = ["EXIT_FAILED", "EXIT_JOB_FAILED", "EXIT_REPLACED", "main"]

EXIT_FAILED = 1
EXIT_CANNOT_LISTEN = 3
EXIT_REPLACED = 4
EXIT_JOB_FAILED = 5
# After the end of the process that started this one; its servers may have gone with it.
GRACE_S = 15.0

log = logging.getLogger(__name__)


@click.command(name="master")
@click.argument("spec_file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--endpoint",
    help="Control addresses of pservers, host:port, several with commas. "
    f"[{', '.join(ENDPOINT_VARIABLES)}]",
)
@click.option(
    "--listen", default="127.0.0.1:0", show_default=True, help="Address that workers call."
)
@click.option("--advertise-host", help="Host under which workers reach this process.")
@click.option("--instance", type=int, help="Number of this process. Default: random.")
@click.option(
    "--replaces",
    type=int,
    default=0,
    help="Instance of a job master that is known to be dead: its lease is not waited for.",
)
@click.option("--fresh", is_flag=True, help="Forget the job's records and begin it anew.")
@click.option(
    "--lease-ttl-ms",
    default=3000,
    show_default=True,
    help="Lease of the job master: when it dies, the next one waits so long.",
)
@click.option(
    "--linger-ms",
    default=10_000,
    show_default=True,
    help="How long to wait for the workers when the job is over.",
)
@click.option(
    "--servers-end",
    is_flag=True,
    help="The servers end with this job: save it before it is stopped.",
)
@click.option(
    "--first-contact-timeout-ms",
    type=int,
    help="Time limit of the servers' first answer. 0: no limit.",
)
@click.option("--insecure", is_flag=True, help="Listen beyond loopback with neither token nor TLS.")
@click.option("--log-level", default="info", show_default=True)
@click.option("--log-format", default="text", show_default=True, help="text or json")
def main(
    spec_file: Path,
    endpoint: str | None,
    listen: str,
    advertise_host: str | None,
    instance: int | None,
    replaces: int,
    fresh: bool,
    lease_ttl_ms: int,
    linger_ms: int,
    servers_end: bool,
    first_contact_timeout_ms: int | None,
    insecure: bool,
    log_level: str,
    log_format: str,
) -> None:
    """Run the job master of the job in SPEC_FILE (JSON, as backstay.job_spec writes it).

    `backstay train` starts it for you. Token and TLS come from BACKSTAY_TOKEN and the like, or the
    file that BACKSTAY_CONFIG names. The same job again goes on where it was.
    """
    parent = lifeline.attach(grace_s=GRACE_S)
    try:
        spec = JobSpec.from_json(spec_file.read_text(encoding="utf-8"))
        config = MasterConfig(
            endpoints=tuple(parse_endpoints(required_endpoints(os.environ, endpoint))),
            client=ClientConfig.load(
                explicit={"first_contact_timeout_ms": first_contact_timeout_ms}
            ),
            listen_control=listen,
            advertise_host=advertise_host,
            lease_ttl_ms=lease_ttl_ms,
            replaces=replaces,
            fresh=fresh,
            linger_ms=linger_ms,
            servers_end=servers_end,
            insecure=insecure,
        )
        set_up_logging(log_level, log_format, f"job master of {spec.name}")
        # Signals are not handled yet, so a signal ends this wait at once.
        reach(config.endpoints, config.client)
        state = asyncio.run(_run(config, spec, instance, parent))
    except ListenError as error:
        _fail(error, EXIT_CANNOT_LISTEN)
    except (ConfigError, StoreAuthError, JobRefused, DataError, InvalidRequest) as error:
        # Another process would fare alike.
        _fail(error, EXIT_WRONG_SETTING)
    except NotJobMaster as error:
        _fail(error, EXIT_REPLACED)
    except BackstayError as error:
        _fail(error, EXIT_FAILED)
    sys.exit(EXIT_JOB_FAILED if state in ("failed", "unsaved") else 0)


async def _run(
    config: MasterConfig, spec: JobSpec, instance: int | None, parent: Lifeline | None
) -> RunState:
    host = MasterHost(config, spec, instance=instance)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        # A second signal ends the process at once.
        loop.remove_signal_handler(signal.SIGTERM)
        loop.remove_signal_handler(signal.SIGINT)
        host.stop()

    loop.add_signal_handler(signal.SIGTERM, stop)
    loop.add_signal_handler(signal.SIGINT, stop)
    if parent is not None:
        parent.stop_by(lambda: loop.call_soon_threadsafe(host.stop), grace_s=GRACE_S)
    return await host.run()


def _fail(error: BackstayError, exit_code: int) -> None:
    click.echo(f"Error: {error}", err=True)
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
