"""The code, the golden files, a second implementation and docs/format.md say the same."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import xxhash

from kvstore_sdk import ChunkKey, GroupIdentity, KVIdentity, WriterIdentity, format, keys

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden"
PAGE = TESTS.parent / "docs" / "format.md"


def oracle() -> types.ModuleType:
    """The second implementation, which shares nothing with the SDK."""
    spec = importlib.util.spec_from_file_location("golden_regenerate", GOLDEN / "regenerate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table(name: str) -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads((GOLDEN / f"{name}-v{keys.FORMAT_VERSION}.json").read_text())[name]
    return loaded


def identity_of(plain: dict[str, Any]) -> KVIdentity:
    fields = dict(plain)
    fields["groups"] = tuple(
        GroupIdentity(**(group | {"layers": tuple(group["layers"]), "state_shapes": tuple(group["state_shapes"])}))
        for group in plain["groups"]
    )
    fields["lora"] = tuple((name, digest) for name, digest in plain["lora"])
    fields["writer"] = plain["writer"] and WriterIdentity(**plain["writer"])
    return KVIdentity(**fields)


def sealed(case: dict[str, Any]) -> bytes:
    record = bytearray(b"\xee" * format.record_bytes(case["payload_bytes"]))
    record[4096 : 4096 + case["payload_bytes"]] = oracle().payload_of(case["payload_bytes"])
    key = ChunkKey(case["namespace"], bytes.fromhex(case["chain_hash"]), case["group"])
    format.seal(memoryview(record), key, case["layout"], case["payload_bytes"])
    return bytes(record)


@pytest.mark.parametrize("case", table("identities"), ids=lambda case: case["what"])
def test_an_identity_has_its_golden_namespace(case: dict[str, Any]) -> None:
    """SEC-02: the first case has no adapter; its value stays whatever is added for those who have some."""
    identity = identity_of(case["identity"])
    assert identity.canonical_json().decode() == case["canonical_json"]
    assert identity.namespace == case["namespace"]
    assert hashlib.sha256(case["canonical_json"].encode()).hexdigest().startswith(case["namespace"])
    assert json.loads(case["canonical_json"]) == case["identity"] | {"format_version": keys.FORMAT_VERSION}


@pytest.mark.parametrize("case", table("keys"), ids=lambda case: case["chain_hash"][:8] + str(case["group"]))
def test_a_key_has_its_golden_name(case: dict[str, Any]) -> None:
    key = ChunkKey.from_engine(case["namespace"], bytes.fromhex(case["engine_key"]))
    assert key == (case["namespace"], bytes.fromhex(case["chain_hash"]), case["group"])
    assert key.name == case["name"]


@pytest.mark.parametrize("case", table("records"), ids=lambda case: str(case["payload_bytes"]))
def test_a_record_has_its_golden_bytes(case: dict[str, Any]) -> None:
    record = sealed(case)
    assert len(record) == case["record_bytes"]
    assert record[:232].hex() == case["fields"]
    assert record[4080:4096].hex() == case["header_checksum"]
    assert hashlib.sha256(record).hexdigest() == case["record_sha256"]


def test_the_golden_record_verifies() -> None:
    case = table("records")[0]
    record = (GOLDEN / f"record-v{keys.FORMAT_VERSION}.bin").read_bytes()
    key = ChunkKey(case["namespace"], bytes.fromhex(case["chain_hash"]), case["group"])
    assert record == sealed(case)
    assert format.verify(memoryview(record), key, case["layout"], case["payload_bytes"]) is None


RECOMPUTE = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
import test_golden as golden
made = {
    "identities": [golden.identity_of(case["identity"]).namespace for case in golden.table("identities")],
    "names": [golden.ChunkKey.from_engine(case["namespace"], bytes.fromhex(case["engine_key"])).name for case in golden.table("keys")],
    "records": [golden.hashlib.sha256(golden.sealed(case)).hexdigest() for case in golden.table("records")],
}
json.dump(made, sys.stdout)
"""


@pytest.mark.parametrize("hash_seed", [None, "0", "random"])
def test_another_process_makes_the_same_bytes(hash_seed: str | None) -> None:
    """KEY-06: keys hang on no seed of the process."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if hash_seed is not None:
        environment["PYTHONHASHSEED"] = hash_seed
    paths = json.dumps([str(TESTS), *sys.path])
    child = subprocess.run(
        [sys.executable, "-c", RECOMPUTE, paths], env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout) == {
        "identities": [case["namespace"] for case in table("identities")],
        "names": [case["name"] for case in table("keys")],
        "records": [case["record_sha256"] for case in table("records")],
    }


def test_the_golden_files_are_what_the_second_implementation_writes() -> None:
    """Otherwise run `make golden`, which writes what is not frozen."""
    made = oracle().files()
    assert {path.name: path.read_bytes() == content for path, content in made.items()} == {path.name: True for path in made}


def test_a_frozen_version_is_not_written_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = oracle()
    (tmp_path / "docs").mkdir()
    (tmp_path / "golden").mkdir()
    (tmp_path / "docs" / "format.md").write_text("".join(module.EXAMPLE))
    monkeypatch.setattr(module, "PAGE", tmp_path / "docs" / "format.md")
    monkeypatch.setattr(module, "HERE", tmp_path / "tests" / "golden")
    module.HERE.mkdir(parents=True)
    assert module.main(["--check"]) == 1
    assert module.main([]) == 0
    assert module.main(["--check"]) == 0
    written = {path.name: path.read_bytes() for path in module.HERE.iterdir()}
    assert written == {name: (GOLDEN / name).read_bytes() for name in written}

    following = module.VERSION + 1
    monkeypatch.setattr(module, "VERSION", following)
    assert module.main([]) == 0, "the next version may be written, into files of its own"
    assert {name: (module.HERE / name).read_bytes() for name in written} == written
    monkeypatch.setattr(module, "chain_hash", lambda number, length=32: bytes(length))
    before = (module.HERE / f"keys-v{following}.json").read_bytes()
    assert module.main([]) == 1, "but not written over"
    assert (module.HERE / f"keys-v{following}.json").read_bytes() == before
    assert f"keys-v{following}.json differs" in capsys.readouterr().out


# --- docs/format.md ----------------------------------------------------------------------------------------------------------------


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table after the line `heading`."""
    lines = PAGE.read_text().split(heading + "\n", 1)[1].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def header_table() -> dict[str, tuple[int, int, str, str]]:
    return {
        field: (int(offset), int(size), kind, value) for offset, size, kind, field, value in rows("### Header page") if field != "unused"
    }


def read(page: bytes, at: tuple[int, int, str, str]) -> Any:
    """A field as the table says it is written."""
    offset, size, kind, _ = at
    raw = page[offset : offset + size]
    if kind.startswith("u"):
        assert int(kind[1:]) == size * 8
        return int.from_bytes(raw, "little")
    return raw.rstrip(b"\0").decode("ascii") if kind == "ASCII" else raw


def test_the_documented_fields_tile_the_header_page() -> None:
    end = 0
    for offset, size, _, field, _ in rows("### Header page"):
        assert int(offset) == end, field
        end += int(size)
    assert end == format.HEADER_BYTES


def test_a_header_reads_as_documented() -> None:
    key = ChunkKey("0123456789abcdef" * 2, bytes(range(200, 240)), 0x01020304)
    record = bytearray(format.record_bytes(70_001))
    format.seal(memoryview(record), key, "some-layout", 70_001)
    fields = {name: read(record, at) for name, at in header_table().items()}
    assert fields == {
        "magic": bytes.fromhex(header_table()["magic"][3].strip("`").replace(" ", "")),
        "version": int(header_table()["version"][3]),
        "header length": int(header_table()["header length"][3]),
        "flags": int(header_table()["flags"][3]),
        "checksum algorithm": int(header_table()["checksum algorithm"][3]),
        "namespace": bytes.fromhex(key.namespace),
        "group": 0x01020304,
        "hash length": 40,
        "chain hash": bytes(range(200, 240)) + bytes(24),
        "payload length": 70_001,
        "layout id": "some-layout",
        "payload checksum": bytes.fromhex(xxhash.xxh3_128_hexdigest(record[4096:])),
        "keyed MAC": bytes(32),
        "header checksum": bytes.fromhex(xxhash.xxh3_128_hexdigest(record[:4080])),
    }
    assert (fields["magic"], fields["version"]) == (format.MAGIC, format.FORMAT_VERSION)
    for offset, size, kind, _, _ in rows("### Header page"):
        if kind == "zeros":
            assert not any(record[int(offset) : int(offset) + int(size)])


def test_the_checksum_is_the_one_that_is_documented() -> None:
    [documented] = re.findall(r"Of no bytes at all it is `([0-9a-f]{32})`", PAGE.read_text())
    assert xxhash.xxh3_128_digest(b"").hex() == documented


@pytest.mark.parametrize(
    ("heading", "cls"),
    [
        ("## Identity", KVIdentity),
        ("A group object:", GroupIdentity),
        ("A writer object says who wrote bytes that nobody else can read:", WriterIdentity),
    ],
)
def test_every_field_of_an_identity_is_documented(heading: str, cls: Any) -> None:
    kinds = {"str": "string", "int": "integer", "WriterIdentity | None": "object"}
    fields = {field.name: kinds.get(str(field.type), "array") for field in dataclasses.fields(cls)}
    if cls is KVIdentity:
        fields["format_version"] = "integer"
    assert {name.strip("`"): kind for name, kind, _ in rows(heading)} == fields


def test_the_documented_flaws_are_all_and_in_the_order_of_the_checks() -> None:
    """A record with several flaws is called by the first of them."""
    documented = [flaw.strip("`") for _, _, flaw, _ in rows("### Verifying")]
    assert set(documented) == {flaw.value for flaw in format.Flaw}

    wanted = ChunkKey("0" * 32, b"wanted", 1)
    other = ChunkKey("1" * 32, b"other", 2)
    steps = [
        lambda record: (record[:-4096], "length"),
        lambda record: (bytes(4096) + record[4096:], "header"),
        lambda record: (resealed(record, other, "other", 4999), "namespace"),
        lambda record: (resealed(record, other._replace(namespace=wanted.namespace), "other", 4999), "key"),
        lambda record: (resealed(record, wanted, "other", 4999), "layout"),
        lambda record: (resealed(record, wanted, "wanted", 4999), "length"),
        lambda record: (record, "payload"),
    ]
    # From the last step up, each bends one thing more, so that everything below it is wrong as well.
    seen = []
    for step in steps:
        record = bytearray(8192 + 4096)
        format.seal(memoryview(record), wanted, "wanted", 5000)
        bent, expected = step(bytes(record))
        bent = bytearray(bent)
        bent[-1] ^= 1
        flaw = format.verify(memoryview(bent), wanted, "wanted", 5000)
        assert flaw is not None
        assert flaw.value == expected
        seen.append(flaw.value)
    assert seen == documented


def resealed(record: bytes, key: ChunkKey, layout: str, payload_bytes: int) -> bytes:
    made = bytearray(record)
    format.seal(memoryview(made), key, layout, payload_bytes)
    return bytes(made)


def test_the_documented_example_is_the_golden_record() -> None:
    text = PAGE.read_text().split("## Example\n", 1)[1]
    dumped = {
        int(at): bytes.fromhex(data.replace(" ", ""))
        for at, data in re.findall(r"^ *(\d+)  ((?:[0-9a-f]{2} {1,2})*[0-9a-f]{2})$", text, re.M)
    }
    record = (GOLDEN / f"record-v{keys.FORMAT_VERSION}.bin").read_bytes()
    assert sorted(dumped) == [*range(0, 232, 16), 4080]
    for at, data in dumped.items():
        assert record[at : at + len(data)] == data
    assert sum(map(len, dumped.values())) == 232 + 16
    assert not any(record[232:4080])
    assert hashlib.sha256(record).hexdigest() in text
    case = table("identities")[0]
    assert case["canonical_json"] in text
    assert f"the namespace is `{case['namespace']}`" in text
    assert table("keys")[0]["name"] in text


def test_the_documented_limits_of_names_are_true() -> None:
    longest, usual = re.findall(r"at most (\d+) bytes \((\d+) for a", PAGE.read_text())[0]
    assert len(ChunkKey("0" * 32, bytes(keys.MAX_HASH_BYTES), 2**32 - 1).name) == int(longest)
    assert len(ChunkKey("0" * 32, bytes(32), 2**32 - 1).name) == int(usual)
