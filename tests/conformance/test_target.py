"""Where checks work: at locations that are new, and of which nothing stays."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from suite_runner import run_suite

from kvstore_sdk_conformance.offer import Offer
from kvstore_sdk_conformance.target import Target

NEW = r"kvstore-[0-9a-f]{16}"


@pytest.mark.parametrize(
    ("target", "location", "opened", "at", "folder"),
    [
        ("acme://h:1/0", None, f"acme://h:1/0/{NEW}", None, None),
        ("acme://h:1/0?a=b", None, rf"acme://h:1/0/{NEW}\?a=b", None, None),
        ("acme://h:1/0?prefix={fresh}", None, rf"acme://h:1/0\?prefix={NEW}", None, None),
        ("memory:", None, f"memory:{NEW}", None, None),
        ("file:///x", None, f"file:///x/{NEW}", None, f"/x/{NEW}"),
        ("file:///x%20y/{fresh}/z", None, f"file:///x%20y/{NEW}/z", None, f"/x y/{NEW}"),
        ("fs", "/x/a-{fresh}/z", "fs", f"/x/a-{NEW}/z", f"/x/a-{NEW}"),
        ("acme", "h:1/{fresh}", "acme", f"h:1/{NEW}", None),
    ],
)
def test_a_location_is_new_and_a_folder_of_its_own_is_known(
    target: str, location: str | None, opened: str, at: str | None, folder: str | None
) -> None:
    place = Target(target, {}, location).fresh()
    assert re.fullmatch(opened, place.target)
    for wanted, seen in ((at, place.location), (folder, place.folder)):
        assert (seen is None) if wanted is None else re.fullmatch(wanted, str(seen))
    assert Target(target, {}, location).fresh() != place


@pytest.mark.parametrize("form", ["location", "url", "fresh"])
def test_nothing_stays_where_the_location_was_given(tmp_path: Path, form: str) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "mine").write_text("before")
    given = tmp_path / "given"
    target = {"location": "fs", "url": f"file://{given}", "fresh": f"file://{given}/run-{{fresh}}"}[form]
    options = ["--kvstore-largest=64KiB", "--kvstore-examples=1"]
    options += [f"--kvstore-location={given}/{{fresh}}"] if form == "location" else []
    assert run_suite(target, tmp_path, "sharing", options=options).verdict("sharing") == "CONFORMANT"
    assert [file.name for file in given.iterdir()] == ["mine"]


def test_a_url_that_cannot_be_opened_with_one_more_segment_is_explained(tmp_path: Path) -> None:
    (tmp_path / "store.db").touch()
    with pytest.raises(Exception, match=r"a new segment is put at the end of the URL for each check; \{fresh\} in the URL"):
        Offer.of(Target(f"file://{tmp_path}/store.db"))
    with pytest.raises(Exception, match=r"store\.db") as raised:
        Offer.of(Target(f"file://{tmp_path}/store.db/{{fresh}}"))
    assert "segment" not in str(raised.value)
    with pytest.raises(Exception, match="is not known") as raised:
        Offer.of(Target("nosuch://x"))
    assert "segment" not in str(raised.value)
