"""The command `kvstore`: one module a command."""

from kvstore_sdk.cli.command import main

__all__ = ["main"]
