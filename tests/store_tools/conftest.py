"""Stores that tools work on: a folder and a bucket, each with its tree, and the command itself."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore_sdk.cli import main

sys.path.insert(0, str(Path(__file__).parents[1] / "backends/s3"))
sys.path.insert(0, str(Path(__file__).parent))

from damage import BucketTree, FolderTree, Tree
from places import SECRET_VARIABLE, Bucket, Place, Ran
from s3_server import SECRET_ACCESS_KEY, S3Server

_buckets = itertools.count()


@pytest.fixture
def kvstore(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs the command in this process: `kvstore("ls", place, "--json")`, where a place stands for its URL and options."""

    def run(command: str, place: Place, *more: str) -> Ran:
        code = main([command, place.url, *place.arguments(), *more])
        printed = capsys.readouterr()
        return Ran(code, printed.out, printed.err)

    return run


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One server for all tests; each has a bucket of its own."""
    for needed in ("s3fs", "moto", "boto3"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[[], Place]:
    """Makes empty stores in folders, which the backend knows for its own."""
    numbers = itertools.count()

    def make() -> Place:
        root = tmp_path / f"kv{next(numbers)}"
        place = Place(root.as_uri(), FolderTree(root))
        place.open().close()
        return place

    return make


@pytest.fixture
def make_bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Place]:
    """Makes empty stores in buckets of a server that starts with the first of them."""
    monkeypatch.setenv(SECRET_VARIABLE, SECRET_ACCESS_KEY)

    def make() -> Place:
        server: S3Server = request.getfixturevalue("s3_server")
        bucket = server.make_bucket(f"tools-{next(_buckets)}")
        return Bucket.at(server.endpoint, bucket, BucketTree(server.client(), bucket, "kv"))

    return make


@pytest.fixture(params=["fs", "s3"])
def make_place(request: pytest.FixtureRequest) -> Callable[[], Place]:
    """Makes stores of both kinds in turn."""
    make: Callable[[], Place] = request.getfixturevalue({"fs": "make_folder", "s3": "make_bucket"}[request.param])
    return make


@pytest.fixture
def place(make_place: Callable[[], Place]) -> Place:
    """An empty store of either kind."""
    return make_place()


@pytest.fixture
def tree(place: Place) -> Tree:
    made: Tree = place.tree
    return made
