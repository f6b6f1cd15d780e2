"""The option schema: read off a factory, checked before anything is opened."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_sdk.backend import Bounds, ConfigError, OptionInfo, parse_options
from kvstore_sdk.backend.options import options_of


def open_store(
    location: str,
    *,
    bucket: str,
    threads: Annotated[int, Bounds(ge=1, le=1024), "calls at the same time"] = 4,
    part_bytes: Annotated[int, Bounds(ge=4096)] = 1 << 20,
    rate_bytes_per_s: float = 1e6,
    calls_per_s: float = 100.0,
    connect_timeout_s: float = 3.0,
    ratio: float = 0.5,
    verify: bool = True,
    mode: Literal["auto", "never"] = "auto",
    level: Literal[1, 2] = 1,
    limit_bytes: int | None = None,
    secret_key: str = "",
) -> None: ...


SCHEMA = options_of(open_store)


def parse(**given: object) -> dict[str, Any]:
    return parse_options("backend acme", SCHEMA, {"bucket": "b"} | given)


def problem(**given: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse(**given)
    assert caught.value.where == "backend acme"
    return caught.value


@pytest.mark.parametrize("value", [10**5000, -(10**5000), 10**400, math.inf, -math.inf, math.nan], ids=itertools.count())
def test_a_number_beyond_all_measure_is_refused_by_name(value: float) -> None:
    """Python neither writes nor converts each of them."""
    for name in ("threads", "connect_timeout_s", "mode"):
        assert problem(**{name: value}).field == name


def test_the_signature_is_the_schema() -> None:
    assert list(SCHEMA)[:3] == ["bucket", "threads", "part_bytes"]
    assert "location" not in SCHEMA
    assert SCHEMA["bucket"].required
    threads = SCHEMA["threads"]
    assert (threads.type, threads.default, threads.bounds, threads.help) == (int, 4, Bounds(1, 1024), "calls at the same time")
    assert [SCHEMA[name].unit for name in ("part_bytes", "rate_bytes_per_s", "connect_timeout_s", "calls_per_s", "ratio")] == [
        "bytes",
        "bytes per second",
        "seconds",
        "",
        "",
    ]


class Shop:
    def __init__(self, location: str, *, shelves: Annotated[int, Bounds(ge=1)] = 3) -> None: ...


class Desk:
    def __call__(self, location: str, *, shelves: Annotated[int, Bounds(ge=1)] = 3) -> None: ...


def decorated(location: str, *, shelves: Annotated[int, Bounds(ge=1)] = 3) -> None: ...


@functools.wraps(decorated)
def wrapper(*args: Any, **kwargs: Any) -> None: ...


FACTORIES = {
    "class": Shop,
    "object": Desk(),
    "method": Desk().__call__,
    "function": decorated,
    "wrapped": wrapper,
    "partial": functools.partial(decorated),
}


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES.keys())
def test_any_kind_of_callable_is_a_factory(factory: Any) -> None:
    """A class, an object, a decorated function: whatever can be called has a signature, also with annotations kept as strings."""
    assert options_of(factory)["shelves"].bounds == Bounds(1)
    with pytest.raises(ConfigError, match="shelves"):
        parse_options("backend shop", options_of(factory), {"shelves": "0"})


def test_a_parameter_without_a_type_is_a_string() -> None:
    def factory(location, *, colour="red"):  # type: ignore[no-untyped-def]
        ...

    assert parse_options("backend x", options_of(factory), {"colour": "blue"}) == {"colour": "blue"}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("threads", "8", 8),
        ("threads", "1e2", 100),
        ("threads", 8.0, 8),
        ("part_bytes", "4096", 4096),
        ("part_bytes", "4KiB", 4096),
        ("part_bytes", "2 MB", 2_000_000),
        ("part_bytes", "1.5GiB", 3 << 29),
        ("part_bytes", "9007199254740993", 9007199254740993),
        ("part_bytes", "8796093022209TiB", 8796093022209 << 40),
        ("rate_bytes_per_s", "50MB", 50e6),
        ("connect_timeout_s", "500ms", 0.5),
        ("connect_timeout_s", "2.5", 2.5),
        ("connect_timeout_s", "2min", 120.0),
        ("connect_timeout_s", 3, 3.0),
        ("ratio", "0.25", 0.25),
        ("verify", "no", False),
        ("verify", "True", True),
        ("mode", "never", "never"),
        ("level", "1", 1),
        ("level", 2, 2),
        ("limit_bytes", None, None),
        ("limit_bytes", "1KiB", 1024),
    ],
)
def test_values_and_their_text_forms(name: str, text: object, value: object) -> None:
    parsed = parse(**{name: text})
    assert parsed[name] == value
    assert type(parsed[name]) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("threads", "0", "from 1 to 1024"),
        ("threads", "1.5", "a whole number"),
        ("threads", True, "a whole number"),
        ("threads", "inf", "a whole number"),
        ("threads", "9" * 5000, "a whole number"),
        ("threads", "", "a whole number"),
        ("part_bytes", "-1", "such as 4GiB"),
        ("part_bytes", "4G", "such as 4GiB"),
        ("part_bytes", "1" + "0" * 400 + ".5", "such as 4GiB"),
        ("part_bytes", "1KiB", "4096 or more"),
        ("connect_timeout_s", "5 weeks", "500ms"),
        ("connect_timeout_s", "nan", "500ms"),
        ("ratio", "inf", "a number"),
        ("ratio", 10**400, "a number"),
        ("ratio", None, "a number"),
        ("verify", "maybe", "true or false"),
        ("verify", 1, "true or false"),
        ("mode", "always", "one of auto, never"),
        ("level", True, "one of 1, 2"),
        ("level", "3", "one of 1, 2"),
        ("bucket", 5, "a string"),
        ("bucket", ["b"], "a string"),
        ("limit_bytes", "none", "a number of bytes"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_right(name: str, text: object, says: str) -> None:
    error = problem(**{name: text})
    assert error.field == name
    assert says in str(error)
    assert len(str(error)) < 300


def test_an_unknown_option_is_refused_by_name_and_the_known_are_listed() -> None:
    """CFG-08: a misspelt option must not be ignored."""
    error = problem(thread=8)
    assert error.field == "thread"
    assert "threads" in error.problem
    with pytest.raises(ConfigError, match="it takes no options"):
        parse_options("backend x", {}, {"thread": 8})


@pytest.mark.parametrize("name", ["codec", "compression", "encryption", "encryption_key"])
def test_what_is_outside_the_product_is_refused_by_name(name: str) -> None:
    """CFG-09, SEC-08: an option that has no effect would be worse than none."""
    error = problem(**{name: "zstd"})
    assert error.field == name
    assert "outside this SDK" in error.problem


@pytest.mark.parametrize("value", [["a", "b"], ("a",), []])
def test_a_list_where_text_is_wanted_says_how_to_write_one(value: object) -> None:
    assert problem(bucket=value).problem.endswith("is not a string; write one, with commas between what it lists")
    assert "commas" not in problem(threads=value).problem


def test_a_required_option_must_be_given() -> None:
    with pytest.raises(ConfigError, match="bucket: must be given"):
        parse_options("backend acme", SCHEMA, {})


def test_defaults_are_the_factorys_own() -> None:
    assert parse() == {"bucket": "b"}


def test_secrets_are_neither_logged_nor_shown_in_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options("backend acme", options_of(open_store), {"bucket": "b", "secret_key": 12345})
    assert "12345" not in str(caught.value)
    hidden = (
        "secret_key",
        "access_key",
        "accesskey",
        "apikey",
        "password",
        "passphrase",
        "session_token",
        "auth",
        "tenant_salt",
        "sas",
        "pwd",
        "storage_options",
    )
    shown = ("bucket", "threads", "max_known_keys", "author", "salted_bytes")
    assert [name for name in hidden + shown if OptionInfo(name, str, "", Bounds(), "").secret] == list(hidden)


@given(number=st.integers(1, 1023), unit=st.sampled_from(["B", "KiB", "MiB", "GiB", "TiB"]))
def test_sizes_are_exact(number: int, unit: str) -> None:
    factor = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
    assert parse(limit_bytes=f"{number}{unit}")["limit_bytes"] == number * factor


@given(
    name=st.sampled_from([name for name in SCHEMA if name != "bucket"]),
    value=st.text() | st.integers() | st.floats() | st.none() | st.booleans(),
)
def test_any_input_is_a_value_of_the_type_or_one_error(name: str, value: object) -> None:
    try:
        parsed = parse(**{name: value})[name]
    except ConfigError as error:
        parsed, field = None, error.field
    else:
        field = name
    assert field == name
    option = SCHEMA[name]
    if isinstance(parsed, float):
        assert math.isfinite(parsed)
    if isinstance(parsed, (int, float)) and not isinstance(parsed, bool):
        assert option.bounds.ge <= parsed <= option.bounds.le
