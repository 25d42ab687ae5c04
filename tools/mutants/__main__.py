"""Plant faults, one after the other, and say which of them the tests notice.

A suite that gets smaller must not notice less; this is how it is measured. Each fault is planted
in a copy of the project in the system's temporary folder, never in the working tree. A fault is
``caught`` if one of its tests fails, or hangs; that test must pass without the fault. Else it is
``missed``. One whose text is not in the code any more is ``stale``: whoever changed the code
brings the list up to date.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tools.mutants.faults import chosen, read_faults, why_stale
from tools.mutants.trial import LIMIT_S, Result, Trials, copy_project

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Run the command; the exit code is 1 unless each fault is caught."""
    options = _options()
    known = read_faults()
    faults = chosen(known, options.only, options.share, options.seed)
    if options.list:
        for fault in faults:
            print(f"{fault.area}: {fault.name} ({fault.file})\n    breaks: {fault.breaks}")
        return 0
    root = options.root.resolve()
    name = f"backstay-mutants-{zlib.crc32(str(root).encode()):08x}"
    copy = options.copy or Path(tempfile.gettempdir()) / name
    target = Path(os.environ.get("CARGO_TARGET_DIR", root / "target"))
    # Of all faults, for it takes no time.
    results = [Result(fault, "stale", why) for fault in known if (why := why_stale(fault, root))]
    for result in results:
        _show(result, "-")
    begun_s = time.monotonic()
    copy_project(root, copy)
    try:
        trials = Trials(copy, target, options.limit)
        for number, fault in enumerate(faults, 1):
            if time.monotonic() - begun_s > 60 * options.minutes:
                print(
                    f"{len(faults) - number + 1} are left out: {options.minutes:g} minutes are over"
                )
                break
            if not why_stale(fault, root):
                results.append(trials.of(fault))
                _show(results[-1], f"{number}/{len(faults)}")
        confirmed = trials.confirmed(results)
    finally:
        shutil.rmtree(copy, ignore_errors=True)
    for before, after in zip(results, confirmed, strict=True):
        if before != after:
            _show(after, "after all:")
    _summarize(confirmed)
    return int(any(result.verdict != "caught" for result in confirmed))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("--list", action="store_true", help="show the faults, and plant none")
    parser.add_argument("--only", default="", help="those with these words in area, name or file")
    parser.add_argument("--share", type=float, default=1.0, help="0.1 plants every tenth")
    parser.add_argument("--seed", default="", help="which ones --share chooses: any text")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for the tests of one")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no fault after so many")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout of the project")
    parser.add_argument("--copy", type=Path, help="the folder of the copy; it is removed")
    return parser.parse_args()


def _show(result: Result, place: str) -> None:
    fault, what = result.fault, result.noticed or result.detail
    print(
        f"{place} {result.verdict.upper():6} {result.seconds:4.0f} s  {fault.area}: {fault.name}"
        + (f"  [{what}]" if what else ""),
        flush=True,
    )
    if result.verdict == "missed":
        print(f"    breaks: {fault.breaks}\n    in {fault.file}", flush=True)


def _summarize(results: Iterable[Result]) -> None:
    of_area: dict[str, Counter[str]] = {}
    for result in results:
        of_area.setdefault(result.fault.area, Counter())[result.verdict] += 1
    for area, counts in sorted(of_area.items()):
        print(f"{area:16} " + ", ".join(f"{counts[word]} {word}" for word in sorted(counts)))
    total = sum(of_area.values(), Counter[str]())
    print(f"MUTANTS {total['caught']} of {sum(total.values())} caught")


if __name__ == "__main__":
    raise SystemExit(main())
