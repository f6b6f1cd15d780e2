"""What a request is told of a chunk, and for how long it holds."""

from __future__ import annotations

import gc
import sys
import time
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore_sdk.tier import Lookup
from kvstore_sdk.tier import lookups as module
from kvstore_sdk.tier.lookups import LookupTable
from kvstore_sdk.tier.probe import Probe

TIMEOUT_S = 2.0
HIT, MISS, PENDING = Lookup.HIT, Lookup.MISS, Lookup.PENDING


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Table(LookupTable):
    """A table with a clock that a test turns."""

    def __init__(self, *, ttl_s: float = 60.0, max_hits: int = 1, max_keys: int = 1000, **options: Any) -> None:
        self.clock = Clock()
        super().__init__(timeout_s=TIMEOUT_S, ttl_s=ttl_s, max_keys=max_keys, max_hits=max_hits, clock=self.clock, **options)

    def turn(self, seconds: float) -> None:
        """Time passes, and a step begins."""
        self.clock.now_s += seconds
        self.now_s = self.clock.now_s
        self.expire()

    def look_up_without_a_call(self, request: str, key: bytes) -> Lookup:
        """As `told` says that a caller may who looks up very often."""
        told = self.told(request)
        if key not in told:
            if self.present.get(key, 0.0) > self.now_s:
                told[key] = self.max_hits - 1
                self.hits += 1
                return HIT
            return self.ask(request, key)
        if told[key] and key in self.present:
            told[key] -= 1
            return HIT
        return self.lookup(request, key)

    def sent(self) -> list[tuple[Probe, bytes]]:
        """What is asked now, key by key."""
        return [(probe, key) for probe in self.take_unsent() for key in probe.keys if key not in probe.over]

    def answer_one(self, asked: tuple[Probe, bytes], present: bool | None) -> bool:
        """As the backend's answer to one of them. Returns whether it was news that it is gone."""
        probe, key = asked
        return self.answer(probe, [key], present) == [key]

    def answer_all(self, present: bool | None) -> None:
        for probe in self.take_unsent():
            self.answer(probe, probe.keys, present)


@pytest.fixture
def table() -> Table:
    return Table()


class Question:
    """A question to the backend, as the model sees it."""

    def __init__(self, key: bytes, asked_s: float, news: int) -> None:
        self.key = key
        self.asked_s = asked_s
        self.news = news
        self.waiting: set[str] = set()


class Model:
    """What the table has to say, from a log of all that happened. Slow and plain on purpose."""

    def __init__(self, ttl_s: float, max_hits: int) -> None:
        self.ttl_s, self.max_hits = ttl_s, max_hits
        self.now_s = 1000.0
        self.log: dict[bytes, list[str]] = {}
        self.until_s: dict[bytes, float] = {}
        self.bad: set[bytes] = set()
        self.verdict: dict[tuple[str, bytes], int] = {}
        self.questions: dict[bytes, Question] = {}
        self.requests: set[str] = set()
        self.timeouts = self.hits = self.misses = 0

    def news(self, key: bytes) -> list[str]:
        return self.log.setdefault(key, [])

    def decide(self, request: str, key: bytes, present: bool) -> None:
        if request in self.requests and (request, key) not in self.verdict:
            self.verdict[request, key] = self.max_hits if present else 0
            self.hits += present
            self.misses += not present

    def lookup(self, request: str, key: bytes) -> Lookup:
        self.requests.add(request)
        if (request, key) not in self.verdict:
            if self.until_s.get(key, 0) > self.now_s:
                self.decide(request, key, True)
            elif key in self.bad:
                self.decide(request, key, False)
            else:
                question = self.questions.setdefault(key, Question(key, self.now_s, len(self.news(key))))
                question.waiting.add(request)
                if self.now_s - question.asked_s <= TIMEOUT_S:
                    return PENDING
                self.time_out(question)
        left = self.verdict[request, key]
        if left and key in self.until_s:
            self.verdict[request, key] -= 1
            return HIT
        self.verdict[request, key] = 0
        return MISS

    def refuse(self, request: str, key: bytes) -> None:
        self.requests.add(request)
        self.decide(request, key, False)
        self.verdict[request, key] = 0

    def answer(self, question: Question, present: bool | None) -> None:
        if self.questions.get(question.key) is not question:
            return
        key = question.key
        del self.questions[key]
        later = self.news(key)[question.news :]
        if later:
            # What happened after the question is newer than the answer to it.
            present = later[-1] == "there"
        elif present:
            self.believe(key)
        else:
            self.until_s.pop(key, None)
        for request in question.waiting:
            self.decide(request, key, bool(present))

    def time_out(self, question: Question) -> None:
        self.timeouts += 1
        self.answer(question, None)

    def believe(self, key: bytes) -> None:
        self.until_s[key] = self.now_s + self.ttl_s

    def there(self, key: bytes, *, fresh: bool) -> None:
        if fresh:
            self.bad.discard(key)
        if key not in self.bad:
            self.news(key).append("there")
            self.believe(key)

    def lost(self, key: bytes, *, bad: bool, gone: bool) -> None:
        self.news(key).append("lost")
        self.until_s.pop(key, None)
        if gone:
            self.bad.discard(key)
            if bad:
                self.bad.add(key)

    def end_request(self, request: str, unsent: set[bytes]) -> None:
        self.requests.discard(request)
        for told in [told for told in self.verdict if told[0] == request]:
            del self.verdict[told]
        for key in unsent:
            if (question := self.questions.get(key)) is not None:
                question.waiting &= self.requests
                if not question.waiting:
                    del self.questions[key]

    def turn(self, seconds: float) -> None:
        self.now_s += seconds
        for question in [question for question in self.questions.values() if self.now_s - question.asked_s > TIMEOUT_S]:
            self.time_out(question)

    def clear(self) -> None:
        for question in list(self.questions.values()):
            self.answer(question, None)
        self.until_s.clear()
        self.bad.clear()
        self.verdict = dict.fromkeys(self.verdict, 0)


# Few of each, so that much happens to one of them.
KEYS = st.sampled_from([b"a", b"b"])
REQUESTS = st.sampled_from(["r", "s"])


class TableAgainstModel(RuleBasedStateMachine):
    """Whatever happens in whatever order, the table and the model say the same."""

    @initialize(ttl_s=st.sampled_from([0.0, 3.0, 60.0]), max_hits=st.integers(1, 3))
    def begin(self, ttl_s: float, max_hits: int) -> None:
        self.table = Table(ttl_s=ttl_s, max_hits=max_hits)
        self.model = Model(ttl_s, max_hits)
        # Questions that were sent and not answered: ours and the model's.
        self.open: list[tuple[Probe, bytes, Question]] = []
        self.unsent: dict[str, set[bytes]] = {}
        self.all_sent: list[tuple[Probe, bytes]] = []
        self.history: dict[tuple[str, bytes], list[Lookup]] = {}

    @rule(request=REQUESTS, key=KEYS, quickly=st.booleans())
    def look_up(self, request: str, key: bytes, quickly: bool) -> None:
        known = key in self.model.questions
        answer = (self.table.look_up_without_a_call if quickly else self.table.lookup)(request, key)
        assert answer is self.model.lookup(request, key)
        self.history.setdefault((request, key), []).append(answer)
        if not known and key in self.model.questions:
            self.unsent.setdefault(request, set()).add(key)

    @rule(request=REQUESTS, key=KEYS)
    def refuse(self, request: str, key: bytes) -> None:
        assert self.table.refuse(request, key) is MISS
        self.model.refuse(request, key)
        self.history.setdefault((request, key), []).append(MISS)

    @rule(request=REQUESTS, key=KEYS)
    def ask_again(self, request: str, key: bytes) -> None:
        known = key in self.model.questions
        self.model.until_s.pop(key, None)
        answer = self.table.ask_again(request, key)
        assert answer is self.model.lookup(request, key)
        self.history.setdefault((request, key), []).append(answer)
        if not known and key in self.model.questions:
            self.unsent.setdefault(request, set()).add(key)

    @rule()
    def send(self) -> None:
        sent = self.table.sent()
        self.all_sent += sent
        # A request that ended handed its questions on, so who sends does not matter; what is sent does.
        for probe, key in sent:
            self.open.append((probe, key, self.model.questions[key]))
        self.unsent.clear()

    @precondition(lambda self: self.open)
    @rule(data=st.data(), present=st.sampled_from([True, False, None]))
    def answer(self, data: st.DataObject, present: bool | None) -> None:
        # One question, or all that are open of its probe at once, as a call answers them.
        probe, first, _ = data.draw(st.sampled_from(self.open))
        whole = data.draw(st.booleans())
        answered = [asked for asked in self.open if asked[0] is probe and (whole or asked[1] == first)]
        self.open = [asked for asked in self.open if asked not in answered]
        self.table.answer(probe, [key for _, key, _ in answered], present)
        for _, _, question in answered:
            self.model.answer(question, present)

    @rule(keys=st.lists(KEYS, unique=True, max_size=2))
    def stored(self, keys: list[bytes]) -> None:
        self.table.stored(tuple(keys))
        for key in keys:
            self.model.there(key, fresh=True)

    @rule(keys=st.lists(KEYS, unique=True, max_size=2))
    def seen(self, keys: list[bytes]) -> None:
        self.table.seen(tuple(keys))
        for key in keys:
            self.model.there(key, fresh=False)

    @rule(key=KEYS, what=st.sampled_from([(False, False), (False, True), (True, True)]))
    def lost(self, key: bytes, what: tuple[bool, bool]) -> None:
        bad, gone = what
        self.table.lost(key, bad=bad, gone=gone)
        self.model.lost(key, bad=bad, gone=gone)

    @rule(request=REQUESTS)
    def end_request(self, request: str) -> None:
        self.table.end_request(request)
        unsent = self.unsent.pop(request, set())
        self.model.end_request(request, unsent)
        # Those that somebody else waits for are now theirs.
        for key in unsent & self.model.questions.keys():
            self.unsent.setdefault(min(self.model.questions[key].waiting), set()).add(key)
        for told in [told for told in self.history if told[0] == request]:
            del self.history[told]

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.5, 3.5, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.table.turn(seconds)
        self.model.turn(seconds)
        self.drop_answered()

    @rule()
    def clear(self) -> None:
        self.table.clear()
        self.model.clear()
        self.drop_answered()

    def drop_answered(self) -> None:
        self.unsent = {request: keys & self.model.questions.keys() for request, keys in self.unsent.items()}

    @invariant()
    def they_agree(self) -> None:
        if not hasattr(self, "table"):
            return
        assert self.table.pending == len(self.model.questions)
        assert (self.table.hits, self.table.misses, self.table.timeouts) == (self.model.hits, self.model.misses, self.model.timeouts)
        for key in (b"a", b"b"):
            assert self.table.is_bad(key) == (key in self.model.bad)
            assert self.table.is_present(key) == (self.model.until_s.get(key, 0) > self.model.now_s)

    @invariant()
    def a_request_hears_pending_then_hits_then_misses(self) -> None:
        if not hasattr(self, "table"):
            return
        for heard in self.history.values():
            order = {PENDING: 0, HIT: 1, MISS: 2}
            assert heard == sorted(heard, key=order.__getitem__)
            assert heard.count(HIT) <= self.model.max_hits

    @invariant()
    def no_question_is_sent_twice(self) -> None:
        if hasattr(self, "table"):
            assert len(self.all_sent) == len({(id(probe), key) for probe, key in self.all_sent})


TestTableAgainstModel = TableAgainstModel.TestCase
TestTableAgainstModel.settings = settings(max_examples=150, stateful_step_count=40)


def test_a_miss_holds_for_the_request_that_heard_it(table: Table) -> None:
    assert table.lookup("r", b"k") is PENDING
    table.answer_all(False)
    assert table.lookup("r", b"k") is MISS
    table.stored((b"k",))
    assert table.lookup("r", b"k") is MISS
    assert table.lookup("s", b"k") is HIT


def test_a_miss_that_a_loss_made_of_a_hit_holds_too() -> None:
    table = Table(max_hits=5)
    table.stored((b"k",))
    assert table.lookup("r", b"k") is HIT
    table.lost(b"k")
    assert table.lookup("r", b"k") is MISS
    table.stored((b"k",))
    assert table.lookup("r", b"k") is MISS


def test_a_key_that_is_known_is_a_hit_until_it_is_too_old(table: Table) -> None:
    table.stored((b"k",))
    table.turn(59.9)
    assert table.lookup("r", b"k") is HIT
    table.turn(0.2)
    assert table.lookup("s", b"k") is PENDING


def test_a_failed_load_makes_the_very_next_look_up_a_miss(table: Table) -> None:
    """LIV-01"""
    table.stored((b"k",))
    assert table.lookup("r", b"k") is HIT
    table.lost(b"k", bad=True, gone=True)
    assert [table.lookup("r", b"k"), table.lookup("s", b"k")] == [MISS, MISS]
    assert not table.take_unsent()


def test_a_hundred_look_ups_of_one_request_hear_hit_once() -> None:
    """LIV-01: a chunk whose load always fails is not promoted in every step."""
    for most in (1, 3):
        table = Table(max_hits=most)
        table.stored((b"k",))
        assert [table.lookup("r", b"k") for _ in range(100)].count(HIT) == most


def test_a_late_no_does_not_overwrite_a_newer_store(table: Table) -> None:
    assert table.lookup("r", b"k") is PENDING
    [asked] = table.sent()
    table.stored((b"k",))
    assert not table.answer_one(asked, False)
    assert table.lookup("r", b"k") is HIT
    assert table.lookup("s", b"k") is HIT


def test_a_late_yes_does_not_overwrite_a_newer_loss(table: Table) -> None:
    assert table.lookup("r", b"k") is PENDING
    [asked] = table.sent()
    table.lost(b"k", bad=True, gone=True)
    table.answer_one(asked, True)
    assert table.lookup("r", b"k") is MISS
    assert table.lookup("s", b"k") is MISS


def test_what_is_never_answered_is_a_miss_in_time(table: Table) -> None:
    """LIV-02, LIV-03"""
    assert table.lookup("r", b"k") is PENDING
    table.take_unsent()
    table.turn(TIMEOUT_S)
    assert table.lookup("r", b"k") is PENDING
    table.turn(0.001)
    assert table.lookup("r", b"k") is MISS
    assert (table.timeouts, table.misses, table.pending) == (1, 1, 0)


def test_a_look_up_between_two_steps_notices_the_time_out_too(table: Table) -> None:
    assert [table.lookup("r", b"k"), table.lookup("s", b"k")] == [PENDING, PENDING]
    table.clock.now_s += TIMEOUT_S + 0.1
    assert [table.lookup("r", b"k"), table.lookup("s", b"k")] == [MISS, MISS]
    assert (table.timeouts, table.misses) == (1, 2)


def test_questions_that_nobody_looks_at_again_do_not_pile_up(table: Table) -> None:
    for number in range(1000):
        table.lookup("r", b"%d" % number)
        if number % 2:
            table.take_unsent()
    table.end_request("r")
    table.turn(TIMEOUT_S + 0.1)
    assert table.pending == 0
    assert not table.take_unsent()


def test_the_table_forgets_the_oldest_beyond_its_size() -> None:
    """Bounded, whatever is learned: what is there, what is bad, what is gone."""
    table = Table(max_keys=16)
    for number in range(1000):
        table.stored((b"there %d" % number,))
        table.lost(b"bad %d" % number, bad=True, gone=True)
    assert len(table) == 16
    assert table.is_present(b"there 999")
    assert not table.is_present(b"there 983")
    assert table.is_bad(b"bad 999")
    assert not table.is_bad(b"bad 983")
    assert len(table._gone) == 16


def test_requests_whose_end_is_never_told_are_forgotten(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_REQUESTS", 100)
    for number in range(1000):
        table.lookup(f"r{number}", b"k%d" % number)
    assert len(table._told) == 100
    # What they asked, and was not sent yet, went with them.
    assert table.pending == 100


def test_memory_of_a_request_ends_with_it(table: Table) -> None:
    table.stored((b"k",))
    gc.collect()
    before = sys.getallocatedblocks()
    for number in range(10_000):
        table.lookup(f"request {number}", b"k")
        table.end_request(f"request {number}")
    gc.collect()
    assert sys.getallocatedblocks() - before < 1000


def test_a_question_of_an_ended_request_is_sent_for_whoever_else_waits(table: Table) -> None:
    assert [table.lookup("r", b"k"), table.lookup("s", b"k"), table.lookup("r", b"l")] == [PENDING] * 3
    table.end_request("r")
    assert [key for _, key in table.sent()] == [b"k"]


def test_a_question_that_only_ended_requests_wait_for_is_not_sent(table: Table) -> None:
    assert [table.lookup("r", b"k"), table.lookup("s", b"k")] == [PENDING] * 2
    table.end_request("s")
    table.end_request("r")
    assert not table.sent()
    assert table.pending == 0


def test_each_request_has_its_questions_in_one_list(table: Table) -> None:
    """PERF-02"""
    for key in (b"1", b"2", b"3"):
        table.lookup("r", key)
    for key in (b"3", b"4"):
        table.lookup("s", key)
    assert [probe.keys for probe in table.take_unsent()] == [[b"1", b"2", b"3"], [b"4"]]


def test_clear_makes_everybody_miss(table: Table) -> None:
    """CFG-12"""
    table.stored((b"known",))
    assert table.lookup("r", b"known") is HIT
    assert table.lookup("s", b"asked") is PENDING
    [asked] = table.sent()
    table.lookup("t", b"unsent")
    table.clear()
    assert [table.lookup("r", b"known"), table.lookup("s", b"asked"), table.lookup("t", b"unsent")] == [MISS] * 3
    # The answer belongs to what was there before.
    table.answer_one(asked, True)
    assert table.lookup("u", b"asked") is PENDING


def test_after_close_everything_is_a_miss(table: Table) -> None:
    table.stored((b"k",))
    table.lookup("r", b"l")
    table.close()
    assert [table.lookup("r", b"k"), table.lookup("r", b"l"), table.lookup("s", b"m")] == [MISS] * 3
    assert table.pending == 0


@pytest.mark.parametrize("bad", [b"no", b"\0\0\0\1", b"k\0\0\0\2", b"longer\0\0\0\1", b""])
def test_what_cannot_be_a_key_is_a_miss_and_no_question_also_behind_one_that_can(bad: bytes) -> None:
    table = Table(is_key=lambda key: len(key) == 5 and key[-4:] == b"\0\0\0\1")
    good = [b"%d\0\0\0\1" % number for number in range(3)]
    assert [table.look_up_without_a_call("r", key) for key in (good[0], good[1], bad, good[2])] == [PENDING, PENDING, MISS, PENDING]
    assert [key for _, key in table.sent()] == good


def test_a_key_that_no_chunk_can_have_begins_no_question() -> None:
    table = Table(is_key=lambda key: key != b"no")
    assert table.lookup("r", b"no") is MISS
    assert table.lookup("r", b"yes") is PENDING
    assert [key for _, key in table.sent()] == [b"yes"]


def test_what_a_store_found_does_not_make_a_bad_record_good(table: Table) -> None:
    table.lost(b"k", bad=True, gone=True)
    table.seen((b"k",))
    assert table.is_bad(b"k")
    assert table.lookup("r", b"k") is MISS
    table.stored((b"k",))
    assert not table.is_bad(b"k")
    assert table.lookup("s", b"k") is HIT


def test_a_load_that_failed_for_another_reason_does_not_make_a_bad_record_good(table: Table) -> None:
    table.lost(b"k", bad=True, gone=True)
    table.lost(b"k")
    assert table.is_bad(b"k")


def test_a_loss_is_news_once_until_the_record_is_there_again(table: Table) -> None:
    """OBS-04"""
    assert table.lost(b"k", gone=True)
    assert not table.lost(b"k", gone=True)
    assert not table.lost(b"k", bad=True, gone=True)
    table.stored((b"k",))
    assert not table.lost(b"k")
    assert table.lost(b"k", bad=True, gone=True)


def test_a_question_finds_out_that_a_known_record_is_gone(table: Table) -> None:
    """OBS-04"""
    table.stored((b"k",))
    table.turn(61.0)
    assert table.lookup("r", b"k") is PENDING
    [asked] = table.sent()
    assert table.answer_one(asked, False)
    assert not table.lost(b"k", gone=True)
    assert table.lookup("s", b"k") is PENDING
    [asked] = table.sent()
    # Nobody said that it was there since.
    assert not table.answer_one(asked, False)


def test_no_answer_is_no_news_of_a_known_record(table: Table) -> None:
    table.stored((b"k",))
    table.turn(61.0)
    table.lookup("r", b"k")
    [asked] = table.sent()
    assert not table.answer_one(asked, None)


def test_what_other_threads_tell_is_heard_between_two_steps_and_not_among_the_keys_of_one(table: Table) -> None:
    """Or of a prefix the end would be a hit before the beginning: it would be fetched, and take the room of what has to come first."""
    news: list[bytes] = []

    def hear() -> None:
        table.stored(tuple(news))
        news.clear()

    table.listen(news, hear)
    chain = [b"k0", b"k1", b"k2", b"k3"]
    table.expire()
    news.append(b"k0")
    assert [table.lookup("r", key) for key in chain[:2]] == [HIT, PENDING], "what came before the step"
    news.extend(chain)
    assert [table.lookup("r", key) for key in chain[2:]] == [PENDING, PENDING], "what came in the middle of it"
    assert [table.ask("r", key) for key in (b"k4", b"k5")] == [PENDING, PENDING]
    assert [table.lookup("other", key) for key in chain] == [HIT, PENDING, PENDING, PENDING], "nor to another request"
    table.expire()
    assert [table.lookup("new", b"k3"), table.lookup("new", b"k1")] == [HIT, HIT], "in the next step they are all there"


def test_an_answer_that_came_is_heard_before_its_question_is_given_up(table: Table) -> None:
    """Also by who looks up again and again, without a step."""
    news: list[tuple[Probe, bytes]] = []

    def hear() -> None:
        while news:
            table.answer_one(news.pop(), True)

    table.listen(news, hear)
    assert table.lookup("r", b"k") is PENDING
    asked = table.sent()
    table.turn(0.0)
    assert table.lookup("r", b"k") is PENDING
    news.extend(asked)
    table.clock.now_s += TIMEOUT_S + 0.1
    assert table.lookup("r", b"k") is HIT
    assert table.timeouts == 0


def test_what_a_request_asks_for_in_a_step_counts_as_asked_with_the_first_of_it(table: Table) -> None:
    table.lookup("r", b"1")
    table.clock.now_s += 1.5
    table.lookup("r", b"2")
    table.turn(0.6)
    assert [table.lookup("r", b"1"), table.lookup("r", b"2")] == [MISS, MISS]
    assert table.timeouts == 2


def test_what_is_asked_in_the_next_step_has_its_own_time(table: Table) -> None:
    table.lookup("r", b"1")
    table.take_unsent()
    table.clock.now_s += 1.5
    table.lookup("r", b"2")
    table.turn(0.6)
    assert [table.lookup("r", b"1"), table.lookup("r", b"2")] == [MISS, PENDING]


def test_a_full_table_forgets_some_at_once_and_the_oldest_first() -> None:
    """To find the oldest costs what was forgotten before: not once for every key that is learned."""
    table = Table(max_keys=1280)
    table.stored([b"%d" % number for number in range(1281)])
    assert len(table) == 1280 - 10
    assert not table.is_present(b"10")
    assert table.is_present(b"11")


def test_one_call_answers_some_of_what_a_request_asked_and_leaves_the_rest_open(table: Table) -> None:
    for key in (b"1", b"2", b"3"):
        table.lookup("r", key)
    [probe] = table.take_unsent()
    table.answer(probe, [b"3"], True)
    assert [table.lookup("r", key) for key in (b"1", b"2", b"3")] == [PENDING, PENDING, HIT]
    # An answer that comes twice, as after a fault, changes nothing.
    table.answer(probe, [b"3", b"1"], False)
    assert [table.lookup("s", b"3"), table.lookup("r", b"1"), table.lookup("r", b"2")] == [HIT, MISS, PENDING]
    assert (table.hits, table.misses, table.pending) == (2, 1, 1)


def test_a_known_look_up_takes_microseconds(table: Table) -> None:
    """PERF-03: 5 ms for a thousand of them on the caller's thread; with room for a slow machine."""
    keys = [b"%d" % number for number in range(1000)]
    table.stored(tuple(keys))
    best_s = 1.0
    for number in range(5):
        began_s = time.perf_counter()
        for key in keys:
            table.lookup(f"r{number}", key)
        best_s = min(best_s, time.perf_counter() - began_s)
    assert best_s < 0.005
