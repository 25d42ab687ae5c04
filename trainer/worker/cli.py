"""``python -m backstay.trainer.worker.cli``: one worker process, as launchers start it.

Exit codes: 0 the job is over or this worker was told to end; 1 it failed; 2 the model file or a
setting is wrong, or the job has other tables than the model: another try would end alike. May
import the worker and the logs.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping
from types import FrameType

import click

from backstay import lifeline
from backstay.cluster.directory import reach
from backstay.config import ENDPOINT_VARIABLES, ClientConfig, required_endpoints
from backstay.errors import BackstayError, ConfigError, TableConflict
from backstay.exit_codes import ExitCode
from backstay.logs import set_up_logging
from backstay.trainer.worker.last_words import leave_last_words
from backstay.trainer.worker.worker import Worker

__all__ = ["main"]

# A batch and the calls to the job master; then the job master takes the task from this worker.
GRACE_S = 10.0

_LOG = logging.getLogger(__name__)


@click.command(context_settings={"max_content_width": 100})
@click.option(
    "--endpoint",
    help="Control addresses of pservers, with commas; the job master is found there. "
    f"[{', '.join(ENDPOINT_VARIABLES)}]",
)
@click.option("--job", required=True, help="Name of the job.")
@click.option("--worker-id", required=True, help="Name of this worker, never used before.")
@click.option(
    "--first-contact-timeout-ms",
    type=int,
    help="How long servers may take to answer a first time; 0: as long as it takes.",
)
@click.option("--log-level", default="info", show_default=True)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text")
def main(
    endpoint: str | None,
    job: str,
    worker_id: str,
    first_contact_timeout_ms: int | None,
    log_level: str,
    log_format: str,
) -> None:
    """Work for a job until it is over. SIGTERM: give back its tasks, and end."""
    lifeline.attach(grace_s=GRACE_S)
    set_up_logging(log_level, log_format, worker_id)
    explicit = {"first_contact_timeout_ms": first_contact_timeout_ms}
    sys.exit(run(endpoint, job, worker_id, explicit))


def run(endpoint: str | None, job: str, worker_id: str, explicit: Mapping[str, object]) -> int:
    """Work for a job; return the exit code."""
    try:
        config = ClientConfig.load(explicit=explicit)
        # Signals are not handled yet, so a signal ends this wait at once.
        endpoints = required_endpoints(os.environ, endpoint)
        reach(endpoints, config)
        worker = Worker(endpoints, job, worker_id, config=config)

        def stop(number: int, _: FrameType | None) -> None:
            worker.stop(f"it was told to end ({signal.Signals(number).name})")

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        reason = worker.run()
    except ConfigError as error:
        return _failed(error, str(error), ExitCode.WRONG_SETTING)
    except TableConflict as error:
        text = f"{error}; give the model the old settings, or the job another name"
        return _failed(error, text, ExitCode.WRONG_SETTING)
    except BackstayError as error:
        return _failed(error, f"{type(error).__name__}: {error}", ExitCode.FAILED)
    except Exception as error:
        # Python tells it in the log, and ends with 1.
        leave_last_words(error)
        raise
    _LOG.info("worker %s ends: %s", worker_id, reason)
    return 0


def _failed(error: BackstayError, text: str, exit_code: int) -> int:
    # The error stays the last line of the log, where a launcher that has only that looks for it.
    leave_last_words(error, text)
    _LOG.error("%s", text)
    return exit_code


if __name__ == "__main__":
    main()
