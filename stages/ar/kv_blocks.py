"""Who owns which page of the KV pool. Pure: numbers in, numbers out; the tensors behind them are the runner's.

A page (block) holds the keys and values of `size` consecutive tokens of one sequence, in every layer. Page 0 is nobody's:
tables are padded with it. A page that is full may be sealed under the hash of all tokens up to its end; a sequence that
starts with the same tokens then shares it instead of computing it again.

Invariants: every page but 0 is in exactly one of three states: free (no content worth keeping), cached (sealed, no owner;
the least recently used one is given away first when free pages run out), or owned by one or more sequences. A hash names
one page. Shared pages are full, so nobody ever writes into a page with two owners.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

NULL: Final = 0
"""The page that is nobody's."""

Hash = bytes


def hash_blocks(tokens: Sequence[int], size: int, *, known: Sequence[Hash] = (), salt: str = "") -> list[Hash]:
    """The hash of each full page of `tokens`; `known` are those of the first pages, if they are there already.

    Each covers all tokens before it, and `salt`: tenants with different salts never share. BLAKE2b of 16 bytes, so that
    nobody can make a prompt that hits another's page.
    """
    hashes = list(known)
    parent = hashes[-1] if hashes else hashlib.blake2b(salt.encode(), digest_size=16).digest()
    for number in range(len(hashes), len(tokens) // size):
        chunk = array("q", tokens[number * size : (number + 1) * size]).tobytes()
        parent = hashlib.blake2b(parent + chunk, digest_size=16).digest()
        hashes.append(parent)
    return hashes


class KvBlocks:
    """`count` pages of `size` tokens, page 0 included."""

    def __init__(self, count: int, size: int) -> None:
        if count < 2 or size < 1:
            raise ValueError(f"a KV pool needs at least two pages of one token, not {count} of {size}")
        self.count: Final = count
        self.size: Final = size
        self._free = list(range(count - 1, 0, -1))  # a stack: pages used last are used first, they are warm
        self._owners = [0] * count
        self._hash_of: dict[int, Hash] = {}
        self._sealed: dict[Hash, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # sealed pages without an owner, least recently used first

    @property
    def usable(self) -> int:
        """Pages that sequences can have at all."""
        return self.count - 1

    @property
    def available(self) -> int:
        """Pages that can be had now."""
        return len(self._free) + len(self._cached)

    @property
    def owned(self) -> int:
        """Pages that sequences have."""
        return self.usable - self.available

    @property
    def cached(self) -> int:
        """Pages that are kept only because somebody may want their content again."""
        return len(self._cached)

    def pages_for(self, tokens: int) -> int:
        """How many pages hold so many tokens."""
        return -(-tokens // self.size)

    def find(self, hashes: Sequence[Hash]) -> list[int]:
        """The pages of the longest known start of `hashes`."""
        pages = []
        for one in hashes:
            page = self._sealed.get(one)
            if page is None:
                break
            pages.append(page)
        return pages

    def idle(self, pages: Sequence[int]) -> int:
        """How many of `pages` count as available now, and would not once they are shared."""
        return sum(page in self._cached for page in pages)

    def share(self, pages: Sequence[int]) -> None:
        """One more owner for each of these pages, which `find` has just given."""
        for page in pages:
            if self._owners[page] == 0:
                del self._cached[page]
            self._owners[page] += 1

    def allocate(self, number: int) -> list[int]:
        """Pages for one owner. Raises `MemoryError` if there are fewer than `number`: ask `available` first."""
        if number > self.available:
            raise MemoryError(f"{number} KV pages are wanted, {self.available} can be had")
        pages = []
        for _ in range(number):
            page = self._free.pop() if self._free else self._evict()
            self._owners[page] = 1
            pages.append(page)
        return pages

    def seal(self, page: int, content: Hash) -> None:
        """Say that `page` is full and holds `content`. A content that has a page already keeps that one."""
        if content not in self._sealed and page not in self._hash_of:
            self._sealed[content] = page
            self._hash_of[page] = content

    def sole(self, page: int) -> bool:
        """Whether the page has one owner only."""
        return self._owners[page] == 1

    def unseal(self, pages: Sequence[int]) -> None:
        """Nobody is to find these pages any more."""
        for page in pages:
            content = self._hash_of.pop(page, None)
            if content is not None:
                del self._sealed[content]

    def release(self, pages: Sequence[int]) -> None:
        """One owner less. The end of a sequence is given away before its start, which more others may share."""
        for page in reversed(pages):
            self._owners[page] -= 1
            if self._owners[page]:
                continue
            if page in self._hash_of:
                self._cached[page] = None
            else:
                self._free.append(page)

    def forget(self) -> int:
        """Drop every cached page; those in use lose their hash too, so nobody finds old content. How many were known."""
        known = len(self._sealed)
        self._sealed.clear()
        self._hash_of.clear()
        self._free.extend(self._cached)
        self._cached.clear()
        return known

    def check(self) -> None:
        """Raise `AssertionError` unless the invariants hold. For tests."""
        free, cached = set(self._free), set(self._cached)
        owned = {page for page in range(1, self.count) if self._owners[page]}
        assert len(free) == len(self._free), "a page is free twice"
        assert len(free) + len(cached) + len(owned) == self.usable, "a page is in two states"
        assert free | cached | owned == set(range(1, self.count)), "a page is lost"
        assert min(self._owners) >= 0, "a page was released too often"
        assert self._owners[NULL] == 0, "page 0 has an owner"
        assert {page: one for one, page in self._sealed.items()} == self._hash_of, "hashes and pages disagree"
        assert cached <= set(self._hash_of), "a cached page has no hash"
        assert not (free & set(self._hash_of)), "a free page has a hash"

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._sealed[self._hash_of.pop(page)]
        return page
