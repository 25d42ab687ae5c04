"""The documentation names what exists, and all of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from backstay import errors

pytestmark = pytest.mark.gates

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def tree_of(error: type[BaseException], depth: int = 0) -> list[tuple[int, str]]:
    """The tree as the module defines it: (depth, name), parents first, in definition order."""
    rows = [(depth, error.__name__)]
    for child in error.__subclasses__():
        if child.__module__ == errors.__name__:
            rows += tree_of(child, depth + 1)
    return rows


def drawn_tree(text: str) -> list[tuple[int, str]]:
    """The tree as it is drawn with box characters."""
    drawing = re.search(r"^ *BackstayError\n(?: *[├│└].*\n)+", text, re.MULTILINE)
    assert drawing
    rows = []
    for line in drawing[0].splitlines():
        name = re.search(r"[A-Z]\w+", line)
        assert name
        rows.append((len(re.findall(r"│   |├── |└── ", line[: name.start()])), name[0]))
    return rows


def test_the_drawn_tree_is_the_real_one() -> None:
    assert sorted(drawn_tree(errors.__doc__ or "")) == sorted(tree_of(errors.BackstayError))


def test_the_index_of_decisions_lists_each_record() -> None:
    index = (DOCS / "adr" / "index.md").read_text(encoding="utf-8")
    for record in sorted((DOCS / "adr").glob("[0-9]*.md")):
        title = record.read_text(encoding="utf-8").splitlines()[0]
        number = int(record.name[:4])
        assert title.startswith(f"# {number}. "), f"{record.name} must begin with '# {number}. '"
        assert f"({record.name})" in index, f"docs/adr/index.md does not list {record.name}"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_of_the_top_level_pages_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert links
    for link in links:
        assert (ROOT / link).exists(), f"{page} links to {link}"


def test_the_map_of_the_internals_names_every_page() -> None:
    index = (DOCS / "internals" / "index.md").read_text(encoding="utf-8")
    for page in (DOCS / "internals").glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in index, page.name


PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "bench/*.md", "proto/*.md")
    for path in ROOT.glob(pattern)
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_figure_is_left_to_be_filled_in(page: Path) -> None:
    text = re.sub(r"```diff\n.*?\n```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert not re.findall(r"@[A-Z_]+@", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_labels_of_state_diagrams_have_nothing_that_ends_them(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for drawing in re.findall(r"```mermaid\nstateDiagram-v2\n(.*?)```", text, re.DOTALL):
        labels = [line.partition(":")[2] for line in drawing.splitlines()]
        assert [label for label in labels if set(label) & set(":;")] == []


FOLDERS = (
    "checkpoint",
    "consensus",
    "crates",
    "master",
    "pserver",
    "src",
    "tests",
    "tools",
    "trainer",
)
SOURCES = [
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".rs")
]


@pytest.mark.parametrize(
    "page",
    [ROOT / "CONTRIBUTING.md", *sorted((DOCS / "internals").glob("*.md"))],
    ids=lambda page: page.name,
)
def test_the_pages_for_developers_name_files_that_are_there(page: Path) -> None:
    named = re.findall(r"`([\w./-]+\.(?:py|rs))\b(?:::\w*)?", page.read_text(encoding="utf-8"))
    for name in set(named):
        assert any(f"/{source}".endswith(f"/{name}") for source in SOURCES), name


# The flags of ElasticDL's commands, as its last version had them.
FLAGS_OF_ELASTICDL = re.findall(
    r"\w+",
    """
    base_image extra_pypi_index cluster_spec local_pkg_dir image
    docker_base_url docker_tlscert docker_tlskey
    job_name image_name worker_image distribution_strategy num_workers num_ps_pods
    master_resource_request worker_resource_request ps_resource_request ps_resource_limit
    master_pod_priority worker_pod_priority ps_pod_priority volume image_pull_policy restart_policy
    namespace cluster_spec_json envs populate_env_names yaml aux_params log_level log_file_path
    force_use_kube_config_file relaunch_on_worker_failure task_fault_tolerance
    relaunch_timeout_worker need_tf_config job_command need_elasticdl_job_service need_task_manager
    need_pod_manager
    model_zoo model_def model_params training_data validation_data prediction_data
    data_reader_params num_epochs minibatch_size num_minibatches_per_task max_step evaluation_steps
    grads_to_wait sync_version_tolerance use_async lr_staleness_modulation get_model_steps
    checkpoint_steps checkpoint_dir keep_checkpoint_max checkpoint_dir_for_init output
    log_loss_steps
    """,
)


@pytest.mark.parametrize("flag", FLAGS_OF_ELASTICDL)
def test_the_table_for_users_of_elasticdl_has_each_flag(flag: str) -> None:
    page = (DOCS / "guide" / "from-elasticdl.md").read_text(encoding="utf-8")
    left = re.findall(r"^\|(.*?)\|", page, re.MULTILINE)
    assert any(re.search(rf"--{flag}\b", cell) for cell in left), flag
