"""What the log says of a tier's entry: which options were given, and not what."""

from __future__ import annotations

from kvstore_sdk.vllm.options import parse_tier_options


def test_the_options_that_were_given_for_the_backend_are_named() -> None:
    options = parse_tier_options("tier", {"backend": "p2p", "location": "127.0.0.1:0", "serve_bytes": "1GiB", "key_file": "/secret/place"})
    assert options.shown_given == "p2p with key_file, serve_bytes"
    # What the engine itself gives is no news.
    assert options.of_replica("tier", 3).shown_given == options.shown_given


def test_without_options_it_is_the_backend_alone() -> None:
    assert parse_tier_options("tier", {"backend": "file:///mnt/kv"}).shown_given == "file"
