"""``backstay master``: runs the job master until the job is over.

The only module of the job master that reads arguments and prints.
"""

from __future__ import annotations

import asyncio
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
    DataError,
    InvalidRequest,
    JobRefused,
    ListenError,
    NotJobMaster,
    StoreAuthError,
)
from backstay.exit_codes import MASTER_CODES, ExitCode
from backstay.exits import examples, exit_on_error
from backstay.job_spec import JobSpec
from backstay.lifeline import Lifeline
from backstay.logs import set_up_logging
from backstay.master.config import MasterConfig
from backstay.master.host import MasterHost

__all__ = ["main"]

# After the end of the process that started this one; its servers may have gone with it.
GRACE_S = 15.0

# What another process would meet again, and what has a code of its own.
OTHER_CODES: dict[type[BackstayError], ExitCode] = {
    ListenError: ExitCode.CANNOT_LISTEN,
    NotJobMaster: ExitCode.REPLACED,
    **dict.fromkeys(
        (StoreAuthError, JobRefused, DataError, InvalidRequest), ExitCode.WRONG_SETTING
    ),
}
END_CODES = {"failed": ExitCode.JOB_FAILED, "unsaved": ExitCode.UNSAVED}


@click.command(name="master", epilog=examples(MASTER_CODES, "backstay master job.json"))
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
    with exit_on_error(ExitCode.FAILED, others=OTHER_CODES):
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
    sys.exit(END_CODES.get(state, ExitCode.OK))


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


if __name__ == "__main__":
    main()
