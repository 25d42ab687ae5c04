"""Settings: what is refused, which source wins, what is never shown."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

import backstay
from backstay.config import (
    ClientConfig,
    FoundEndpoints,
    SecurityConfig,
    ServerConfig,
    find_endpoints,
    required_endpoints,
)
from backstay.errors import ConfigError
from backstay.store_config import StoreMember, parse_members

TOKEN = "a-secret-of-many-characters"
SETTINGS = {
    f"BACKSTAY_{item.name.upper()}"
    for kind in (ServerConfig, ClientConfig)
    for item in dataclasses.fields(kind)
}
THREE = "ps-0=127.0.0.1:1,ps-1=127.0.0.1:2,ps-2=127.0.0.1:3"
ETCD = {"store": "etcd", "store_endpoints": ("h:2379",)}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"slot_count": 1000}, "slot_count: 1000 is not a power of two"),
        ({"slot_count": 131072}, "slot_count: 131072 is out of range; allowed is 1 to 65536"),
        ({"slot_count": "1024"}, "slot_count: '1024' is not an integer"),
        ({"slot_count": True}, "slot_count: True is not an integer"),
        ({"insecure": 1}, "insecure: 1 is not true or false"),
        ({"memory_limit_bytes": -1}, "memory_limit_bytes: -1 is out of range; allowed is at least"),
        ({"node_id": "ps 0"}, "node_id: 'ps 0' is not a name"),
        (
            {"memory_limit_bytes": 134_217_727},
            "memory_limit_bytes: 134217727 leaves no room for rows beside the process itself; "
            "allowed is at least 134217728, or 0 for no limit",
        ),
        ({"stream_grace_s": 60}, "stream_grace_s: 60 is out of range; allowed is 3600 to 31536000"),
        ({"cluster": ""}, "cluster: '' is not a name"),
        ({"listen_control": "7000"}, "listen_control: '7000' is not of the form host:port"),
        ({"listen_data": "127.0.0.1:99999"}, "listen_data: port 99999"),
        ({"advertise_host": "a b"}, "advertise_host: 'a b:0'"),
        ({"log_level": "loud"}, "log_level: 'loud' is not one of debug, info, warning, error"),
        ({"token": "short"}, "token: must be 8 to 1024"),
        ({"tls_cert_file": "c.pem"}, "give both or neither"),
        ({"tls_require_client_cert": True}, "tls_require_client_cert: needs tls_ca_file"),
        ({"log_format": "xml"}, "log_format: 'xml' is not one of text, json"),
        ({"host": "a b"}, "host: 'a b:0'"),
        ({"replicas": 4}, "replicas: 4 is out of range; allowed is 1 to 3"),
        ({"initial_nodes": 3, "slot_count": 2}, "initial_nodes: 3 nodes, but only 2 slots"),
        ({"read_lease_ms": 1001}, "read_lease_ms: 1001 is more than a third of lease_ttl_ms, 3000"),
        ({"store": "zookeeper"}, "store: 'zookeeper' is not one of embedded, etcd"),
        ({"store": "etcd"}, "store_endpoints: must name etcd's addresses"),
        ({"store_endpoints": ("h",)}, "store_endpoints: 'h' is not of the form host:port"),
        ({"store_endpoints": "h:1"}, "store_endpoints: 'h:1' is not a list of host:port"),
        (ETCD | {"store_members": parse_members(THREE)}, "store_members: is for the embedded"),
        (ETCD | {"store_data_dir": "d"}, "store_data_dir: is for the embedded store"),
        (ETCD | {"store_username": "u"}, "store_username: needs store_password"),
        (ETCD | {"store_tls_cert_file": "c.pem"}, "store_tls_cert_file: needs store_tls_key_file"),
        (
            ETCD | {"store_tls_cert_file": "c.pem", "store_tls_key_file": "k.pem"},
            "store_tls_cert_file: needs store_tls_ca_file, which turns TLS on",
        ),
        ({"store_tls_ca_file": "c.pem"}, "store_tls_ca_file: is for etcd, but store is embedded"),
        (
            {"store_members": parse_members(THREE), "node_id": "ps-9"},
            "store_members: this node, 'ps-9', is not in the list",
        ),
        (
            {"store_members": parse_members("ps-0=h:1,ps-0=h:2,ps-1=h:3")},
            "store_members: node id 'ps-0' is in the list twice",
        ),
        (
            {"store_members": parse_members("ps-0=h:1,ps-1=h:1,ps-2=h:3")},
            "store_members: address 'h:1' is in the list twice",
        ),
        (
            {"store_members": parse_members("ps-0=127.0.0.1:1,ps-1=127.0.0.1:2")},
            "store_members: 2 members; there may be 1, 3 or 5",
        ),
        ({"store_members": parse_members("ps-0=h:0")}, "'ps-0=h:0' needs a port other than 0"),
        ({"store_members": parse_members("ps-0=h:1")}, "store_secret: must be set, because"),
        (
            {"initial_nodes": 3, "tls_cert_file": "c.pem", "tls_key_file": "k.pem"},
            "tls_ca_file: must be set so that this node can trust the others",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ServerConfig(**values)
    assert says in str(refused.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.8.9.10"])
def test_loopback_needs_neither_token_nor_tls(host: str) -> None:
    config = ServerConfig(listen_control=f"{host}:0", listen_data=f"{host}:0")
    assert (config.token, config.tls_cert_file) == (None, None)


@pytest.mark.parametrize("name", ["listen_control", "listen_data"])
@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.1.2.3", "ps-0.example"])
def test_listening_elsewhere_is_refused_unless_guarded(name: str, host: str) -> None:
    values: dict[str, Any] = {name: f"{host}:7000", "advertise_host": "ps-0.example"}
    with pytest.raises(ConfigError, match=rf"^{name}: .*Set token .*--insecure"):
        ServerConfig(**values)
    ServerConfig(**values, insecure=True)
    ServerConfig(**values, token=TOKEN)
    ServerConfig(**values, tls_cert_file="c.pem", tls_key_file="k.pem")


def test_a_wildcard_address_needs_a_host_to_be_reached_under() -> None:
    with pytest.raises(ConfigError, match="advertise_host: must be set"):
        ServerConfig(listen_data="0.0.0.0:7100", token=TOKEN)
    reachable = ServerConfig(
        listen_control="0.0.0.0:7001",
        listen_data="0.0.0.0:7100",
        token=TOKEN,
        advertise_host="ps-1.example",
    )
    assert reachable.control_host == "ps-1.example"
    assert reachable.data_host == "ps-1.example"


def test_members_keep_the_order_of_the_list() -> None:
    assert parse_members("b=h:1, a=h:2,") == (StoreMember("b", "h:1"), StoreMember("a", "h:2"))
    with pytest.raises(ConfigError, match="'h:1' is not of the form node-id=host:port"):
        parse_members("h:1")


def test_who_keeps_the_embedded_store() -> None:
    alone = ServerConfig()
    assert (alone.is_store_member("ps-0"), alone.keeps_store_alone("ps-0")) == (True, True)
    member = ServerConfig(store_members=parse_members(THREE))
    assert (member.is_store_member("ps-0"), member.keeps_store_alone("ps-0")) == (True, False)
    other = ServerConfig(node_id="ps-3", store_endpoints=("127.0.0.1:7000",))
    assert not other.is_store_member("ps-3")
    assert not ServerConfig(**ETCD).is_store_member("ps-0")  # type: ignore[arg-type]


def test_two_copies_unless_there_is_one_node() -> None:
    assert ServerConfig().replicas_wanted == 1
    assert ServerConfig(initial_nodes=2).replicas_wanted == 2
    assert ServerConfig(initial_nodes=2, replicas=3).replicas_wanted == 3
    assert ServerConfig.load(environment={"BACKSTAY_REPLICAS": "2"}).replicas_wanted == 2


def test_the_token_is_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "backstay.toml"
    file.write_text(f'[client]\ntoken = "{TOKEN}"\n')
    loaded = ClientConfig.load_with_sources(file=file, environment={})
    assert loaded.config.token == TOKEN
    for shown in (repr(loaded), repr(loaded.config.security), loaded.describe()):
        assert TOKEN not in shown
    assert f"token = (not shown)  [file {file}]" in loaded.describe()
    with pytest.raises(ConfigError) as refused:
        ClientConfig(token="pass word")
    assert "pass word" not in str(refused.value)


def test_argument_wins_over_file_over_environment_over_default(tmp_path: Path) -> None:
    file = tmp_path / "backstay.toml"
    file.write_text("[server]\nslot_count = 64\nio_threads = 3\n[client]\ndeadline_ms = 7\n")
    environment = {
        "BACKSTAY_SLOT_COUNT": "32",
        "BACKSTAY_IO_THREADS": "4",
        "BACKSTAY_INSECURE": "yes",
        "BACKSTAY_STORE_MEMBERS": "ps-0=127.0.0.1:1",
        "BACKSTAY_LOG_LEVEL": "",
        "BACKSTAY_OF_ANOTHER_PROGRAM": "x",
    }
    loaded = ServerConfig.load_with_sources(
        file=file, environment=environment, explicit={"slot_count": 128, "node_id": None}
    )
    config = loaded.config
    assert (config.slot_count, config.io_threads, config.insecure) == (128, 3, True)
    assert config.store_members == (StoreMember("ps-0", "127.0.0.1:1"),)
    assert config.log_level == "info"
    assert loaded.sources["slot_count"] == "argument"
    assert loaded.sources["io_threads"] == f"file {file}"
    assert loaded.sources["insecure"] == "environment BACKSTAY_INSECURE"
    assert loaded.sources["log_level"] == loaded.sources["node_id"] == "default"
    assert loaded.sources.keys() == {item.name for item in dataclasses.fields(ServerConfig)}


def test_the_environment_can_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "backstay.toml"
    file.write_text('[server]\nstore_endpoints = ["h:1", "h:2"]\n')
    config = ServerConfig.load(environment={"BACKSTAY_CONFIG": str(file)})
    assert config.store_endpoints == ("h:1", "h:2")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("slot_count = 8", "unknown section 'slot_count'"),
        ("[servers]\nslot_count = 8", "unknown section 'servers'"),
        ("[server]\nslots = 8", "unknown key 'slots' in [server]"),
        ("[client]\nnode_id = 'x'", "unknown key 'node_id' in [client]"),
        ("[server", "is not TOML"),
        ("[server]\nslot_count = '8'", "slot_count: '8' is not an integer (from file"),
        ("[server]\nslot_count = 8.0", "slot_count: 8.0 is not an integer (from file"),
        ("[server]\nstore_members = 8", "store_members"),
        ("[server]\nstore_members = ['x']", "'x' is not of the form node-id=host:port (from file"),
        ("[server]\nslot_cuont = 8", "unknown key 'slot_cuont' in [server]; did you mean 'slot_c"),
    ],
)
def test_a_wrong_file_is_refused_whole(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "backstay.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        ServerConfig.load(file=file, environment={})
    assert says in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml': No such file"):
        ServerConfig.load(file=tmp_path / "nowhere.toml", environment={})


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("BACKSTAY_IO_THREADS", "two", "io_threads: 'two' is not an integer"),
        ("BACKSTAY_IO_THREADS", "0", "(from environment BACKSTAY_IO_THREADS)"),
        ("BACKSTAY_INSECURE", "maybe", "'maybe' is not true or false (from environment BACKST"),
        ("BACKSTAY_SLOT_COUNT", "x", "not an integer (from environment BACKSTAY_SLOT_COUNT)"),
        ("BACKSTAY_STORE_MEMBERS", "x", "form node-id=host:port (from environment BACKSTAY_STORE"),
        ("BACKSTAY_TLS_KEY_FILE", "k", "both or neither (from environment BACKSTAY_TLS_KEY_FILE)"),
    ],
)
def test_a_wrong_environment_value_is_refused(variable: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ServerConfig.load(environment={variable: value})
    assert says in str(refused.value)


@pytest.mark.parametrize("kind", [ServerConfig, ClientConfig])
def test_an_unknown_argument_is_refused(kind: type[SecurityConfig]) -> None:
    with pytest.raises(ConfigError, match="tokn: no such setting; did you mean 'token'") as refused:
        kind.load(environment={}, explicit={"tokn": 8})
    assert "file_section" not in str(refused.value)


def test_an_explicit_text_is_converted_whatever_the_file_says(tmp_path: Path) -> None:
    file = tmp_path / "backstay.toml"
    file.write_text("[server]\nslot_count = 8\n")
    for path in (file, None):
        config = ServerConfig.load(file=path, environment={}, explicit={"slot_count": "64"})
        assert config.slot_count == 64


def test_a_misspelt_variable_is_told_with_the_nearest_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    environment = {
        "BACKSTAY_SLOT_CUONT": "8",
        "BACKSTAY_ENDPOINT": "h:1",
        "BACKSTAY_DEADLINE_MS": "7",
        "OTHER": "x",
    }
    assert ServerConfig.load(environment=environment).slot_count == 1024
    assert [record.getMessage() for record in caplog.records] == [
        "environment variable BACKSTAY_SLOT_CUONT is no setting of a server or client; "
        "did you mean 'BACKSTAY_SLOT_COUNT'?"
    ]


def test_what_our_programs_tell_each_other_is_no_misspelt_setting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    package = Path(backstay.__file__).parent
    folders = (package, *(package / one for one in ("master", "pserver", "trainer")))
    texts = [path.read_text() for folder in folders for path in folder.rglob("*.py")]
    named = set(re.findall(r'"(BACKSTAY_[A-Z_]+)"', " ".join(texts)))
    assert {"BACKSTAY_LAST_WORDS", "BACKSTAY_JOB", "BACKSTAY_RUN"} <= named
    ServerConfig.load(environment=dict.fromkeys(named - SETTINGS, "x"))
    assert caplog.records == []


def test_certificate_files_are_checked_when_they_are_read(tmp_path: Path) -> None:
    no_pem = tmp_path / "ca.pem"
    no_pem.write_text("hello")
    with pytest.raises(ConfigError, match=r"tls_ca_file: .* is not a PEM file"):
        SecurityConfig(tls_ca_file=str(no_pem)).read_pems()
    with pytest.raises(ConfigError, match=r"tls_ca_file: cannot read .*No such file"):
        SecurityConfig(tls_ca_file=str(tmp_path / "none.pem")).read_pems()
    assert SecurityConfig().read_pems().cert is None


def test_endpoints_are_those_of_the_argument_then_the_file_then_the_environment() -> None:
    named = {"BACKSTAY_ENDPOINT": "own:1, own:2", "PADDLE_PSERVERS_IP_PORT_LIST": "paddle:1"}
    file = ("file:1",)
    assert find_endpoints(named, "a:1, b:2", file=file) == FoundEndpoints(("a:1", "b:2"))
    assert find_endpoints(named, ["a:1"], file=file) == FoundEndpoints(("a:1",))
    # What was given counts even if it is empty: the caller refuses it.
    assert find_endpoints(named, [], file=file) == FoundEndpoints(())
    assert find_endpoints(named, file=file) == FoundEndpoints(file)
    own = FoundEndpoints(("own:1", "own:2"), "BACKSTAY_ENDPOINT")
    paddle = FoundEndpoints(("paddle:1",), "PADDLE_PSERVERS_IP_PORT_LIST")
    assert find_endpoints(named) == own
    assert find_endpoints(named | {"BACKSTAY_ENDPOINT": ""}) == paddle
    assert find_endpoints(named, variables=tuple(reversed(tuple(named)))) == paddle
    assert find_endpoints({}) is None
    assert required_endpoints(named, "a:1") == ("a:1",)
    with pytest.raises(ConfigError, match="endpoint: give --endpoint HOST:PORT"):
        required_endpoints(named, "")
    with pytest.raises(ConfigError, match="endpoint: give --endpoint HOST:PORT or set BACKSTAY_"):
        required_endpoints({}, None)
