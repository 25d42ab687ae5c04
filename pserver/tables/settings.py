"""Settings of a table by name, as people change them: ``learning_rate=0.01``.

Pure. Which values are allowed, and what can change on a table that has rows, is the data plane's to
say; this module decides what a name means.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import Any

from backstay._native import canonical_table
from backstay.errors import ConfigError, TableConflict

__all__ = [
    "COMPENSATION",
    "NON_FINITE",
    "compensation_of",
    "lifetime_settings",
    "settings_changed",
    "settings_of",
    "shown_policy",
    "with_assignments",
]

NON_FINITE = "non_finite"
COMPENSATION = "compensation"
# What may change of a lifetime, as people name it: its place in the description.
LIFETIME_SETTINGS = (
    "unadmitted",
    *(f"expiry.{name}" for name in ("unseen_seconds", "score_below", "norm_below")),
    "expiry.every_seconds",
    *("capacity.rows", "capacity.bytes"),
    *("score.decay", "score.decay_every_seconds"),
)
# What a description holds besides settings.
_FIXED = frozenset(
    {
        *("name", "kind", "dim", "shape", "block_elements"),
        *("storage", "dtype", "initializer", "seed", "optimizer", "states", "expression"),
        *("lifetime", "admission", "expiry", "capacity", "capacity.evict", "score"),
        *("score.nonclick_coefficient", "score.click_coefficient"),
        *("score.function", "admission.function"),
    }
)
# What the data plane says of a description that is none, and how people call its types.
_UNREADABLE = re.compile(r"table description: (?P<why>.*?)( at line \d+ column \d+)?", re.DOTALL)
_PLAIN = {"f64": "a number", "u32": "a whole number", "u64": "a whole number", "value": "a name"}
# Before the name of a setting of the function that a pull goes through.
_PULL = "pull."


def settings_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a description by name: the optimizer's, and ``pull.``'s."""
    ((kind, own),) = spec["optimizer"].items()
    settings = {"learning_rate": own["learning_rate"], **own["settings"]} if kind == "user" else own
    pull = spec.get("pull") or {"settings": {}}
    return {**settings, **{f"{_PULL}{name}": value for name, value in pull["settings"].items()}}


def with_assignments(spec_json: str, settings: Mapping[str, Any]) -> str:
    """Return a description with some settings changed; what is out of range is told later.

    Args:
        spec_json: Canonical.
        settings: Of its optimizer by name, ``non_finite``, ``compensation``, of its lifetime, such
            as ``expiry.unseen_seconds``, and ``pull.`` with a setting's name.

    Raises:
        ConfigError: It has no such setting, or the setting has no such value.
        TableConflict: What is named is no setting: the table's rows depend on it.
    """
    spec = json.loads(spec_json)
    for name, value in settings.items():
        _assign(spec, name, value)
        _refuse_unreadable(spec, name, value)
    return json.dumps(spec)


def _refuse_unreadable(spec: Mapping[str, Any], name: str, value: Any) -> None:
    """Name a value of a wrong kind, such as a word for a number; ranges are checked later."""
    try:
        canonical_table(json.dumps(spec))
    except ConfigError as error:
        if unreadable := _UNREADABLE.fullmatch(str(error)):
            why = unreadable["why"].replace("`", "")
            for word, plain in _PLAIN.items():
                why = why.replace(f"expected {word}", f"expected {plain}")
            raise ConfigError(
                f"{name} of table {spec['name']!r} cannot be {json.dumps(value)[:100]}: {why}"
            ) from error


def _assign(spec: dict[str, Any], name: str, value: Any) -> None:
    """Set one setting."""
    ((kind, own),) = spec["optimizer"].items()
    known = settings_of(spec)
    if name in (NON_FINITE, COMPENSATION):
        spec[name] = value
    elif name in known and name.startswith(_PULL):
        spec["pull"]["settings"][name.removeprefix(_PULL)] = value
    elif name in known:
        (own["settings"] if name in own.get("settings", {}) else own)[name] = value
    elif name in LIFETIME_SETTINGS:
        _assign_lifetime(spec, name, value)
    elif name in _of_lifetimes_functions(spec):
        raise TableConflict(
            f"{name} of table {spec['name']!r} cannot be changed: every copy of its rows goes "
            "by the function as the table was made; make a table of another name"
        )
    elif name in _FIXED:
        raise TableConflict(
            f"{name} of table {spec['name']!r} cannot be changed: its rows are made for it; "
            "make a table of another name"
        )
    else:
        others = LIFETIME_SETTINGS if spec.get("lifetime") else ()
        near = difflib.get_close_matches(name, [*known, NON_FINITE, COMPENSATION, *others], 1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise ConfigError(
            f"table {spec['name']!r} ({kind}) has no setting {name[:100]!r}{hint} It has "
            f"{', '.join([*known, *others])}"
        )


def _of_lifetimes_functions(spec: Mapping[str, Any]) -> list[str]:
    """Return the names of the settings of a lifetime's functions, such as ``score.day``."""
    lifetime = spec.get("lifetime") or {}
    found = []
    for part in ("score", "admission"):
        own = lifetime.get(part)
        function = own.get("function") if isinstance(own, dict) else None
        found += [f"{part}.{name}" for name in (function or {"settings": ()})["settings"]]
    return found


def _assign_lifetime(spec: dict[str, Any], name: str, value: Any) -> None:
    """Set one setting of a lifetime; a part of which nothing is set goes."""
    lifetime = spec.get("lifetime")
    if lifetime is None:
        raise TableConflict(
            f"table {spec['name']!r} has no lifetime, and its rows are made for none: {name} "
            "cannot be set; make a table of another name with a lifetime"
        )
    part, dot, leaf = name.partition(".")
    if not dot:
        lifetime[part] = value
        return
    settings = {**(lifetime.get(part) or {}), leaf: value}
    is_set = any(setting is not None for setting in settings.values())
    lifetime[part] = settings if is_set else None


def lifetime_settings(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return what may change of a description's lifetime, by name; None: it is not set."""
    lifetime = spec.get("lifetime") or {}
    values = {}
    for name in LIFETIME_SETTINGS:
        part, dot, leaf = name.partition(".")
        values[name] = (lifetime.get(part) or {}).get(leaf) if dot else lifetime.get(part)
    return values


def settings_changed(before_json: str, after_json: str) -> tuple[str, ...]:
    """Return what differs in two descriptions, "learning_rate: 0.1 -> 0.01" each."""
    before, after = json.loads(before_json), json.loads(after_json)
    old, new = settings_of(before), settings_of(after)
    lines = [
        f"{name}: {json.dumps(old.get(name))} -> {json.dumps(new[name])}"
        for name in new
        if old.get(name) != new[name]
    ]
    if before[NON_FINITE] != after[NON_FINITE]:
        was, is_now = (shown_policy(spec[NON_FINITE]) for spec in (before, after))
        lines.append(f"{NON_FINITE}: {was} -> {is_now}")
    was, is_now = compensation_of(before), compensation_of(after)
    if was != is_now:
        lines.append(f"{COMPENSATION}: {was} -> {is_now}")
    old, new = lifetime_settings(before), lifetime_settings(after)
    lines += [
        f"{name}: {json.dumps(old[name])} -> {json.dumps(new[name])}"
        for name in new
        if old[name] != new[name]
    ]
    held, wanted = (_function(spec.get("pull")) for spec in (before, after))
    if held[0] != wanted[0]:
        lines.append(f"pull: {held[0]} -> {wanted[0]}")
    elif held != wanted:
        lines.append("pull: another function")
    return tuple(lines)


def compensation_of(spec: Mapping[str, Any]) -> str:
    """Return what a description does about stale gradients, as ``tables set`` takes it."""
    value = spec.get(COMPENSATION, "ignore")
    return value if isinstance(value, str) else json.dumps(value)


def _function(pull: Mapping[str, Any] | None) -> tuple[str, object]:
    """Return name and expression of the function that a pull goes through."""
    return ("none", None) if pull is None else (pull["name"], pull["expression"])


def shown_policy(policy: Any) -> str:
    """Return a policy for bad gradients as ``pserverctl tables set`` takes it."""
    return policy if isinstance(policy, str) else f"clip:{json.dumps(policy['clip']['limit'])}"
