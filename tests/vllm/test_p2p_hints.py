"""What a request says of a peer: read where it is good, ignored and told of where it is not, and never an exception into the engine."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_sdk.backend import Hint
from kvstore_sdk.vllm import hints
from kvstore_sdk.vllm.hints import HintReader, parse_hint

LONGEST_S = 10.0


def vllms(host: object = "prefill-0", port: object = 7777, **more: object) -> dict[str, object]:
    return {"kv_request_id": "r1", "remote_host": host, "remote_port": port, **more}


GOOD = [
    ({"kvstore": {"peer": "10.0.0.1:7777"}}, Hint("10.0.0.1:7777", 0.0)),
    ({"kvstore": {"peer": "prefill-0.kv.svc:7777", "wait_s": 5}}, Hint("prefill-0.kv.svc:7777", 5.0)),
    ({"kvstore": {"peer": "[fd00::1]:7777", "wait_s": 0.25}}, Hint("[fd00::1]:7777", 0.25)),
    ({"kvstore": {"peer": "a:1", "wait_s": 10**400}}, Hint("a:1", LONGEST_S)),
    ({"kvstore": {"peer": "a:1", "wait_s": 11.0}}, Hint("a:1", LONGEST_S)),
    ({"remote_prefiller": vllms()}, Hint("prefill-0:7777", LONGEST_S)),
    ({"remote_prefiller": vllms("fd00::1", "7777")}, Hint("[fd00::1]:7777", LONGEST_S)),
    ({"remote_kv_source": vllms(anything=1)}, Hint("prefill-0:7777", 0.0)),
    ({"kvstore": {"peer": "a:1"}, "remote_prefiller": vllms()}, Hint("a:1", 0.0)),
    ({"remote_prefiller": vllms("a"), "remote_kv_source": vllms("b")}, Hint("a:7777", LONGEST_S)),
    ({"remote_prefiller": None, "remote_kv_source": vllms("b")}, Hint("b:7777", 0.0)),
    ({"do_remote_decode": True, "max_offload_tokens": 3}, None),
    ({}, None),
]

BAD: list[tuple[Any, str]] = [
    ("peer=a:1", "is no table but of type str"),
    ({"kvstore": "a:1"}, "'kvstore' is no table but 'a:1'"),
    ({"kvstore": {"peer": "a:1", "wait": 5}}, "'kvstore' has a field 'wait'; there are peer and wait_s"),
    ({"kvstore": {"peer": "a:1", 7: 5}}, "'kvstore' has a field something of type int; there are peer and wait_s"),
    ({"kvstore": {}}, "'kvstore' has as peer something of type NoneType, which is no host:port"),
    ({"kvstore": {"peer": "a"}}, "'kvstore' has as peer 'a', which is no host:port"),
    ({"kvstore": {"peer": "a:"}}, "'kvstore' has as port '', which is none"),
    ({"kvstore": {"peer": "fd00::1:7777"}}, "'kvstore' has as peer 'fd00::1:7777'; an IPv6 address stands in brackets"),
    ({"kvstore": {"peer": "[a]b:1"}}, "'kvstore' has as host '[a]b', which is none"),
    ({"kvstore": {"peer": "a:1", "wait_s": "5"}}, "'kvstore' has as wait_s '5', which is no number of seconds"),
    ({"kvstore": {"peer": "a:1", "wait_s": True}}, "'kvstore' has as wait_s something of type bool, which is no number of seconds"),
    ({"kvstore": {"peer": "a:1", "wait_s": -1}}, "'kvstore' has as wait_s something of type int, which is no number of seconds"),
    ({"kvstore": {"peer": "a:1", "wait_s": math.nan}}, "'kvstore' has as wait_s something of type float, which is no number of seconds"),
    ({"kvstore": {"peer": "a:1", "wait_s": math.inf}}, "'kvstore' has as wait_s something of type float, which is no number of seconds"),
    ({"remote_prefiller": [1]}, "'remote_prefiller' is no table but something of type list"),
    ({"remote_prefiller": {}}, "'remote_prefiller' has as host something of type NoneType, which is none"),
    *(
        ({"remote_prefiller": vllms(host)}, f"'remote_prefiller' has as host {host!r}, which is none")
        for host in ("", "a b", "a/b", "a\nb", "-a", "tcp://a", "*", "a;b", "a:b:c:g", "fd00::1%")
    ),
    ({"remote_prefiller": vllms("a" * 254)}, "'remote_prefiller' has as host 'aaaaaaaaaaaa...aaaaaaaaaaaaa', which is none"),
    ({"remote_kv_source": vllms(port="70a")}, "'remote_kv_source' has as port '70a', which is none"),
    ({"remote_kv_source": vllms(port="\u0667")}, "'remote_kv_source' has as port '\u0667', which is none"),
    *(
        ({"remote_kv_source": vllms(port=port)}, f"'remote_kv_source' has as port something of type {type(port).__name__}, which is none")
        for port in (0, -1, 65536, 7.0, True, None, 10**5000)
    ),
    ({"remote_kv_source": vllms(port="65536")}, "'remote_kv_source' has as port something of type int, which is none"),
]


@pytest.mark.parametrize(("params", "hint"), GOOD)
def test_a_good_hint_is_read(params: dict[str, Any], hint: Hint | None) -> None:
    """The first that is good counts, and nobody waits for longer than the operator allows."""
    assert parse_hint(params, LONGEST_S) == (hint, "")


@pytest.mark.parametrize(("params", "problem"), BAD)
def test_a_bad_hint_is_none_and_says_why(params: Any, problem: str) -> None:
    assert parse_hint(params, LONGEST_S) == (None, problem)


def test_behind_a_bad_hint_a_good_one_counts() -> None:
    hint, problem = parse_hint({"kvstore": {"peer": 7}, "remote_kv_source": vllms()}, LONGEST_S)
    assert hint == Hint("prefill-0:7777", 0.0)
    assert problem == "'kvstore' has as peer something of type int, which is no host:port"


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300) | st.sampled_from(["a", "a:1", "::1", "10.0.0.1", "7"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["peer", "wait_s", "remote_host", "remote_port", "kvstore", "remote_prefiller", "remote_kv_source"])
            | st.text(max_size=9),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None)
@given(_VALUES)
def test_whatever_a_client_writes_gives_a_hint_within_bounds_or_one_line(params: Any) -> None:
    hint, problem = parse_hint(params, LONGEST_S)
    assert len(problem) < 200
    # A client writes no line of its own into the log.
    assert problem.isprintable()
    if hint is not None:
        host, _, port = hint.peer.rpartition(":")
        assert 0 < int(port) < 65536
        assert host.isascii()
        assert 0 < len(host) <= 253 + 2
        assert not set(host) & set(" /\\*;,@?#\n\r\t\0")
        assert 0.0 <= hint.wait_s <= LONGEST_S
        json.dumps(hint.peer)


def test_bad_hints_are_logged_now_and_then_with_their_number(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends one with every request fills no log."""
    now_s = 100.0
    monkeypatch.setattr(hints.time, "monotonic", lambda: now_s)
    reader = HintReader("kvstore tier 1:kvstore", LONGEST_S)
    with caplog.at_level(logging.WARNING, "kvstore_sdk.vllm.hints"):
        assert [reader.read(None), reader.read({})] == [None, None]
        assert reader.read({"kvstore": {"peer": "a:1"}}) == Hint("a:1", 0.0)
        assert not caplog.messages
        for _ in range(50):
            assert reader.read({"kvstore": 7}) is None
        assert len(caplog.messages) == 1
        now_s += hints.LOG_EVERY_S
        assert reader.read({"kvstore": "b"}) is None
    what = "kvstore tier 1:kvstore: ignored what %d request(s) since the last such line said of a peer; the last one: kv_transfer_params %s"
    assert caplog.messages == [
        what % (1, "'kvstore' is no table but something of type int"),
        what % (50, "'kvstore' is no table but 'b'"),
    ]
