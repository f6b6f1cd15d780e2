"""A bad record is the store's fault or this host's: told apart by how many there are."""

from __future__ import annotations

import random
import threading

from kvstore_sdk.tier.trust import Trust


def test_one_bad_record_among_good_ones_is_the_stores() -> None:
    trust = Trust()
    for _ in range(100):
        assert not any(trust.verified(True) for _ in range(20))
        assert not trust.verified(False)


def test_a_host_that_reads_nothing_right_suspects_itself_and_removes_nothing() -> None:
    trust = Trust()
    suspected = [trust.verified(False) for _ in range(64)]
    assert suspected.index(True) == 7
    assert all(suspected[7:])
    assert not trust.may_remove()


def test_a_host_that_begins_to_read_wrong_removes_a_few_records_whatever_it_has_earned() -> None:
    """CAP: memory that goes bad after years of good reads must not empty the shared folder."""
    trust = Trust()
    for _ in range(10_000):
        trust.verified(True)
    removed = 0
    for _ in range(500):
        trust.verified(False)
        removed += trust.may_remove()
    assert removed == 4


def test_good_records_count_each_also_when_they_are_told_together() -> None:
    trust = Trust()
    trust.verified(True, 7)
    trust.verified(False)
    assert not trust.may_remove()
    trust.verified(True, 1)
    assert trust.may_remove()
    assert not trust.may_remove()


def test_a_few_records_do_not_make_a_verdict() -> None:
    trust = Trust()
    assert not any(trust.verified(False) for _ in range(7))


def test_half_bad_is_not_mostly_bad() -> None:
    trust = Trust()
    assert not any(trust.verified(number % 2 == 0) for number in range(100))


def test_eight_good_records_earn_one_removal() -> None:
    trust = Trust()
    for _ in range(16):
        trust.verified(True)
    assert [trust.may_remove() for _ in range(4)] == [True, True, False, False]
    for _ in range(7):
        trust.verified(True)
    assert not trust.may_remove()
    trust.verified(True)
    assert trust.may_remove()


def test_removals_are_never_more_than_an_eighth_whatever_threads_do() -> None:
    trust = Trust()
    removed: list[bool] = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(500):
            trust.verified(draw.random() < 0.7)
            removed.append(trust.may_remove())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert 0 < removed.count(True) <= 2000 * 0.75 / 8
