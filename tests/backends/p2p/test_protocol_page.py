"""The code, the golden frames, a second implementation and docs/p2p-protocol.md say the same."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import struct
import types
from pathlib import Path
from typing import Any

import pytest

from kvstore_sdk.backend import is_valid_name
from kvstore_sdk_backends.p2p import data_path, guard, link, messages, security, strict, targets
from kvstore_sdk_backends.p2p.decoding import decode
from kvstore_sdk_backends.p2p.limits import Limits
from kvstore_sdk_backends.p2p.messages import ForeignHello, MessageError, Refused

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "golden"
PAGE = ROOT / "docs" / "p2p-protocol.md"
KINDS: dict[str, Any] = {
    name: cls for name in messages.__all__ if isinstance(cls := getattr(messages, name), type) and hasattr(cls, "KIND")
}


def oracle() -> types.ModuleType:
    """The second implementation, which shares nothing with the SDK."""
    spec = importlib.util.spec_from_file_location("golden_p2p_regenerate", GOLDEN / "p2p_regenerate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def golden(table: str) -> list[dict[str, Any]]:
    """Of all versions that the code speaks: as long as it does, their files hold for it."""
    lowest, highest = messages.VERSIONS
    versions = [json.loads((GOLDEN / f"p2p-v{version}.json").read_text()) for version in range(lowest, highest + 1)]
    return [case for version in versions for case in version[table]]


def as_tuples(value: Any) -> Any:
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


def message_of(case: dict[str, Any]) -> Any:
    fields = {name: bytes.fromhex(value) if name in ("node", "agent") else as_tuples(value) for name, value in case["fields"].items()}
    cls = KINDS[case["message"]]
    if "number" in {field.name for field in dataclasses.fields(cls)}:
        fields["number"] = case["number"]
    return cls(**fields)


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table after the line `heading`."""
    lines = PAGE.read_text().split(f"\n{heading}\n", 1)[1].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return found


@pytest.mark.parametrize("case", golden("frames"), ids=lambda case: case["what"])
def test_a_message_has_its_golden_frame(case: dict[str, Any]) -> None:
    message = message_of(case)
    assert messages.encode(message).hex() == case["frame"]
    assert decode(bytes.fromhex(case["frame"])) == message


@pytest.mark.parametrize("case", golden("foreign"), ids=lambda case: case["what"])
def test_of_another_version_what_no_version_changes_is_read(case: dict[str, Any]) -> None:
    fields = {name: as_tuples(value) for name, value in case["fields"].items()}
    read: ForeignHello | Refused
    if case["message"] == "Hello":
        read = ForeignHello(case["number"], case["version"], **fields)
    else:
        read = Refused(case["number"], **fields)
    assert decode(bytes.fromhex(case["frame"])) == read


@pytest.mark.parametrize("case", golden("refused"), ids=lambda case: case["what"])
def test_a_golden_frame_that_is_none_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises(MessageError):
        decode(bytes.fromhex(case["frame"]))


@pytest.mark.parametrize("case", golden("headers"), ids=lambda case: str(case["number"]))
def test_a_data_header_has_its_golden_bytes(case: dict[str, Any]) -> None:
    assert data_path.HEADER.pack(case["number"], case["index"], case["size"]).hex() == case["header"]


def test_there_are_golden_frames_of_every_kind() -> None:
    assert {case["message"] for case in golden("frames")} == set(KINDS)


def test_the_golden_files_are_what_the_second_implementation_writes() -> None:
    """Otherwise run `make golden`, which writes what is not frozen."""
    made = oracle().files()
    assert {path.name: path.read_bytes() == content for path, content in made.items()} == {path.name: True for path in made}


def test_a_frozen_version_is_not_written_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = oracle()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "p2p-protocol.md").write_text("".join(module.EXAMPLE))
    monkeypatch.setattr(module, "PAGE", tmp_path / "docs" / "p2p-protocol.md")
    monkeypatch.setattr(module, "HERE", tmp_path / "tests" / "golden")
    module.HERE.mkdir(parents=True)
    assert module.main(["--check"]) == 1
    assert module.main([]) == 0
    assert module.main(["--check"]) == 0
    name = f"p2p-v{module.VERSION}.json"
    before = (module.HERE / name).read_bytes()
    assert before == (GOLDEN / name).read_bytes()

    following = module.VERSION + 1
    monkeypatch.setattr(module, "VERSION", following)
    assert module.main([]) == 0, "the next version may be written, into a file of its own"
    assert (module.HERE / name).read_bytes() == before
    monkeypatch.setattr(module, "header", lambda number, index, size: b"")
    before = (module.HERE / f"p2p-v{following}.json").read_bytes()
    assert module.main([]) == 1, "but not written over"
    assert (module.HERE / f"p2p-v{following}.json").read_bytes() == before
    assert f"p2p-v{following}.json differs" in capsys.readouterr().out


# --- docs/p2p-protocol.md ----------------------------------------------------------------------------------------------------------


def test_the_documented_version_is_that_of_the_code() -> None:
    lowest, highest = messages.VERSIONS
    assert lowest <= highest == messages.VERSION == oracle().VERSION
    assert f"**Version {messages.VERSION}" in PAGE.read_text()
    for version in range(lowest, highest + 1):
        assert json.loads((GOLDEN / f"p2p-v{version}.json").read_text())["protocol_version"] == version


def test_the_documented_kinds_are_those_of_the_code() -> None:
    assert {int(kind): name for kind, name, *_ in rows("## Messages")} == {cls.KIND: name for name, cls in KINDS.items()}


@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("Ready", "Cancel")])
def test_every_field_of_a_message_is_documented_in_its_order(name: str) -> None:
    fields = [field.name for field in dataclasses.fields(KINDS[name]) if field.name != "number"]
    assert [field for field, *_ in rows(f"### {name}")] == fields


def test_the_documented_bounds_are_those_of_the_code() -> None:
    [longest_name] = (length for length in range(1, 5000) if is_valid_name("n" * length) and not is_valid_name("n" * (length + 1)))
    assert {what: int(most) for what, most in rows("### Bounds")} == {
        "bytes of a frame": messages.MAX_FRAME_BYTES,
        "number": messages.MAX_NUMBER,
        "names of a Lookup or a Release, sizes of a Found": messages.MAX_NAMES,
        "items of a Fetch, statuses of a Result": messages.MAX_ITEMS,
        "regions of a Target": messages.MAX_REGIONS,
        "bytes of an agent": messages.MAX_AGENT_BYTES,
        "bytes of a record": messages.MAX_RECORD_BYTES,
        "a time, in ms": messages.MAX_WAIT_MS,
        "characters of the text of a Refused or a Goodbye": messages.MAX_TEXT,
        "bytes of a name": longest_name,
    }


def test_the_documented_codes_and_statuses_are_those_of_the_code() -> None:
    refused = PAGE.read_text().split("### Refused\n", 1)[1].split("\n### ", 1)[0]
    table = refused.split("| code | means | the asker |\n", 1)[1]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == messages.REFUSALS
    goodbye = PAGE.read_text().split("### Goodbye\n", 1)[1].split("\n### ", 1)[0]
    table = goodbye.split("| code | of an owner, means | the asker begins another session |\n", 1)[1]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == messages.GOODBYES
    result = PAGE.read_text().split("### Result\n", 1)[1].split("\n### ", 1)[0]
    statuses = {name: int(code) for code, name in re.findall(r"^\| (\d) \| (\w+) \|", result, re.MULTILINE)}
    assert statuses == {name: getattr(messages, name) for name in ("FOUND", "MISSING", "WRONG_SIZE", "BUSY", "FAILED")}


def test_a_data_header_reads_as_documented() -> None:
    packed = data_path.HEADER.pack(3, 5, 7)
    seen, end = [], 0
    for offset, size, kind, _ in rows("### Fetching over `zmq`"):
        assert int(offset) == end
        assert int(kind[1:]) == int(size) * 8
        end += int(size)
        seen.append(int.from_bytes(packed[int(offset) : end], "big"))
    assert (seen, end) == ([3, 5, 7], data_path.HEADER.size)
    assert struct.calcsize(data_path.HEADER.format) == end


def test_the_documented_times_are_those_of_the_code() -> None:
    limits = Limits()
    assert {what: int(ms) for what, ms, _ in rows("### Times")} == {
        "PING on a control connection": security._PING_MS,
        "silence that ends a control connection": security._SILENCE_MS,
        "bytes that TCP does not get rid of end a connection": security._STUCK_MS,
        "handshake of ZMTP, at most": security._HANDSHAKE_MS,
        "from a connection to its session, at most": round(guard.SESSION_S * 1000),
        "from connecting to the Welcome, at most": round(link.CONNECT_S * 1000),
        "a Target, at most": round(targets._ADMIT_S * 1000),
        "a Fetch is given at most, whatever its deadline": round(limits.max_fetch_s * 1000),
        "a record may still be on its way after its deadline": round(data_path._GRACE_S * 1000),
        "a Lookup waits, at most": round(limits.max_wait_s * 1000),
    }


def test_what_the_page_says_in_words_is_what_the_code_does() -> None:
    text = " ".join(PAGE.read_text().split())
    limits = Limits()
    for said in (
        f"no session after {guard.SESSION_S:g} s, or has sent more than {guard._STRANGER_BYTES >> 10} KiB",
        f"every {security._PING_MS} ms, and ends when nothing came for {security._SILENCE_MS:,} ms",
        f"got rid of bytes for {security._STUCK_MS:,} ms",
        f"and {limits.bad_frames} of them end it",
        f"after {round(limits.max_wait_s * 1000):,} ms where that is more",
        f"({limits.session_waits} of a session, {limits.max_waits:,} of all; and of their names "
        f"{limits.session_wait_names:,} and {limits.max_wait_names:,})",
        f"some seconds ({limits.lease_s:g}, unless",
        f"{limits.session_fetches} Fetches and {limits.session_items:,} items of them",
        f"and {limits.session_bytes >> 20} MiB of records at a time",
        f"to whose asker {security._SEND_QUEUE} messages wait",
        f"had best wait {data_path._FAREWELL_S * 1000:g} ms for the reason",
        f"has at most {messages.MAX_FRAME_BYTES:,} bytes. Anywhere in it an array has at most {messages.MAX_NAMES} entries",
        f"a text has at most {strict.MAX_TEXT_BYTES:,} bytes and a binary at most {messages.MAX_AGENT_BYTES:,};",
        f"({data_path.MAX_QUEUED_BYTES >> 20} MiB a session",
        f"taken a record {round(data_path._GRACE_S * 1000):,} ms after",
        f"metadata, in {round(targets._ADMIT_S * 1000):,} ms at most",
        f"the routing id `{data_path.routing_id(b'').decode()}` and the {messages.NODE_BYTES} bytes of its node",
    ):
        assert said in text, said


def test_the_shown_frames_are_messages_of_one_session() -> None:
    shown = PAGE.read_text().split("<!-- frames: ", 1)[1].split("<!-- end of the frames -->", 1)[0]
    blocks = re.findall(r"^(asker|owner)[:,] (.*?)\n\n```\n(.*?)```$", shown, re.DOTALL | re.MULTILINE)
    seen = []
    for _, said, block in blocks:
        frame = bytes.fromhex(re.sub(r"\s", "", block))
        if said.startswith("on the data connection"):
            assert data_path.HEADER.unpack(frame) == (3, 0, 8192)
            continue
        message = decode(frame)
        seen.append(type(message).__name__)
        assert said.startswith(f"{seen[-1]}, number {getattr(message, 'number', 0)}")
    assert seen == ["Hello", "Welcome", "Lookup", "Found", "Fetch", "Result", "Goodbye"]
    assert len(blocks) == 8
