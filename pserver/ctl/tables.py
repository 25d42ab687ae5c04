"""``pserverctl tables``: the tables, with rows and memory over all nodes, and their settings."""

from __future__ import annotations

import json
import sys
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from backstay.cluster.upkeep import Expired, Upkeep
from backstay.config import ClientConfig
from backstay.errors import ConfigError
from backstay.exit_codes import ExitCode
from backstay.exits import exit_on_error, print_json
from backstay.pserver.client.inspection import ClusterInspection
from backstay.pserver.ctl.asking import ClusterOptions, ask, chosen_endpoints, examples, json_option
from backstay.pserver.ctl.showing import grid, print_whole, size_text
from backstay.pserver.tables.settings import (
    COMPENSATION,
    NON_FINITE,
    compensation_of,
    settings_of,
    shown_policy,
)

__all__ = ["parse_assignments", "tables"]

EXAMPLES = examples(
    "pserverctl --endpoint 127.0.0.1:7000 tables --json",
    "pserverctl tables set user/emb learning_rate=0.01",
    "pserverctl tables expire user/emb --dry-run",
)
SET_EXAMPLES = examples(
    "pserverctl tables set user/emb learning_rate=0.01",
    "pserverctl tables set user/emb learning_rate=0.001 epsilon=1e-6 --dry-run",
    "pserverctl tables set user/emb non_finite=clip:5 --json",
    "pserverctl tables set user/emb expiry.unseen_seconds=604800 capacity.rows=2000000",
)
EXPIRE_EXAMPLES = examples(
    "pserverctl tables expire user/emb --dry-run",
    "pserverctl tables expire user/emb --unseen-seconds 604800 --json",
)


@click.group(invoke_without_command=True, epilog=EXAMPLES)
@json_option()
@click.pass_context
def tables(context: click.Context, as_json: bool) -> None:
    """Show the tables, over all nodes: rows, copies of rows, and the memory that copies take.

    The exit code is 1 if a node does not answer, so that its rows are missing in the sums.
    """
    if context.invoked_subcommand is not None:
        return
    report = ask(
        context.find_object(ClusterOptions) or ClusterOptions(),
        ClusterInspection.tables,
        as_json=as_json,
    )
    if as_json:
        print_json(report)
    else:
        _show(report)
    sys.exit(ExitCode.FAILED if report["silent_nodes"] else 0)


@tables.command("set", epilog=SET_EXAMPLES)
@click.argument("name")
@click.argument("assignments", metavar="KEY=VALUE...", nargs=-1, required=True)
@click.option("--dry-run", is_flag=True, help="Only say what would change.")
@json_option()
@click.pass_obj
def set_settings(
    options: ClusterOptions, name: str, assignments: tuple[str, ...], dry_run: bool, as_json: bool
) -> None:
    """Change settings of a table that exists, while it is trained.

    KEY is a setting of its optimizer, such as learning_rate, epsilon or beta1; or compensation,
    whose VALUE is ignore or scale; or non_finite, whose VALUE is refuse or clip:LIMIT; or of its
    lifetime: expiry.*, capacity.rows or .bytes, score.decay, unadmitted, with the VALUE null for
    none. Every push taken on after this has ended is applied under the new settings, on all copies.
    What the layout of the rows depends on cannot change: another optimizer, the dimension, the
    storage, which statistics a row keeps.
    """
    with exit_on_error(ExitCode.NO_ANSWER, as_json=as_json):
        settings = parse_assignments(assignments)
    done = ask(
        options,
        lambda inspection: inspection.set_table(name, settings, dry_run=dry_run),
        as_json=as_json,
    )
    if as_json:
        print_json(done)
    elif not done["changed"]:
        click.echo(f"table {name!r} has these settings already")
    else:
        would = "would change" if dry_run else f"revision {done['revision']}"
        click.echo(f"table {name!r}, {would}: {', '.join(done['changed'])}")


@tables.command(epilog=EXPIRE_EXAMPLES)
@click.argument("name")
@click.option("--unseen-seconds", type=int, help="Rows that no push named for so many seconds.")
@click.option("--score-below", type=float, help="Rows of a lower score.")
@click.option("--norm-below", type=float, help="Rows whose weights have a lower L2 norm.")
@click.option("--dry-run", is_flag=True, help="Only count them.")
@json_option()
@click.pass_obj
def expire(
    options: ClusterOptions,
    name: str,
    unseen_seconds: int | None,
    score_below: float | None,
    norm_below: float | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove the rows of a table that its expiry no longer keeps, while it is trained.

    Without a threshold, those of the table's own expiry hold. Each row counts once, for the first
    reason that holds: unseen, score, norm.
    """
    with exit_on_error(ExitCode.NO_ANSWER, as_json=as_json):
        config = ClientConfig.load(file=options.config_file)
        with Upkeep(chosen_endpoints(options), config) as upkeep:
            expired = upkeep.expire(
                name,
                dry_run=dry_run,
                unseen_seconds=unseen_seconds,
                score_below=score_below,
                norm_below=norm_below,
            )
    # Each row has the same memory, so it does not matter which are gone by now.
    found = ask(options, ClusterInspection.tables, as_json=as_json)["tables"]
    row_bytes = next((one["row_bytes"] for one in found if one["name"] == name), 0)
    report = _expiry_report(name, expired, row_bytes, dry_run)
    if as_json:
        print_json(report)
    else:
        _show_expiry(report)


def _expiry_report(name: str, expired: Expired, row_bytes: int, dry_run: bool) -> dict[str, Any]:
    reasons = {"unseen": expired.unseen, "score": expired.score, "norm": expired.norm}
    return {
        "table": name,
        "dry_run": dry_run,
        "rows": expired.rows,
        "bytes": expired.rows * row_bytes,
        "by_reason": {
            reason: {"rows": rows, "bytes": rows * row_bytes} for reason, rows in reasons.items()
        },
        "counters": expired.counters,
        "slots": expired.slots,
    }


def _show_expiry(report: dict[str, Any]) -> None:
    would = "would expire" if report["dry_run"] else "expired"
    click.echo(f"table {report['table']!r}: {report['rows']:,} rows {would}")
    shown = grid("reason", "rows", "memory of one copy")
    for reason, told in report["by_reason"].items():
        shown.add_row(reason, f"{told['rows']:,}", size_text(told["bytes"]))
    print_whole(Console(), shown)
    if report["counters"]:
        forgotten = "would be forgotten" if report["dry_run"] else "forgotten"
        click.echo(f"{report['counters']:,} counters of keys without a row {forgotten}")


def parse_assignments(words: tuple[str, ...]) -> dict[str, Any]:
    """Return settings by name from words like ``learning_rate=0.01``.

    Raises:
        ConfigError: One is not of that form, or names a setting a second time.
    """
    settings: dict[str, Any] = {}
    for word in words:
        name, sign, value = word.partition("=")
        name = name.strip()
        if not sign or not name or not value.strip():
            raise ConfigError(f"{word!r}: expected KEY=VALUE, such as learning_rate=0.01")
        if name in settings:
            raise ConfigError(f"{name} is given twice")
        settings[name] = _policy(value.strip()) if name == NON_FINITE else _value(value.strip())
    return settings


def _policy(text: str) -> Any:
    """Read a policy for bad gradients: ``refuse``, or ``clip:LIMIT``."""
    kind, _, limit = text.partition(":")
    if kind == "clip":
        return {"clip": {"limit": _value(limit)}}
    return text


def _value(text: str) -> Any:
    """Read a number or a flag; anything else stays a string, which the servers refuse by name."""
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError:
        return text


def _show(report: dict[str, Any]) -> None:
    console = Console()
    if report["tables"]:
        _show_tables(console, report["tables"])
    else:
        click.echo("no tables yet")
    if report["silent_nodes"]:
        silent = escape(", ".join(report["silent_nodes"]))
        console.print(
            f"[red]rows of nodes that do not answer are missing: {silent}[/red]", soft_wrap=True
        )


def _show_tables(console: Console, reported: list[dict[str, Any]]) -> None:
    lives = any(table["spec"].get("lifetime") for table in reported)
    told = any(table["stale_slots"] for table in reported)
    more = (*(("counters", "lifetime") if lives else ()), *(("staleness",) if told else ()))
    shown = grid("table", "kind", "storage", "optimizer", "rows", "copies", "memory", *more)
    for table in reported:
        spec = table["spec"]
        kind, shape = next(iter(spec["kind"].items()))
        size = shape.get("dim") or "x".join(map(str, shape.get("shape", [])))
        shown.add_row(
            escape(table["name"]),
            f"{kind} {size}",
            spec["storage"],
            settings_text(spec),
            f"{table['rows']:,}",
            f"{table['copies']:,}",
            size_text(table["bytes"]),
            *((f"{table['counters']:,}", lifetime_text(table["spec"])) if lives else ()),
            *((staleness_text(table),) if told else ()),
        )
    print_whole(console, shown)


def staleness_text(table: dict[str, Any]) -> str:
    """Return the mean staleness of pushes to a table; empty: it is not measured."""
    slots = table["stale_slots"]
    return f"{table['staleness_sum'] / slots:.1f}" if slots else ""


def settings_text(spec: dict[str, Any]) -> str:
    """Return an optimizer with its settings, and the policy for bad gradients if it is set."""
    ((name, own),) = spec["optimizer"].items()
    if name == "user":
        name = f"user {own['name']}"
    words = [name, *(f"{key}={json.dumps(value)}" for key, value in settings_of(spec).items())]
    if compensation_of(spec) != "ignore":
        words.append(f"{COMPENSATION}={compensation_of(spec)}")
    if spec[NON_FINITE] != "refuse":
        words.append(f"{NON_FINITE}={shown_policy(spec[NON_FINITE])}")
    return " ".join(words)


def lifetime_text(spec: dict[str, Any]) -> str:
    """Return a table's lifetime in a few words; empty: it has none."""
    lifetime = spec.get("lifetime")
    if lifetime is None:
        return ""
    words = []
    admission = lifetime["admission"]
    if isinstance(admission, dict):
        ((kind, own),) = admission.items()
        shown = {kind: own} if kind == "function" else own
        kinds = "" if kind == "function" else f"{kind} "
        words.append(f"admission {kinds}{_settings_text(shown)}")
    words += [
        f"{part} {_settings_text(lifetime[part])}"
        for part in ("expiry", "capacity", "score")
        if lifetime[part]
    ]
    return "; ".join(words)


def _settings_text(settings: dict[str, Any]) -> str:
    """Return settings as ``name=value``; a function without its expression."""
    words = []
    for name, value in settings.items():
        if isinstance(value, dict):
            words += [f"user {value['name']}", _settings_text(value["settings"])]
        elif value is not None:
            words.append(f"{name}={value if isinstance(value, str) else json.dumps(value)}")
    return " ".join(word for word in words if word)
