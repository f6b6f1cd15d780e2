"""Nodes that must not talk do not: both sides say why, in one line, and no data moves."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgpack")

import zmq
from p2p_scripted import scripted_peer

from kvstore_sdk.backend import Buffer, Deadline, Failure, Get, GetStatus, Hint, Put, PutStatus, Region, UnavailableError, open_backend
from kvstore_sdk_backends.p2p import messages
from kvstore_sdk_backends.p2p.addresses import Address
from kvstore_sdk_backends.p2p.backend import P2PBackend
from kvstore_sdk_backends.p2p.decoding import decode
from kvstore_sdk_backends.p2p.keys import CurveKey, write_key
from kvstore_sdk_backends.p2p.messages import VERSION, Found, Hello, Lookup, Refused, Welcome, encode
from kvstore_sdk_backends.p2p.security import Security

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / f"p2p-v{VERSION}.json"
WAIT_S = 30.0
SIZE = 64 << 10
NAME = "v1/a/record"
PATTERN = 0x5A

Open = Callable[..., P2PBackend]


@pytest.fixture
def open_node(patient: None) -> Iterator[Open]:
    with ExitStack() as closing:

        def open_one(**options: object) -> P2PBackend:
            node = open_backend("p2p", {"data": "zmq", "answer_timeout_s": WAIT_S, **options}, location="127.0.0.1:0")
            closing.callback(node.close)
            assert isinstance(node, P2PBackend)
            return node

        yield open_one


@pytest.fixture
def key_files(tmp_path: Path) -> tuple[str, str]:
    paths = str(tmp_path / "one.key"), str(tmp_path / "other.key")
    for path in paths:
        write_key("a test", path)
    return paths


def serving(open_node: Open, **options: object) -> P2PBackend:
    """A node that has one record."""
    node = open_node(serve_bytes=1 << 20, **options)
    region = Region(SIZE)
    region.view[:] = b"r" * SIZE
    [stored] = node.put([Put(NAME, (Buffer(region, 0, SIZE),))], Deadline.after(WAIT_S))
    assert stored.status is PutStatus.STORED
    region.close()
    return node


def until(holds: Callable[[], object]) -> None:
    late = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < late
        time.sleep(0.02)


def gets_the_record(asker: P2PBackend) -> bool:
    """Whether it comes; if not, no byte of the buffer was written."""
    region = Region(SIZE)
    region.view[:] = bytes([PATTERN]) * SIZE
    asker.register_region(region)
    [found] = asker.get([Get(NAME, (Buffer(region, 0, SIZE),))], Deadline.after(WAIT_S))
    asker.unregister_region(region)
    got = bytes(region.view)
    region.close()
    if found.status is GetStatus.FOUND:
        assert got == b"r" * SIZE
        return True
    assert found.status is GetStatus.FAILED
    assert got == bytes([PATTERN]) * SIZE
    return False


def refused_for(asker: P2PBackend) -> str:
    """What whoever asks is told."""
    answers: list[bool | Failure] = []

    def asked() -> bool:
        answers[:] = asker.exists([NAME], Deadline.after(WAIT_S))
        # A connection that is being made is no answer yet.
        return isinstance(answers[0], Failure) and "being connected" not in str(answers[0].error)

    until(asked)
    [answer] = answers
    assert isinstance(answer, Failure)
    assert isinstance(answer.error, UnavailableError)
    assert "\n" not in str(answer.error)
    return str(answer.error)


def lines(caplog: pytest.LogCaptureFixture, module: str) -> str:
    return "\n".join(r.getMessage() for r in caplog.records if r.name.endswith(f".p2p.{module}") and r.levelno >= logging.WARNING)


def nothing_was_served(owner: P2PBackend) -> bool:
    counted = owner.counters()
    return not any(counted[f"served_{what}"] for what in ("lookups", "fetches", "records_sent", "bytes_sent"))


@pytest.mark.parametrize("secured", [False, True], ids=["neither has a key", "one key"])
def test_nodes_of_one_group_talk(open_node: Open, key_files: tuple[str, str], secured: bool) -> None:
    """What is refused below is refused for the reason that it says."""
    options = {"key_file": key_files[0]} if secured else {}
    owner = serving(open_node, **options)
    asker = open_node(peers=str(owner.address), **options)
    until(lambda: asker.exists([NAME], Deadline.after(WAIT_S)) == [True])
    assert gets_the_record(asker)


@pytest.mark.parametrize(
    ("owners", "askers", "owner_says", "asker_says"),
    [
        (0, 1, "its key_file is not this node's", "key_file"),
        (0, None, "it has no key_file, and this node has one", "key_file"),
        (None, 0, "it has a key_file, and this node has none", "key_file"),
    ],
    ids=["another key", "no key", "a key where there is none"],
)
def test_who_does_not_hold_the_key_is_refused(
    open_node: Open,
    key_files: tuple[str, str],
    caplog: pytest.LogCaptureFixture,
    owners: int | None,
    askers: int | None,
    owner_says: str,
    asker_says: str,
) -> None:
    owner = serving(open_node, **({} if owners is None else {"key_file": key_files[owners]}))
    asker = open_node(peers=str(owner.address), **({} if askers is None else {"key_file": key_files[askers]}))
    said = refused_for(asker)
    assert str(owner.address) in said
    assert asker_says in said
    assert not gets_the_record(asker)
    until(lambda: owner_says in lines(caplog, "guard"))
    assert asker_says in lines(caplog, "peer")
    assert nothing_was_served(owner)
    assert owner.counters()["served_sessions"] == 0
    for path in key_files:
        for line in Path(path).read_text().splitlines():
            assert '"' not in line or line.split('"')[1] not in caplog.text


@pytest.mark.parametrize("field", ["namespace", "layout"])
def test_who_has_other_records_is_refused(open_node: Open, caplog: pytest.LogCaptureFixture, field: str) -> None:
    owner = open_node(serve_bytes=1 << 20)
    ours = {"namespace": "a" * 32, "layout": "layout-1"}
    theirs = ours | {field: {"namespace": "b" * 32, "layout": "layout-2"}[field]}
    owner.use_identity(**ours)
    asker = open_node(peers=str(owner.address))
    asker.use_identity(**theirs)
    said = refused_for(asker)
    assert field in said
    assert not gets_the_record(asker)
    until(lambda: field in lines(caplog, "server"))
    for module in ("server", "peer"):
        [line] = lines(caplog, module).splitlines()
        assert "127.0.0.1" in line
        assert theirs[field] in line
        assert ours[field] in line
    assert nothing_was_served(owner)
    # And a change of mind is heard.
    asker.use_identity(**ours)
    until(lambda: asker.exists([NAME], Deadline.after(WAIT_S)) == [False])


def client(address: Address, key: CurveKey | None = None) -> zmq.Socket[bytes]:
    made: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    Security("127.0.0.1", key=key).secure_client(made, "control", address)
    made.connect(address.endpoint)
    return made


def answer(socket: zmq.Socket[bytes]) -> messages.Message:
    assert socket.poll(round(WAIT_S * 1000))
    return decode(socket.recv())


def foreign(message: str) -> list[dict[str, Any]]:
    """Frames that nodes of other versions send."""
    return [case for case in json.loads(GOLDEN.read_text())["foreign"] if case["message"] == message]


@pytest.mark.parametrize("case", foreign("Hello"), ids=lambda case: case["what"])
def test_an_asker_of_another_version_is_told_which_ones_there_are(
    case: dict[str, Any], open_node: Open, caplog: pytest.LogCaptureFixture
) -> None:
    owner = serving(open_node)
    spoken = "{} to {}".format(*case["fields"]["versions"])
    with client(owner.address) as stranger:
        stranger.send(bytes.fromhex(case["frame"]))
        refused = answer(stranger)
        assert isinstance(refused, Refused)
        assert (refused.number, refused.code, list(refused.versions)) == tuple(
            case["answer"][key] for key in ("number", "code", "versions")
        )
        assert spoken in refused.text
        # On the same connection it may say Hello in a version that both speak.
        stranger.send(encode(Hello(8, messages.VERSIONS, b"n" * 16, "", "", ("zmq",))))
        assert isinstance(answer(stranger), Welcome)
    until(lambda: spoken in lines(caplog, "server"))
    assert nothing_was_served(owner)


def test_an_asker_that_does_not_speak_the_version_of_its_own_hello_is_refused_likewise(
    open_node: Open, caplog: pytest.LogCaptureFixture
) -> None:
    owner = serving(open_node)
    with client(owner.address) as stranger:
        stranger.send(encode(Hello(7, (40, 41), b"n" * 16, "", "", ("zmq",))))
        refused = answer(stranger)
        assert isinstance(refused, Refused)
        assert (refused.number, refused.code, refused.versions) == (7, "version", messages.VERSIONS)
        assert "40 to 41" in refused.text
        # It is nobody yet.
        stranger.send(encode(Lookup(8, 0, (NAME,))))
        refused = answer(stranger)
        assert isinstance(refused, Refused)
        assert (refused.number, refused.code) == (8, "unknown")
    until(lambda: "40 to 41" in lines(caplog, "server"))
    assert nothing_was_served(owner)


def test_an_owner_of_another_version_is_not_asked(open_node: Open, caplog: pytest.LogCaptureFixture) -> None:
    """It refuses the Hello with the number 1, which is the first of an asker."""
    [case] = [case for case in foreign("Refused") if case["number"] == 1]
    spoken = "{} to {}".format(*case["fields"]["versions"])
    with scripted_peer(lambda message: bytes.fromhex(case["frame"])) as peer:
        asker = open_node(peers=str(peer.address))
        assert spoken in refused_for(asker)
        assert spoken in lines(caplog, "peer")
        assert {type(message) for message in peer.asked} == {Hello}


def test_a_hint_leads_off_loopback_only_with_a_key(open_node: Open, caplog: pytest.LogCaptureFixture) -> None:
    """A request must not make an engine connect to wherever it likes. 192.0.2.0/24 is nobody's."""
    asker = open_node()
    asker.hint([NAME], Hint("192.0.2.1:7400"))
    [found] = asker.exists([NAME], Deadline.after(WAIT_S))
    assert found is False or isinstance(found, Failure)
    assert asker.counters()["peers_now"] == 0
    until(lambda: "192.0.2.1:7400" in caplog.text)
    assert "key_file" in caplog.text


def test_a_node_that_finds_itself_asks_itself_nothing(open_node: Open) -> None:
    owner = serving(open_node)
    with client(owner.address) as mirror:
        mirror.send(encode(Hello(1, messages.VERSIONS, owner._node.id_at(owner.address), "", "", ("zmq",))))
        refused = answer(mirror)
        assert isinstance(refused, Refused)
        assert refused.code == "self"


def test_a_key_moves_data_as_well_and_a_stranger_cannot_take_the_data_connection(open_node: Open, key_files: tuple[str, str]) -> None:
    from kvstore_sdk_backends.p2p.keys import read_key

    key = read_key("a test", key_files[0])
    owner = serving(open_node, key_file=key_files[0])
    with client(owner.address, key) as member:
        member.send(encode(Hello(1, messages.VERSIONS, b"n" * 16, "", "", ("zmq",))))
        welcome = answer(member)
        assert isinstance(welcome, messages.Welcome)
        # A stranger at the data port, under the name of the member.
        with zmq.Context.instance().socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.routing_id = b"d" + b"n" * 16
            stranger.connect(f"tcp://127.0.0.1:{welcome.data_port}")
            member.send(encode(Lookup(2, 0, (NAME,))))
            assert answer(member) == Found(2, (SIZE,))
            member.send(encode(messages.Fetch(3, 0, 1000, ((NAME, SIZE, 0, 0),))))
            result = answer(member)
            assert isinstance(result, messages.Result)
            assert result.statuses[0][0] != messages.FOUND
            assert stranger.poll(200) == 0
