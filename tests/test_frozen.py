"""What was written once by a frozen version of the record format or of the protocol is read as it was, for ever."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"
FROZEN = {
    "identities-v1.json": "fef50e2481ae0e3ab673a6d91678ceb386833058acde35d9c57306ba25acdffb",
    "keys-v1.json": "4f15590e20f4181f29ecb88c4393dbf741f7fc267c0e485bbb57c0f2ba970015",
    "p2p-v1.json": "150053e0004d04a875f90be312defa7eb70248ddb287215b4a4502cc6825be09",
    "record-v1.bin": "49f76b5e30630cfeec349273465b9b5ad4039436f4c3c7051d0884e15d66a454",
    "records-v1.json": "a924e5f6001b27a858fd36741b9b67ea15f7795fef6188f1dfcf05d22bb8be1e",
}
"""SHA-256 of each golden file. The files of a new version are added with it; none is ever changed or taken away."""


@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_file_is_what_it_was(name: str) -> None:
    assert hashlib.sha256((GOLDEN / name).read_bytes()).hexdigest() == FROZEN[name]


def test_every_golden_file_is_frozen() -> None:
    """With the first commit that has it. Until then whoever makes a new version deletes its files, so that `make golden` writes them."""
    assert {path.name for path in GOLDEN.glob("*.*") if path.suffix != ".py"} == set(FROZEN)
