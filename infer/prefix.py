"""Which beginnings of prompts have been read already: snapshots by the tokens they cover, within a budget of bytes.

A snapshot is a lane's recurrent state at one position and the ids of the pages that hold the tokens up to it, so a
prompt that begins with those tokens goes on from there. The least recently used go first. Nothing here touches the
device: what a snapshot *is* stays with the caller.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Tokens = np.ndarray


@dataclass
class Entry:
    """One kept prefix."""

    tokens: Tokens
    # pages that hold the tokens, the last of them perhaps in part; this entry holds a reference to each
    pages: tuple[int, ...]
    # what `restore` takes
    snapshot: Any
    # False until the host has seen that its values are finite: until then nobody may build on it
    ready: bool = False
    last_used: int = field(default=0)


def common_length(left: Tokens, right: Tokens) -> int:
    """Length of the common beginning of two token arrays."""
    size = min(len(left), len(right))
    differ = np.nonzero(left[:size] != right[:size])[0]
    return int(differ[0]) if len(differ) else size


class PrefixCache:
    """Snapshots by prefix. `entry_bytes` each, at most `budget` bytes together; a budget of 0 keeps none."""

    def __init__(self, budget: int, entry_bytes: int, give_back: Callable[[Iterable[int]], None]) -> None:
        """`give_back` is told which pages an entry let go of."""
        self.capacity = budget // max(1, entry_bytes)
        self._give_back = give_back
        self._entries: dict[bytes, Entry] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._entries)

    def holds(self, tokens: Tokens) -> bool:
        """Whether exactly these tokens are kept, or about to be."""
        return tokens.tobytes() in self._entries

    def add(self, tokens: Tokens, pages: Sequence[int], snapshot: Any) -> Entry | None:
        """Keeps a snapshot whose pages the caller has taken a reference to for it; None, and the pages given back, when
        there is no budget or the prefix is kept already."""
        key = tokens.tobytes()
        if self.capacity == 0 or key in self._entries:
            self._give_back(pages)
            return None
        while len(self._entries) >= self.capacity:
            self.evict()
        entry = Entry(tokens.copy(), tuple(pages), snapshot)
        self._touch(entry)
        self._entries[key] = entry
        return entry

    def find(self, prompt: Tokens) -> Entry | None:
        """The longest ready prefix of the prompt, the whole of it included."""
        for length in sorted({len(e.tokens) for e in self._entries.values() if e.ready}, reverse=True):
            entry = self._entries.get(prompt[:length].tobytes()) if length <= len(prompt) else None
            if entry is not None and entry.ready:
                self._touch(entry)
                return entry
        return None

    def branch_points(self, prompt: Tokens) -> set[int]:
        """Lengths at which the prompt parts from a prefix that is kept: worth a snapshot, for it came up twice."""
        return {common_length(prompt, entry.tokens) for entry in self._entries.values()}

    def evict(self, keep: Entry | None = None) -> bool:
        """Drops the least recently used entry, `keep` apart; False if there is none."""
        others = [entry for entry in self._entries.values() if entry is not keep]
        if not others:
            return False
        self.drop(min(others, key=lambda entry: entry.last_used))
        return True

    def drop(self, entry: Entry) -> None:
        """Forgets an entry, if it is still kept, and gives its pages back."""
        if self._entries.get(entry.tokens.tobytes()) is entry:
            del self._entries[entry.tokens.tobytes()]
            self._give_back(entry.pages)

    def clear(self) -> None:
        """Forgets everything."""
        while self.evict():
            pass

    def _touch(self, entry: Entry) -> None:
        self._clock += 1
        entry.last_used = self._clock
