"""A node reads whatever comes, and goes on serving. `make fuzz` does more of it."""

from __future__ import annotations

import pytest
from fuzz import fuzz_decoder, fuzz_socket


def test_bent_frames_are_messages_or_refused() -> None:
    count = 20_000
    seen = fuzz_decoder(count, seed=7)
    assert sum(seen.values()) == count
    assert count / 2 < seen["refused"] < count, "most are bent, and some not enough"


@pytest.mark.usefixtures("patient")
def test_a_node_that_is_sent_bent_frames_serves_the_others() -> None:
    """SEC-06"""
    count = 20_000
    counters = fuzz_socket(count, seed=7)
    assert counters["served_bad_frames"] >= count
    assert counters["served_leased_bytes_now"] == 0
