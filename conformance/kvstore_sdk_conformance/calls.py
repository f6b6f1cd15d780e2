"""The last calls of a check, as lines of Python, and the script that shows again what they showed."""

from __future__ import annotations

import re
import string
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Calls", "Script"]

KEPT = 24
"""Calls: what people read."""
NAMED = 8
"""So many names are written out. More of them would be longer than the script, and are drawn anew."""
LINE = 300
_DEFINITION = re.compile(r"(\w+) = (\w+)\.(?:open|elsewhere)\(\)$")
_NAME = re.compile(r"'v1/[^']{40,}'")
_NUMBERED = re.compile(r"names\[(\d+)\]")
_ITEM = r"\(names\[\d+\], (?:\d+|Record\(size=\d+, tag=-?\d+\))\)"
_ITEMS = re.compile(rf"\[{_ITEM}(?:, {_ITEM})+\]")
_ROW = re.compile(r"names\[\d+\](?:, names\[\d+\])+")
_PUT = re.compile(r"\(names\[(\d+)\], Record\(size=(\d+), tag=(-?\d+)\)\)")
_GET = re.compile(r"\(names\[(\d+)\], (\d+)\)")


@dataclass(frozen=True)
class Script:
    """Lines of Python, of which those that are comments say what they cannot.

    Attributes:
        lines: To follow on `store = Store(...)`.
        is_whole: Whether they show it all: no call before them, nothing that only a comment says.
    """

    lines: Sequence[str]
    is_whole: bool


class Calls:
    """The last calls. What opened a location is kept as long as it is used."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._kept: deque[str] = deque()
        self._defined: dict[str, str] = {}
        self._dropped = False
        self._views = self._places = 0

    def append(self, line: str) -> None:
        self._kept.append(line)
        if len(self._kept) > KEPT:
            old = self._kept.popleft()
            if definition := _DEFINITION.match(old):
                self._defined[definition[1]] = old
            else:
                self._dropped = True

    def extend(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.append(line)

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines())

    def new_view(self) -> str:
        """A letter for a view; after 26 of them the first one again."""
        self._views += 1
        return string.ascii_lowercase[(self._views - 1) % 26]

    def new_place(self) -> str:
        """What another location is called."""
        self._places += 1
        return f"elsewhere{self._places if self._places > 1 else ''}"

    def script(self) -> Script:
        """What can be pasted below `store = Store(...)`."""
        lines = self._lines()
        names = list(dict.fromkeys(name for line in lines for name in _NAME.findall(line)))
        if len(names) <= NAMED:
            variables = {name: f"n{number}" for number, name in enumerate(names, 1)}
            head = [f"{variable} = {name}" for name, variable in variables.items()]
        else:
            variables = {name: f"names[{number}]" for number, name in enumerate(names)}
            head = [f"names = store.names({len(names)})"]
        short = [_shorter(_NAME.sub(lambda found: variables[found[0]], line)) for line in lines]
        whole = not self._dropped and not any(line.startswith("#") or line.endswith(_CUT) for line in short)
        return Script([*head, *short], whole)

    def _lines(self) -> list[str]:
        kept = list(self._kept)
        used = {word for line in kept for word in re.findall(r"\b\w+(?=\.)", line)} - {"store"}
        used |= {found[2] for label in used if (found := _DEFINITION.match(self._defined.get(label, "")))}
        return [*(line for label, line in self._defined.items() if label in used), *kept]


_CUT = " # and so on"


def _shorter(line: str) -> str:
    """Items and names that follow one another are said as such; what is longer all the same is cut, as a comment."""
    line = _ITEMS.sub(lambda found: _comprehension(found[0]), line)
    line = _ROW.sub(lambda found: _slice(found[0]), line)
    return line if len(line) <= LINE else f"# {line[: LINE - 20]} ...{_CUT}"


def _comprehension(items: str) -> str:
    if puts := _PUT.findall(items):
        first, size, tag = puts[0]
        row = _are_in_a_row([int(number) for number, _, _ in puts])
        steps = {int(other) - int(tag) - place for place, (_, _, other) in enumerate(puts)}
        if not row or {one for _, one, _ in puts} != {size}:
            return items
        some = f"names[{first}:{int(first) + len(puts)}]"
        if steps == {0}:
            return f"[(name, Record(size={size}, tag={tag} + number)) for number, name in enumerate({some})]"
        return f"[(name, Record(size={size}, tag={tag})) for name in {some}]" if {one for _, _, one in puts} == {tag} else items
    gets = _GET.findall(items)
    first, size = gets[0]
    if not _are_in_a_row([int(number) for number, _ in gets]) or {one for _, one in gets} != {size}:
        return items
    return f"[(name, {size}) for name in names[{first}:{int(first) + len(gets)}]]"


def _slice(row: str) -> str:
    numbers = [int(number) for number in _NUMBERED.findall(row)]
    return f"*names[{numbers[0]}:{numbers[-1] + 1}]" if _are_in_a_row(numbers) else row


def _are_in_a_row(numbers: Sequence[int]) -> bool:
    return list(numbers) == list(range(numbers[0], numbers[0] + len(numbers)))
