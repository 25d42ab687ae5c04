"""``pserverctl checkpoint``: writing, looking at, restoring and exporting checkpoints."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from backstay.checkpoint import remote
from backstay.checkpoint.remote import CheckpointInfo
from backstay.checkpoint.restore_state import RestoreState
from backstay.errors import CheckpointNotFound, DeadlineExceeded
from backstay.exit_codes import ExitCode
from backstay.exits import exit_on_error, print_json
from backstay.pserver.client.inspection import ClusterInspection
from backstay.pserver.ctl.asking import ClusterOptions, ask, examples, json_option
from backstay.pserver.ctl.completion import suggestions
from backstay.pserver.ctl.showing import count_text, grid, print_whole, size_text

__all__ = ["checkpoint"]

LOOK_S = 0.2


def _complete_id(context: click.Context, _parameter: click.Parameter, begun: str) -> list[str]:
    def ids(inspection: ClusterInspection) -> list[str]:
        return [one.id for one in _list(inspection, "").checkpoints]

    return suggestions(context, ids, begun)


def _newest(_context: click.Context, _parameter: click.Parameter, text: str) -> str:
    """Take ``latest``, as ``pserver serve --restore`` has it, for the newest one."""
    return "" if text == "latest" else text


url_option = click.option(
    "--url", default="", help="The folder or URL to look at. Default: the cluster's checkpoint_url."
)


@click.group(
    epilog=examples(
        "pserverctl checkpoint save --tag pass=3",
        "pserverctl checkpoint list",
        "pserverctl checkpoint verify",
        "pserverctl checkpoint restore ckpt-000007-3fa9c1 --yes",
    )
)
def checkpoint() -> None:
    """Write, list, check and restore checkpoints of the whole cluster."""


@checkpoint.command(
    epilog=examples(
        "pserverctl checkpoint save",
        "pserverctl checkpoint save --full --tag pass=3 --tag by=hand",
        "pserverctl checkpoint save --json",
    )
)
@json_option()
@click.option("--full", "kind", flag_value="full", help="All rows.")
@click.option(
    "--incremental", "kind", flag_value="incremental", help="Rows changed since the last."
)
@click.option("--tag", "tags", multiple=True, metavar="NAME=VALUE", help="A note to keep with it.")
@click.pass_obj
def save(options: ClusterOptions, kind: str | None, tags: tuple[str, ...], as_json: bool) -> None:
    """Write a checkpoint to the cluster's checkpoint_url, while training goes on."""
    notes = dict(_tag(text) for text in tags)

    def question(inspection: ClusterInspection) -> CheckpointInfo:
        with _bar("slots", shown=not as_json) as draw:
            return inspection.first_answer(
                lambda channel: remote.save(
                    channel,
                    kind=kind or "auto",  # type: ignore[arg-type]
                    tags=notes,
                    tell=lambda done, total, size: draw(done, total, size_text(size)),
                )
            )

    info = ask(options, question, as_json=as_json)
    if as_json:
        print_json(_object(info))
    else:
        click.echo(f"{info.id}: {_summary(info)}")


@checkpoint.command(
    "list", epilog=examples("pserverctl checkpoint list", "pserverctl checkpoint list --json")
)
@json_option()
@url_option
@click.pass_obj
def list_(options: ClusterOptions, url: str, as_json: bool) -> None:
    """List the checkpoints, oldest first."""
    found = ask(options, lambda inspection: _list(inspection, url), as_json=as_json)
    if as_json:
        listed = [_object(one) for one in found.checkpoints]
        print_json({**asdict(found), "checkpoints": listed})
        return
    if found.checkpoints:
        table = grid("checkpoint", "kind", "created", "rows", "size", "files", "adds to", "tags")
        for one in found.checkpoints:
            table.add_row(
                one.id, one.kind, one.created, f"{one.rows:,}", size_text(one.bytes),
                str(one.files), one.base or "-", escape(_tags_text(one)) or "-",
            )  # fmt: skip
        print_whole(Console(), table)
    else:
        click.echo(f"no checkpoint at {found.url}")
    for name in found.unfinished:
        click.echo(f"{name}: never finished; the next checkpoint removes it")
    for text in found.damaged:
        click.echo(f"damaged: {text}")


@checkpoint.command(
    epilog=examples("pserverctl checkpoint show", "pserverctl checkpoint show ckpt-000007-3fa9c1")
)
@json_option()
@url_option
@click.argument(
    "checkpoint_id", metavar="[ID]", default="", callback=_newest, shell_complete=_complete_id
)
@click.pass_obj
def show(options: ClusterOptions, checkpoint_id: str, url: str, as_json: bool) -> None:
    """Show one checkpoint; by default the newest."""
    info, chain, progress = ask(
        options,
        lambda inspection: inspection.first_answer(
            lambda channel: remote.show(
                channel, checkpoint_id, url=url, timeout_s=inspection.timeout_s
            )
        ),
        as_json=as_json,
    )
    if as_json:
        print_json({**_object(info), "chain": chain, "progress": progress})
        return
    click.echo(f"{info.id}: {_summary(info)}, of cluster {info.cluster}, {info.slot_count} slots")
    click.echo(f"created {info.created}; tables: {', '.join(info.tables) or 'none'}")
    if len(chain) > 1:
        click.echo("a restore of it reads: " + " + ".join(chain))
    if info.tags:
        click.echo(f"tags: {_tags_text(info)}")
    if progress:
        click.echo(f"progress: {json.dumps(progress)}")


@checkpoint.command(
    epilog=examples(
        "pserverctl checkpoint verify", "pserverctl checkpoint verify ckpt-000007-3fa9c1 --json"
    )
)
@json_option()
@url_option
@click.argument(
    "checkpoint_id", metavar="[ID]", default="", callback=_newest, shell_complete=_complete_id
)
@click.pass_obj
def verify(options: ClusterOptions, checkpoint_id: str, url: str, as_json: bool) -> None:
    """Read every file of a checkpoint, and of those it adds to; by default the newest."""

    def question(inspection: ClusterInspection) -> tuple[str, tuple[str, ...]]:
        with _bar("bytes", shown=not as_json) as draw:
            return inspection.first_answer(
                lambda channel: remote.verify(
                    channel,
                    checkpoint_id,
                    url=url,
                    tell=lambda done, total: draw(done, total, size_text(done)),
                )
            )

    verified, problems = ask(options, question, as_json=as_json)
    if as_json:
        print_json({"id": verified, "good": not problems, "problems": problems})
    else:
        click.echo(
            f"{verified}: " + ("every file is as it should be" if not problems else "DAMAGED")
        )
        for problem in problems:
            click.echo(f"  {problem}")
    sys.exit(ExitCode.FAILED if problems else 0)


@checkpoint.command(
    epilog=examples(
        "pserverctl checkpoint restore --yes",
        "pserverctl checkpoint restore ckpt-000007-3fa9c1 --slots 3,17 --yes",
        "pserverctl checkpoint restore --fallback --yes",
    )
)
@json_option()
@url_option
@click.option("--slots", "slots_text", metavar="N[,N...]", help="Only these slots. Default: all.")
@click.option(
    "--fallback", is_flag=True, help="If it is damaged, take the newest before it that is not."
)
@click.option(
    "--allow-inexact", is_flag=True,
    help="With --slots, also while a job goes on: its records may then count never or twice.",
)  # fmt: skip
@click.option("--yes", is_flag=True, help="Do not ask before the rows in the slots are discarded.")
@click.option("--no-wait", is_flag=True, help="Do not wait until everything is loaded.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0), default=3600.0, show_default=True,
    help="Seconds to wait for the loading.",
)  # fmt: skip
@click.argument(
    "checkpoint_id", metavar="[ID]", default="", callback=_newest, shell_complete=_complete_id
)
@click.pass_obj
def restore(
    options: ClusterOptions,
    checkpoint_id: str,
    *,
    url: str,
    slots_text: str | None,
    fallback: bool,
    allow_inexact: bool,
    yes: bool,
    no_wait: bool,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Discard the rows in the slots and load them from a checkpoint; by default the newest.

    The command reads all files first: if one is damaged, nothing is changed. Running trainers
    get StateLost: start them again from the checkpoint's progress. Jobs go back by themselves;
    --slots is refused while a job is not done.
    """
    slots = _slots(slots_text)
    if not yes:
        what = f"slots {slots_text}" if slots else "ALL slots"
        if not checkpoint_id:
            _check_for_any(options, url, as_json=as_json)
        chosen = checkpoint_id or "the newest checkpoint"
        click.confirm(
            f"Give up what {what} hold now, for {chosen}? (--yes: do not ask)",
            abort=True,
            err=True,
        )

    def question(inspection: ClusterInspection) -> dict[str, Any]:
        restored, passed_over = inspection.first_answer(
            lambda channel: remote.restore(
                channel,
                checkpoint_id,
                url=url,
                slots=slots,
                fallback=fallback,
                allow_inexact=allow_inexact,
            )
        )
        state = _state(inspection)
        late = ""
        if not no_wait:
            with _bar("slots", shown=not as_json) as draw:
                try:
                    state = _wait(inspection, timeout_s, draw)
                except DeadlineExceeded as error:
                    state, late = _state(inspection), str(error)
        report = {**asdict(state), "id": restored, "passed_over": passed_over}
        return {**report, "error": late} if late else report

    report = ask(options, question, as_json=as_json)
    if as_json:
        print_json(report)
    else:
        for text in report["passed_over"]:
            click.echo(f"passed over: {text}")
        click.echo(f"{report['id']}: {report['state']}")
        if "error" in report:
            click.echo(f"Error: {report['error']}", err=True)
        elif report["state"] == "done":
            click.echo("the copies on other nodes are being made: pserverctl status")
    sys.exit(ExitCode.FAILED if report["state"] != "done" and not no_wait else 0)


@checkpoint.command(epilog=examples("pserverctl checkpoint delete ckpt-000003-90aa41"))
@json_option()
@url_option
@click.argument("checkpoint_id", metavar="ID", shell_complete=_complete_id)
@click.pass_obj
def delete(options: ClusterOptions, checkpoint_id: str, url: str, as_json: bool) -> None:
    """Remove a checkpoint that no other one adds to."""
    ask(
        options,
        lambda inspection: inspection.first_answer(
            lambda channel: remote.delete(
                channel, checkpoint_id, url=url, timeout_s=inspection.timeout_s
            )
        ),
        as_json=as_json,
    )
    if as_json:
        print_json({"deleted": checkpoint_id})
    else:
        click.echo(f"{checkpoint_id} is removed")


@checkpoint.command(
    epilog=examples(
        "pserverctl checkpoint export /shared/ckpt /tmp/model",
        "pserverctl checkpoint export s3://bucket/ads /tmp/model --id ckpt-000007-3fa9c1 --parquet",
    )
)
@json_option()
@click.option("--id", "checkpoint_id", default="", help="Which one. Default: the newest.")
@click.option("--parquet", is_flag=True, help="Tables as Parquet instead of safetensors.")
@click.option("--statistics", is_flag=True, help="Also write the statistics of rows.")
@click.option(
    "--score-at-least",
    type=float,
    help="Leave rows of a lower score out, in tables whose lifetime uses one.",
)
@click.argument("url")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
def export(
    url: str,
    directory: Path,
    checkpoint_id: str,
    parquet: bool,
    statistics: bool,
    score_at_least: float | None,
    as_json: bool,
) -> None:
    """Write the weights of a checkpoint for inference; needs no cluster, only the files."""
    # Imported here: it takes time that no other command should.
    from backstay.checkpoint.export import RowChoice
    from backstay.checkpoint.export import export as write
    from backstay.checkpoint.storage import CheckpointStorage

    with exit_on_error(ExitCode.NO_ANSWER, as_json=as_json):
        storage = CheckpointStorage(url)
        ids = storage.ids()
        if not checkpoint_id and not ids:
            raise CheckpointNotFound(f"{storage.url} has no finished checkpoint")
        chosen = checkpoint_id or ids[-1]
        rows = RowChoice(statistics, score_at_least)
        write(storage, chosen, directory, "parquet" if parquet else "safetensors", rows=rows)
    if as_json:
        print_json({"id": chosen, "directory": str(directory)})
    else:
        click.echo(f"{chosen} is exported to {directory}")


def _check_for_any(options: ClusterOptions, url: str, *, as_json: bool) -> None:
    """End the process where there is no checkpoint to restore."""

    def question(inspection: ClusterInspection) -> None:
        found = _list(inspection, url)
        if not found.checkpoints and not found.damaged:
            raise CheckpointNotFound(f"there is no checkpoint at {found.url}")

    ask(options, question, as_json=as_json)


def _list(inspection: ClusterInspection, url: str) -> remote.CheckpointList:
    return inspection.first_answer(
        lambda channel: remote.list_checkpoints(channel, url=url, timeout_s=inspection.timeout_s)
    )


def _state(inspection: ClusterInspection) -> RestoreState:
    return inspection.first_answer(
        lambda channel: remote.restore_state(channel, timeout_s=inspection.timeout_s)
    )


def _wait(
    inspection: ClusterInspection, timeout_s: float, draw: Callable[[int, int, str], None]
) -> RestoreState:
    """Wait until everything is loaded.

    Raises:
        DeadlineExceeded: It takes longer than ``timeout_s``.
    """
    deadline_s, most = time.monotonic() + timeout_s, 0
    while True:
        state = _state(inspection)
        most = max(most, state.slots_left)
        draw(most - state.slots_left, most, state.trouble)
        if state.state == "done":
            return state
        if time.monotonic() > deadline_s:
            raise DeadlineExceeded(
                f"{state.slots_left} slots are not loaded after {timeout_s:g} s"
                + (f": {state.trouble}" if state.trouble else "; it goes on")
            )
        time.sleep(LOOK_S)


@contextmanager
def _bar(unit: str, *, shown: bool) -> Iterator[Callable[[int, int, str], None]]:
    """Draw a progress bar on standard error; what is given is called with done, total, a note."""
    columns = (BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn())
    progress = Progress(
        TextColumn("{task.description}"), *columns, TextColumn("{task.fields[note]}"),
        console=Console(stderr=True), disable=not shown, transient=True,
    )  # fmt: skip
    with progress:
        task = progress.add_task(unit, total=None, note="")

        def draw(done: int, total: int, note: str) -> None:
            progress.update(task, completed=done, total=total or None, note=escape(note))

        yield draw


def _summary(info: CheckpointInfo) -> str:
    text = (
        f"{info.kind}, {count_text(info.rows)} rows, {size_text(info.bytes)} in {info.files} files"
    )
    return text + (f", adds to {info.base}" if info.base else "")


def _object(info: CheckpointInfo) -> dict[str, Any]:
    return {**asdict(info), "base": info.base or None, "tags": dict(info.tags)}


def _tags_text(info: CheckpointInfo) -> str:
    return " ".join(f"{name}={value}" for name, value in info.tags.items())


def _tag(text: str) -> tuple[str, str | int | float]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--tag")
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value


def _slots(text: str | None) -> list[int]:
    if text is None:
        return []
    try:
        return [int(one) for one in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not N[,N...]", param_hint="--slots") from error
