"""The examples of docs/reference/job-file.md are jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from backstay.job_spec import JobSpec

pytestmark = pytest.mark.gates

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "job-file.md"


def test_the_examples_of_the_page_are_jobs() -> None:
    examples = PAGE.read_text(encoding="utf-8").split("```yaml\n")[1:]
    assert examples
    for example in examples:
        JobSpec.from_mapping(yaml.safe_load(example.partition("```")[0]))
