"""`kvstore keygen`: a key for a group of nodes."""

from __future__ import annotations

import argparse
from typing import Any

from kvstore_sdk.backend.factories import load_factory

__all__ = ["add_command"]

_WRITE_KEY = "kvstore_sdk_backends.p2p.keys:write_key"
"""By name, like every backend: nothing of it is imported before it is used."""


def add_command(commands: Any) -> None:
    """Add this command to the parser."""
    text = (
        "Makes a key and writes it to a new file that nobody else can read. Nodes of the backend p2p that have the same file as their "
        "key_file are a group: they talk to each other, encrypted, and to nobody else."
    )
    parser: argparse.ArgumentParser = commands.add_parser("keygen", help="make the key of a group of p2p nodes", description=text)
    parser.add_argument("file", metavar="FILE", help="that does not exist yet")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write it, and say what to do with it."""
    load_factory("keygen", "file", _WRITE_KEY)("keygen", arguments.file)
    print(f"{arguments.file}: copy it to each node, mode 0600, and name it there as key_file. Whoever can read it is a member.")
    return 0
