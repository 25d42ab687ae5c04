"""deploy/systemd and the compose files: their settings are settings, their promises fit."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from backstay._version import __version__
from backstay.config import ServerConfig

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SYSTEMD = DEPLOY / "systemd"
COMPOSE = ("compose.yaml", "compose.machine.yaml")
GIVEN = {
    "BACKSTAY_TOKEN": "of-the-operator",
    "NUMBER": "0",
    "ADDRESS": "10.0.0.1",
    "ADDRESS_0": "10.0.0.1",
    "ADDRESS_1": "10.0.0.2",
    "ADDRESS_2": "10.0.0.3",
}
# As systemd-analyze counts: 10 is no protection at all.
EXPOSURE_MAX = 20


def lines_of(unit: str) -> dict[str, dict[str, list[str]]]:
    """A unit by section and key; a key may stand more than once."""
    found: dict[str, dict[str, list[str]]] = {}
    for line in (SYSTEMD / unit).read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = found.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            section.setdefault(key, []).append(value)
    return found


def variables_of(name: str) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string("[all]\n" + (SYSTEMD / name).read_text(encoding="utf-8"))
    return dict(parser["all"])


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


def compose_of(name: str) -> dict[str, Any]:
    """A compose file with the operator's variables put in."""

    def value(match: re.Match[str]) -> str:
        return GIVEN[match[1]]

    text = (DEPLOY / name).read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    return dict(yaml.safe_load(re.sub(r"\$\{(\w+):\?[^}]*\}", value, text)))


def test_the_environment_file_has_settings_of_a_pserver(
    recwarn: pytest.WarningsRecorder,
) -> None:
    config = ServerConfig.load(environment=variables_of("pserver.env"))
    assert not recwarn.list
    assert config.store == "etcd"
    assert config.initial_nodes == len(config.store_endpoints) == 3
    assert config.replicas == 2
    assert config.metrics == "127.0.0.1:9464"


def test_the_members_of_etcd_are_the_endpoints_of_the_store() -> None:
    variables = variables_of("etcd.env")
    members = dict(one.split("=") for one in variables["ETCD_INITIAL_CLUSTER"].split(","))
    hosts = [url.removeprefix("http://").partition(":")[0] for url in members.values()]
    endpoints = variables_of("pserver.env")["BACKSTAY_STORE_ENDPOINTS"].split(",")
    assert [f"{host}:2379" for host in hosts] == endpoints
    assert members[variables["ETCD_NAME"]] == variables["ETCD_INITIAL_ADVERTISE_PEER_URLS"]


def test_the_unit_gives_a_stop_its_time_and_a_released_node_its_rest() -> None:
    service = lines_of("pserver@.service")["Service"]
    (stop,) = service["ExecStop"]
    (wait_s,) = re.findall(r"slots --wait (\d+)$", stop)
    # stop_grace_ms, twice: to hand over, and for the requests under way.
    graces_s = 2 * ServerConfig.load(environment={}).stop_grace_ms / 1000
    assert seconds(service["TimeoutStopSec"][0]) >= int(wait_s) + graces_s
    assert service["Restart"] == ["on-failure"]
    assert service["ExecStart"][0].endswith("/bin/pserver serve --node-id %i")
    assert service["User"] == ["backstay"]
    users = (SYSTEMD / "backstay.sysusers").read_text(encoding="utf-8")
    assert re.search(r"^u backstay ", users, re.MULTILINE)


def test_systemd_takes_the_units_and_finds_little_exposed(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed (Debian: apt-get install systemd)")
    program = tmp_path / "bin" / "pserver"
    program.parent.mkdir()
    for name in ("pserver", "pserverctl"):
        (program.parent / name).write_text("#!/bin/sh\n", encoding="utf-8")
        (program.parent / name).chmod(0o755)
    text = (SYSTEMD / "pserver@.service").read_text(encoding="utf-8")
    unit = tmp_path / "pserver@ps-0.service"
    unit.write_text(text.replace("/opt/backstay/bin", str(program.parent)), encoding="utf-8")
    shutil.copy(SYSTEMD / "backstay.target", tmp_path)
    done = subprocess.run(
        [analyze, "verify", "--man=no", unit, tmp_path / "backstay.target"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run(
        [analyze, "security", "--offline=true", f"--threshold={EXPOSURE_MAX}", unit],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-500:]
    unit.write_text(text.replace("ProtectSystem=strict", "ProtectSistem=strict"), encoding="utf-8")
    done = subprocess.run(
        [analyze, "verify", "--man=no", unit], capture_output=True, text=True, check=False
    )
    assert "ProtectSistem" in done.stderr


@pytest.mark.parametrize("name", COMPOSE)
def test_the_services_of_a_compose_file_follow_the_rules(
    name: str, recwarn: pytest.WarningsRecorder
) -> None:
    services = compose_of(name)["services"]
    pservers = [one for one in services.values() if one["image"] == f"backstay:{__version__}"]
    assert len(pservers) == (3 if name == "compose.yaml" else 1)
    for one in services.values():
        assert one["image"].endswith(f":{__version__}")
        assert (one["user"], one["read_only"]) == ("10001:10001", True)
        assert one["cap_drop"] == ["ALL"]
        assert one["security_opt"] == ["no-new-privileges:true"]
        assert "mem_limit" in one
    configs = [ServerConfig.load(environment=one["environment"]) for one in pservers]
    assert not recwarn.list
    assert len({config.node_id for config in configs}) == len(pservers)
    for config, one in zip(configs, pservers, strict=True):
        assert config.initial_nodes == 3
        # Exit code 0 means stopped, or released by a resize.
        assert one["restart"] == "on-failure"
        assert seconds(one["stop_grace_period"]) > 2 * config.stop_grace_ms / 1000
        assert config.advertise_host is not None
    endpoints = configs[0].store_endpoints
    members = services["etcd"]["environment"].get("ETCD_INITIAL_CLUSTER", "etcd-0=http://etcd:2380")
    hosts = [one.partition("//")[2].partition(":")[0] for one in members.split(",")]
    assert list(endpoints) == [f"{host}:2379" for host in hosts]


def checker(folder: Path) -> Callable[[str], str]:
    """Return what checks the text of a compose file by docker's schema, and returns its errors."""
    file = folder / "compose.yaml"
    docker = shutil.which("docker") or "docker"
    program, is_old = [docker, "compose"], False
    try:
        subprocess.run([*program, "version"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        # Debian's package of this name; its schema is older than `name`.
        old = shutil.which("docker-compose")
        if old is None:
            pytest.skip("neither docker compose nor docker-compose is there to check the schema")
        program, is_old = [old], True

    def errors_of(text: str) -> str:
        file.write_text(re.sub(r"(?m)^name: .*\n", "", text) if is_old else text, encoding="utf-8")
        done = subprocess.run(
            [*program, "-f", file, "config", "--quiet"],
            env=GIVEN | {"PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            check=False,
        )
        assert bool(done.returncode) == bool(done.stderr), done.stderr
        return done.stderr

    return errors_of


@pytest.mark.parametrize("name", COMPOSE)
def test_docker_takes_a_compose_file(name: str, tmp_path: Path) -> None:
    errors_of, text = checker(tmp_path), (DEPLOY / name).read_text(encoding="utf-8")
    assert errors_of(text) == ""
    # It would not take any file.
    assert "read_onli" in errors_of(text.replace("read_only:", "read_onli:"))
