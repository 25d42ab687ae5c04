"""The pages of the reference ask for each setting, field, error and metric that there is."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import jinja2
import pytest

from backstay import errors
from backstay.config import ClientConfig, SecurityConfig, ServerConfig
from backstay.consensus.records.settings import ClusterSettings
from backstay.job_spec import ExportsSpec, JobSpec
from backstay.kubernetes.spec import KubernetesSpec
from backstay.settings import nested_kind
from tools import reference

pytestmark = pytest.mark.gates

PAGES = Path(__file__).resolve().parents[2] / "docs" / "reference"


class Functions:
    """Collects the functions that the pages call, as MkDocs does."""

    def __init__(self) -> None:
        self.by_name: dict[str, Any] = {}
        reference.define_env(self)

    def macro(self, function: Any) -> None:
        self.by_name[function.__name__] = function


def rows_of(page: str) -> list[list[str]]:
    """The cells of all rows of a page's tables, rendered."""
    text = (PAGES / page).read_text(encoding="utf-8")
    assert text.startswith("---\nrender_macros: true\n---\n")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)
    rendered = environment.from_string(text).render(Functions().by_name)
    lines = [line for line in rendered.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def names_of(page: str) -> list[str]:
    return [row[0].strip("`* ") for row in rows_of(page)]


def test_every_setting_has_one_row_in_its_order() -> None:
    shared = [item.name for item in fields(SecurityConfig)]
    expected = list(shared)
    for kind in (ServerConfig, ClientConfig, ClusterSettings):
        expected += [item.name for item in fields(kind) if item.name not in shared]
    assert names_of("configuration.md") == expected


def test_every_field_of_the_job_file_has_a_row() -> None:
    names = names_of("job-file.md")
    assert len(names) == len(set(names))
    assert {item.name for item in fields(JobSpec)} <= set(names)
    for kind in (JobSpec, KubernetesSpec, ExportsSpec):
        for item in fields(kind):
            nested = nested_kind(kind, item.name)
            if nested is not None:
                ends = {f".{below.name}" for below in fields(nested)}
                assert all(any(name.endswith(end) for name in names) for end in ends), nested


def test_a_row_says_what_the_declaration_says() -> None:
    row = next(row for row in rows_of("job-file.md") if row[0] == "`workers.max`")
    assert row[1:3] == ["`10000`", "1 to 10000"]
    fixed = {row[0] for row in rows_of("job-file.md") if row[0].endswith(" *")}
    assert "`seed` *" in fixed
    assert "`epochs` *" not in fixed
    assert "`epochs`" in {row[0] for row in rows_of("job-file.md")}


def test_every_error_has_one_row_with_its_retry_rule() -> None:
    rows = {row[0].strip("`"): row for row in rows_of("errors.md") if len(row) == 3}
    expected = set(errors.__all__) - {"BackstayError"}
    assert expected <= set(rows)
    assert rows["OutcomeUnknown"][1] == "no"
    assert rows["ServerUnavailable"][1] == "yes"
    assert "`ServerUnavailable`" in rows["NeverReached"][2]
    assert "`LookupError`" in rows["UnknownTable"][2]


def test_all_of_the_errors_are_exported() -> None:
    defined = {
        name
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, errors.BackstayError)
    }
    assert defined == set(errors.__all__)


@pytest.mark.parametrize(
    ("page", "groups", "prefix"),
    [
        ("metrics.md", reference.node_groups, "backstay_"),
        ("job-metrics.md", reference.job_groups, "backstay_job_"),
    ],
)
def test_every_metric_has_one_row(page: str, groups: Any, prefix: str) -> None:
    names = [name for name in names_of(page) if name.startswith(prefix)]
    made = [family.name for some in groups().values() for family in some]
    assert len(names) == len(made)
    assert len(names) == len(set(names))
    for name in made:
        assert any(re.fullmatch(rf"{name}(_total|_info)?", row) for row in names), name


def test_a_page_that_asks_for_nothing_there_is_refused() -> None:
    with pytest.raises(ValueError, match="no rows"):
        reference.node_metrics()
