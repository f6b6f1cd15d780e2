"""`kvstore verify`: every kind of damage is found and named, and nothing that is good is called bad, also while a store is in use."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from damage import DAMAGES, FOLDER_DAMAGES, PAYLOADS, Damage, FolderTree, chunk_key, fill, identity_of, record_of, wreck
from places import Place, Ran

from kvstore_sdk.backend import Deadline, ListPage, Mode, Put, PutStatus, Region, UnavailableError
from kvstore_sdk.format import Flaw, record_bytes
from kvstore_sdk.testing import BackendWrapper, Fault, FaultyBackend, Raise
from kvstore_sdk.tools import retry as retry_module
from kvstore_sdk.tools.check import Finding, Verdict
from kvstore_sdk.tools.retry import Retry
from kvstore_sdk.tools.verify import Sample, Verification

Command = Callable[..., Ran]
ALL_BYTES = 4 * sum(map(record_bytes, PAYLOADS)) + 4096
"""Of a namespace as `fill` makes it."""


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_module.time, "sleep", lambda _: None)


@pytest.fixture
def folder(make_folder: Callable[[], Place]) -> Place:
    return make_folder()


def verify(kvstore: Command, place: Place, *more: str) -> tuple[int, dict[str, Any]]:
    ran = kvstore("verify", place, "--json", *more)
    found: dict[str, Any] = json.loads(ran.out)
    return ran.code, found


def test_a_good_store_is_read_to_the_last_byte_and_is_fine(place: Place, kvstore: Command) -> None:
    filled = fill(place.tree)
    code, found = verify(kvstore, place)
    assert (code, found["ok"], found["items"], found["sample"]) == (0, True, [], None)
    assert (found["records"], found["manifests"], found["listed"]) == (16, 2, 18)
    assert found["read_bytes"] == 2 * ALL_BYTES == sum(map(len, (filled.records | filled.manifests).values()))
    assert found["counts"] == {verdict.value: 16 * (verdict is Verdict.FINE) for verdict in Verdict}
    assert found["mb_per_s"] > 0
    ran = kvstore("verify", place)
    assert (ran.code, len(ran.lines)) == (0, 1)
    assert "16 records" in ran.out
    assert ran.out.rstrip().endswith(": 16 fine")


def told_of(name: str, verdict: Any) -> tuple[str, str, str | None]:
    """What must be said of a name with this damage."""
    if isinstance(verdict, Flaw):
        return name, "corrupt", verdict.value
    return name, {"foreign": "foreign", "manifest": "bad_manifest"}[verdict], None


def test_every_kind_of_damage_is_found_among_what_is_good(place: Place, kvstore: Command) -> None:
    found = wreck(place.tree)
    code, told = verify(kvstore, place)
    assert (code, told["ok"]) == (1, False)
    assert sorted((item["name"], item["verdict"], item["flaw"]) for item in told["items"]) == sorted(
        told_of(name, verdict) for name, verdict in found.damaged.items()
    )
    assert told["counts"]["fine"] + told["counts"]["unproven"] + told["manifests"] == len(found.good)
    assert sum(told["flaws"].values()) == told["counts"]["corrupt"] == len(found.names(*Flaw))


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_each_kind_of_damage_alone_decides_the_exit_code(damage: Damage, folder: Place, kvstore: Command) -> None:
    filled = fill(folder.tree)
    wanted = sorted(told_of(one.name, one.verdict) for one in damage.do(folder.tree, filled) if one.verdict != "fine")
    code, told = verify(kvstore, folder)
    assert sorted((item["name"], item["verdict"], item["flaw"]) for item in told["items"]) == wanted
    wrong = any(verdict != "foreign" for _, verdict, _ in wanted)
    assert (code, told["ok"]) == (int(wrong), not wrong)
    lines = kvstore("verify", folder).lines
    assert len(lines) == len(wanted) + 1
    assert all(any(name in line for line in lines) for name, _, _ in wanted)


@pytest.mark.parametrize("damage", FOLDER_DAMAGES, ids=str)
def test_what_no_engine_can_see_is_not_told(damage: Damage, folder: Place, kvstore: Command) -> None:
    filled = fill(folder.tree)
    [one] = damage.do(folder.tree, filled)
    code, found = verify(kvstore, folder)
    assert (code, found["items"]) == (0, [])
    assert found["counts"]["fine"] == 16 - (one.name in filled.records)


def test_without_a_manifest_records_are_held_against_themselves(place: Place, kvstore: Command) -> None:
    """Layout and length are taken on trust then, and said to be; a changed byte is found all the same."""
    filled = fill(place.tree, ["acme/one"])
    names = sorted(filled.records)
    place.tree.remove(next(iter(filled.manifests)))
    flipped = bytearray(filled.records[names[0]])
    flipped[5000] ^= 1
    place.tree.write(names[0], bytes(flipped))
    place.tree.write(names[1], filled.records[names[3]])
    place.tree.write(names[5], filled.records[names[5]][:-4096])
    code, found = verify(kvstore, place)
    assert code == 1
    assert {item["name"]: item["flaw"] for item in found["items"]} == {names[0]: "payload", names[1]: "key", names[5]: "length"}
    assert found["counts"]["unproven"] == 5


def test_a_record_of_a_group_that_its_namespace_has_not_is_corrupt(folder: Place, kvstore: Command) -> None:
    filled = fill(folder.tree, ["acme/one"])
    key = chunk_key(filled.identities[0], 0, group=2)
    folder.tree.write(key.name, record_of(key, PAYLOADS[0]))
    code, found = verify(kvstore, folder)
    assert code == 1
    assert [(item["name"], item["flaw"]) for item in found["items"]] == [(key.name, "key")]


def test_records_that_this_opening_cannot_take_are_unreadable_and_do_not_end_the_run(place: Place, kvstore: Command) -> None:
    """An engine that opens the store with a larger `max_record_bytes` finds them good; and a store with many of them is not down."""
    filled = fill(place.tree, ["acme/one"], chunks=30, payloads=(60_000, 3000))
    large = sorted(name for name, content in filled.records.items() if len(content) > 16384)
    wrong = max(filled.records, key=lambda name: (len(filled.records[name]), name))
    place.tree.write(wrong, filled.records[wrong] + bytes(4096))
    code, found = verify(kvstore, place, "--option", "max_record_bytes=16KiB")
    assert code == 1
    assert "error" not in found
    assert {item["name"]: item["verdict"] for item in found["items"]} == dict.fromkeys(large, "unreadable") | {wrong: "corrupt"}
    assert all("max_record_bytes" in item["problem"] for item in found["items"] if item["verdict"] == "unreadable")
    assert found["counts"]["fine"] == 30


def test_a_namespace_alone_is_verified(place: Place, kvstore: Command) -> None:
    filled = fill(place.tree)
    DAMAGES[0].do(place.tree, filled)
    bad = min(filled.records).split("/")[1]
    [good] = [identity.namespace for identity in filled.identities if identity.namespace != bad]
    assert verify(kvstore, place, "--namespace", good)[0] == 0
    code, found = verify(kvstore, place, "--namespace", bad)
    assert (code, found["read_bytes"]) == (1, ALL_BYTES)


class TestSample:
    """A part of a store, drawn by name."""

    @pytest.fixture
    def names(self, folder: Place) -> set[str]:
        return set(fill(folder.tree, ["acme/one"], chunks=100).records)

    @staticmethod
    def drawn(place: Place, sample: Sample | None, threads: int = 1) -> set[str]:
        with contextlib.closing(place.open()) as backend:
            run = Verification(backend, Retry(), sample=sample, threads=threads)
            return {finding.name for finding in run.findings() if finding.name.endswith(("-g0", "-g1"))}

    def test_a_number_of_records_is_that_many(self, folder: Place, names: set[str]) -> None:
        for count in (1, 17, 200, 5000):
            assert len(self.drawn(folder, Sample(records=count, seed=3))) == min(count, len(names))
        assert self.drawn(folder, Sample(records=5000)) == names == self.drawn(folder, None)

    def test_a_seed_draws_the_same_records_each_time_and_another_one_others(self, folder: Place, names: set[str]) -> None:
        for sample in (Sample(records=40, seed=1), Sample(percent=20.0, seed=1)):
            first = self.drawn(folder, sample)
            assert first == self.drawn(folder, sample, threads=3)
            assert first != self.drawn(folder, replace(sample, seed=2))
            assert first < names

    def test_a_share_is_about_that(self, folder: Place, names: set[str]) -> None:
        drawn = [len(self.drawn(folder, Sample(percent=25.0, seed=seed))) for seed in range(10)]
        assert 40 < sum(drawn) / 10 < 60
        assert self.drawn(folder, Sample(percent=100.0)) == names

    def test_the_command_says_what_it_drew_so_that_it_can_be_drawn_again(self, folder: Place, names: set[str], kvstore: Command) -> None:
        victim = sorted(names)[50]
        folder.tree.write(victim, b"x" * 8192)
        code, found = verify(kvstore, folder, "--sample", "50%", "--seed", "7")
        again = verify(kvstore, folder, "--sample", "50%", "--seed", "7")
        assert found["sample"] == {"records": None, "percent": 50.0, "seed": 7}
        assert (code, found["items"], found["records"]) == (again[0], again[1]["items"], again[1]["records"])
        seed = verify(kvstore, folder, "--sample", "10")[1]["sample"]["seed"]
        assert f"--seed {seed}" in kvstore("verify", folder, "--sample", "10", "--seed", str(seed)).out

    @pytest.mark.parametrize("text", ["0", "-1", "1000001", "0%", "101%", "nan%", "%", "x", "1.5", ""])
    def test_a_sample_that_is_none_is_refused(self, text: str, folder: Place, kvstore: Command, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            kvstore("verify", folder, f"--sample={text}")
        assert ended.value.code == 2
        assert "must be a number of records, 1 to 1000000, or a share such as 5%" in capsys.readouterr().err


def test_a_store_in_use_is_never_called_corrupt(place: Place) -> None:
    """A writer stores, replaces and deletes meanwhile: what comes of a race is a record that is gone, not one that is wrong."""
    filled = fill(place.tree, ["acme/one"], chunks=6)
    records = list(filled.records.items())
    ended = threading.Event()
    rounds = [0]

    def use() -> None:
        region = Region(16384)
        with contextlib.closing(place.open()) as backend:
            while not ended.is_set():
                name, record = records[rounds[0] % len(records)]
                assert backend.delete([name], Deadline.after(30)) != []
                region.view[: len(record)] = record
                put = Put(name, (region.buffer(0, len(record)),), Mode.REPLACE if rounds[0] % 2 else Mode.CREATE)
                assert backend.put([put], Deadline.after(30))[0].status is PutStatus.STORED
                rounds[0] += 1
        region.close()

    user = threading.Thread(target=use, daemon=True)
    user.start()
    try:
        with contextlib.closing(place.open()) as backend:
            for _ in range(500):
                run = Verification(backend, Retry(), threads=2)
                assert list(run) == []
                assert run.records >= len(records) // 2
                if rounds[0] >= 40:
                    break
    finally:
        ended.set()
        user.join(60)
    assert rounds[0] >= 40, "the writer did not write"


class StaleList(BackendWrapper):
    """Lists what was there when it was made, whatever became of it."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._entries = inner.list("", Deadline.after(30), None, 10_000).entries

    def around(self, op: str, items: Any, deadline: Any, proceed: Any) -> Any:
        if op != "list":
            return proceed(items)
        return ListPage([entry for entry in self._entries if entry.name.startswith(items[0])], None)


def findings_of(backend: Any, retry: Retry | None = None) -> dict[str, Finding]:
    run = Verification(backend, retry or Retry(), threads=2)
    return {finding.name: finding for finding in run.findings()}


def test_what_was_replaced_or_removed_since_it_was_listed_is_looked_at_again(folder: Place) -> None:
    short, long = identity_of("acme/one", [5000]), identity_of("acme/two", [50_000])
    names = [chunk_key(short, number).name for number in range(3)]
    for number, name in enumerate(names):
        folder.tree.write(name, record_of(chunk_key(short, number), 5000))
    with contextlib.closing(StaleList(folder.open())) as backend:
        folder.tree.remove(names[0])
        folder.tree.write(names[1], record_of(chunk_key(short, 1), 50_000))
        folder.tree.write(names[2], record_of(chunk_key(long, 2), 50_000)[:-1])
        found = findings_of(backend)
    assert found[names[0]].verdict is Verdict.GONE
    # Its manifest would call it corrupt; there is none.
    assert (found[names[1]].verdict, found[names[1]].size_bytes) == (Verdict.UNPROVEN, record_bytes(50_000))
    assert (found[names[2]].verdict, found[names[2]].flaw) == (Verdict.CORRUPT, Flaw.LENGTH)


def test_a_record_that_cannot_be_read_is_told_and_the_rest_is_verified(folder: Place, no_pauses: None) -> None:
    filled = fill(folder.tree)
    victim = sorted(filled.records)[3]
    script = [Fault("get", Raise(lambda: UnavailableError("get: I/O error")), names=lambda name: name == victim)]
    with contextlib.closing(FaultyBackend(folder.open(), script)) as backend:
        run = Verification(backend, Retry(), threads=2)
        [finding] = run
    assert (finding.name, finding.verdict, finding.problem) == (victim, Verdict.UNREADABLE, "get: I/O error")
    assert not run.is_clean
    assert run.counts[Verdict.FINE] == 15


def test_failures_that_pass_are_not_told(folder: Place, no_pauses: None) -> None:
    fill(folder.tree)
    script = [Fault("*", Raise(ConnectionResetError), probability=0.3), Fault("list", Raise(TimeoutError), times=2)]
    with contextlib.closing(FaultyBackend(folder.open(), script, seed=5)) as backend:
        run = Verification(backend, Retry(tries=20), threads=2)
        assert list(run) == []
    assert run.counts[Verdict.FINE] == 16


def test_a_store_that_goes_down_ends_the_run(folder: Place, no_pauses: None) -> None:
    fill(folder.tree, ["acme/one"], chunks=50)
    gets = [Fault("get", Raise(lambda: UnavailableError("get: nobody there")), skip=10)]
    with contextlib.closing(FaultyBackend(folder.open(), gets)) as backend:
        run = Verification(backend, Retry(tries=2))
        with pytest.raises(UnavailableError, match="20 records in succession could not be read; the last: get: nobody there"):
            list(run)
        assert run.counts[Verdict.UNREADABLE] == 20
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("kvstore-verify")] == []


def test_json_is_whole_when_the_run_is_broken_off(
    folder: Place, kvstore: Command, monkeypatch: pytest.MonkeyPatch, no_pauses: None
) -> None:
    filled = fill(folder.tree)
    DAMAGES[0].do(folder.tree, filled)
    with contextlib.closing(folder.open()) as backend:
        entries = backend.list("", Deadline.after(30), None, 1000).entries

    def one_page(_: Any, prefix: str, deadline: Deadline, cursor: str | None, limit: int) -> ListPage:
        if cursor is not None:
            raise UnavailableError("list: the store is down")
        return ListPage([entry for entry in entries if entry.name.startswith(prefix)], "more")

    monkeypatch.setattr("kvstore_sdk_backends.fs.FsBackend.list", one_page)
    ran = kvstore("verify", folder, "--json", "--threads", "1")
    assert ran.code == 1
    found = json.loads(ran.out)
    assert found["error"] == "list: the store is down"
    assert ran.err == "kvstore: list: the store is down\n"


def test_no_more_calls_run_at_one_time_than_the_backend_allows(folder: Place) -> None:
    fill(folder.tree, ["acme/one"], chunks=30)

    class Narrow(BackendWrapper):
        """Two calls at most."""

        running = most = 0
        lock = threading.Lock()

        @property
        def capabilities(self) -> Any:
            return replace(self.inner.capabilities, max_concurrency=2)

        def around(self, op: str, items: Any, deadline: Any, proceed: Any) -> Any:
            if op != "get":
                return proceed(items)
            with self.lock:
                self.running += 1
                self.most = max(self.most, self.running)
            try:
                return proceed(items)
            finally:
                with self.lock:
                    self.running -= 1

    with contextlib.closing(Narrow(folder.open())) as backend:
        assert list(Verification(backend, Retry(), threads=16)) == []
        assert 1 <= backend.most <= 2


def test_odd_names_do_not_reach_a_terminal(folder: Place, kvstore: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in backends list none; a vendor's may."""
    from kvstore_sdk.backend import ListEntry

    page = ListPage([ListEntry("\x1b[2J\u202ename\udcff\n", 1)], None)
    monkeypatch.setattr("kvstore_sdk_backends.fs.FsBackend.list", lambda *_: page)
    for command in ("ls", "stat", "verify"):
        text = kvstore(command, folder).out
        assert all(" " <= char <= "~" or char == "\n" for char in text)
        assert "\\x1b[2J\\u202ename\\udcff\\n" in text
        assert json.loads(kvstore(command, folder, "--json").out)
    assert isinstance(folder.tree, FolderTree)
