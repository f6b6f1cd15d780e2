"""Whether a node that says Hello can use what is served here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore_sdk.backend import RecordSource
from kvstore_sdk_backends.p2p.messages import VERSION, VERSIONS, Hello

__all__ = ["path_for", "why_unfit", "wrong_version"]


def path_for(hello: Hello, offered: Sequence[str]) -> str:
    """The way data takes: of those that are offered here the one that the asker likes best; empty: none."""
    return next((path for path in hello.paths if path in offered), "")


def wrong_version(versions: tuple[int, int]) -> tuple[str, str]:
    """The refusal of an asker that speaks these, in a Hello of whatever version."""
    return "version", f"this node speaks versions {VERSIONS[0]} to {VERSIONS[1]}, the other one {versions[0]} to {versions[1]}"


def why_unfit(
    hello: Hello, is_own: Callable[[bytes], bool], sources: Sequence[RecordSource], offered: Sequence[str], usual: Sequence[str]
) -> tuple[str, str] | None:
    """Why there can be no session: code and text of the refusal. None: there can be one.

    Namespace and layout are compared where both sides know theirs. Records of another namespace have other names, and would not be found
    anyway; said here, somebody learns of it. `offered`: ways that data may take now. `usual`: all there are when nothing is the matter.
    """
    if not hello.versions[0] <= VERSION <= hello.versions[1]:
        return wrong_version(hello.versions)
    if is_own(hello.node):
        return "self", "this is the same node"
    known = list(sources)
    for field, theirs, ours in (
        ("namespace", hello.namespace, [source.namespace for source in known if source.namespace]),
        ("layout", hello.layout, [source.layout for source in known if source.layout]),
    ):
        if theirs and ours and theirs not in ours:
            text = f"{field} {theirs} is not {ours[0]}, which is served here: another model, or an engine that is set up in another way"
            return field, text
    if not path_for(hello, offered) and path_for(hello, usual):
        return "busy", "the data plane of this node is being restarted, and the other one moves data over nothing else"
    if not path_for(hello, offered):
        return "path", f"the other node moves data over {' or '.join(hello.paths)}, this one over {' or '.join(usual)}"
    return None
