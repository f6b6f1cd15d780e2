"""Text that a backend has a say in, made fit for terminals and reports: not without bound, and nothing in it that a terminal obeys."""

from __future__ import annotations

__all__ = ["plain"]

SHOWN = 2000
"""Characters of a message: what people read of it, and a report may hold a hundred times."""


def plain(text: str, most: int = SHOWN) -> str:
    """The text in at most so many characters, by leaving out its middle; of what cannot be printed all but line ends and tabs is escaped.

    Secrets have to be out of it before: half of one is not recognised any more.
    """
    if len(text) > most:
        head, tail = text[: most // 2], text[len(text) - most // 2 :]
        text = f"{head} ... {len(text) - len(head) - len(tail)} characters more ... {tail}"
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode() for one in text)
