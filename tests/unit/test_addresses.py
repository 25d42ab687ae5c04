"""host:port, taken apart and judged."""

from __future__ import annotations

import pytest

from backstay.addresses import is_loopback, parse_endpoints, split_address
from backstay.errors import ConfigError


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:7000", ("127.0.0.1", 7000)),
        ("ps-0.example.com:0", ("ps-0.example.com", 0)),
        ("[::1]:65535", ("[::1]", 65535)),
    ],
)
def test_an_address_has_two_parts(address: str, parts: tuple[str, int]) -> None:
    assert split_address("listen", address) == parts


@pytest.mark.parametrize(
    "address",
    [
        *("", ":", "host", "host:", ":7000", "host:70x", "host:-1", "::1:7000", "[::g]:1", "[]:1"),
        *("host:65536", "a b:1", "-host:1", "host:٣", "http://host:1", "a" * 300 + ":1"),
    ],
)
def test_anything_else_is_refused_under_the_name_of_the_setting(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^listen: "):
        split_address("listen", address)


def test_a_name_other_than_localhost_may_be_anywhere() -> None:
    assert is_loopback("LOCALHOST")
    assert is_loopback("127.1.2.3")
    assert is_loopback("[::1]")
    for host in ("0.0.0.0", "[::]", "10.0.0.1", "localhost.example.com", "loopback"):
        assert not is_loopback(host)


def test_endpoints_are_split_at_commas() -> None:
    assert parse_endpoints("a:1, b:2,") == ("a:1", "b:2")
    for text in ("", " , ", "a:1,b"):
        with pytest.raises(ConfigError, match=r"^endpoint: "):
            parse_endpoints(text)
