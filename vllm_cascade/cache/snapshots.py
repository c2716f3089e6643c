# SPDX-License-Identifier: Apache-2.0
"""Prefix caching for pages that change in place: snapshots of a prompt's state.

A request overwrites its pages as it processes tokens, so requests cannot share them. A snapshot is
a copy of the pages, taken at an absolute multiple of the prefill stride inside the prompt. Every
prompt that begins with the same tokens passes through exactly this state.

Snapshots never take pages from a request. Their pages stay at the tail of vLLM's free block queue,
like vLLM's own cached blocks. They count as free and are allocated last, least recently used first.
A request that hits a snapshot copies it into its own pages before its first step.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, KVCacheBlockCopy

from vllm_cascade.policies.schedule import History, Schedule

MAX_SEEN = 1 << 14
"""Most prefix hashes remembered to find where prompts diverge."""
MAX_FOUND = 64
"""Most results of ``lookup`` that are remembered."""

Key = tuple[History, BlockHash]
"""The settings that a state depends on, and the hash of a prefix."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The state after a prefix of ``num_tokens`` tokens, in ``blocks``.

    Attributes:
        log: The scheduler's count of its evicted units in host memory; None without recall.
    """

    key: Key
    num_tokens: int
    blocks: tuple[KVCacheBlock, ...]
    log: Any = None


@dataclass
class SnapshotCounters:
    """Snapshot statistics since the engine started.

    Attributes:
        hits: Requests that started from a snapshot.
        hit_tokens: Prompt tokens that these requests did not compute.
        stored: Snapshots taken.
        evicted: Snapshots dropped because a page or host memory was needed.
        skipped: Snapshots not taken because too few pages were free.
    """

    hits: int = 0
    hit_tokens: int = 0
    stored: int = 0
    evicted: int = 0
    skipped: int = 0


@dataclass
class SnapshotStore:
    """Finds, takes and drops snapshots. It schedules copies; workers execute them.

    Attributes:
        pool: vLLM's block pool, which also holds the snapshots' pages.
        hash_block_size: Tokens per block hash of vLLM. The hashes are chained: each covers the
            tokens, LoRA adapter, cache salt and multi-modal inputs of the whole prefix.
        stride: The policy's prefill stride.
    """

    pool: BlockPool
    hash_block_size: int
    stride: int
    counters: SnapshotCounters = field(default_factory=SnapshotCounters)

    def __post_init__(self) -> None:
        self._by_key: OrderedDict[Key, Snapshot] = OrderedDict()  # least recently used first
        self._by_block: dict[int, Snapshot] = {}
        self._seen: OrderedDict[int, None] = OrderedDict()  # keys' 64-bit hashes
        self._pinned: list[KVCacheBlock] = []
        self._copies: list[KVCacheBlockCopy] = []
        self._dropped: list[int] = []
        self._found: dict[Hashable, tuple[Snapshot | None, int]] = {}

    @property
    def interval(self) -> int:
        """Tokens between possible snapshots: stride boundaries that are also hash boundaries."""
        return math.lcm(self.stride, self.hash_block_size)

    def __len__(self) -> int:
        return len(self._by_key)

    def last_boundary(self, num_prompt_tokens: int) -> int:
        """Last boundary for a snapshot in a prompt. It leaves at least one token to compute."""
        return max(num_prompt_tokens - 1, 0) // self.interval * self.interval

    def _key(self, schedule: Schedule, hashes: Sequence[BlockHash], num_tokens: int) -> Key:
        return schedule.history(num_tokens), hashes[num_tokens // self.hash_block_size - 1]

    def _prefixes(
        self, schedule: Schedule, hashes: Sequence[BlockHash], max_tokens: int
    ) -> Iterator[tuple[int, Key]]:
        """Prefix lengths up to ``max_tokens`` that allow a snapshot, longest first."""
        most = min(max_tokens, len(hashes) * self.hash_block_size)
        for num_tokens in range(most // self.interval * self.interval, 0, -self.interval):
            yield num_tokens, self._key(schedule, hashes, num_tokens)

    def lookup(
        self, schedule: Schedule, hashes: Sequence[BlockHash], max_tokens: int
    ) -> tuple[Snapshot | None, int]:
        """``find`` and, beyond that snapshot, ``junction``.

        vLLM asks again in every step while a request waits for pages. A prompt of a million tokens
        has thousands of prefixes, so results are remembered until one could change.
        """
        if not hashes:
            return None, 0
        key = schedule.number, max_tokens, len(hashes), hashes[-1]
        if key not in self._found:
            snapshot = self.find(schedule, hashes, max_tokens)
            known = snapshot.num_tokens if snapshot else 0
            if len(self._found) >= MAX_FOUND:
                self._found.clear()
            self._found[key] = snapshot, self.junction(schedule, hashes, max_tokens, known)
        return self._found[key]

    def has(self, schedule: Schedule, hashes: Sequence[BlockHash], num_tokens: int) -> bool:
        return self._key(schedule, hashes, num_tokens) in self._by_key

    def find(
        self, schedule: Schedule, hashes: Sequence[BlockHash], max_tokens: int
    ) -> Snapshot | None:
        """Find the snapshot of the longest prefix of at most ``max_tokens`` tokens."""
        prefixes = self._prefixes(schedule, hashes, max_tokens) if self._by_key else ()
        return next((self._by_key[key] for _, key in prefixes if key in self._by_key), None)

    def junction(
        self, schedule: Schedule, hashes: Sequence[BlockHash], max_tokens: int, known: int
    ) -> int:
        """Find where a prompt diverges from earlier prompts.

        Prompts with a common prefix, such as a system prompt, differ in length. A snapshot at the
        last boundary of one prompt is of no use to the others. The second such prompt shows where
        they diverge, and a snapshot at that boundary serves all later ones.

        Args:
            known: Prefix tokens that a snapshot already covers.

        Returns:
            Length of the longest prefix seen before, or 0 if it is not longer than ``known``.
        """
        for num_tokens, key in self._prefixes(schedule, hashes, max_tokens):
            if num_tokens <= known:
                break
            if hash(key) in self._seen:  # a collision only costs a useless snapshot
                return num_tokens
        return 0

    def remember(self, schedule: Schedule, hashes: Sequence[BlockHash], max_tokens: int) -> None:
        """Remember the prefixes of an admitted prompt for ``junction``."""
        self._found.clear()
        for _, key in self._prefixes(schedule, hashes, max_tokens):
            self._seen[hash(key)] = None
            self._seen.move_to_end(hash(key))
        while len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)

    def take(
        self,
        schedule: Schedule,
        hashes: Sequence[BlockHash],
        num_tokens: int,
        pages: Sequence[KVCacheBlock],
        reserved: int,
        log: Any = None,
    ) -> None:
        """Take a snapshot of a running request, unless there is one for the same prefix.

        The copy uses free pages, which include those of the least recently used snapshots. It is
        skipped if too few pages are free beyond the reserved ones: admitted requests would soon
        take the pages of the copy.

        Args:
            pages: The request's pages, which hold its state after ``num_tokens`` tokens.
            reserved: Free pages promised to admitted requests.
            log: The count of its evicted units.
        """
        key = self._key(schedule, hashes, num_tokens)
        if key in self._by_key:
            return
        if self.pool.get_num_free_blocks() - reserved < len(pages):
            self.counters.skipped += 1
            return
        blocks = tuple(self.pool.get_new_blocks(len(pages)))
        snapshot = Snapshot(key, num_tokens, blocks, log)
        self._found.clear()
        self._by_key[key] = snapshot
        self._by_block.update((block.block_id, snapshot) for block in blocks)
        self._copy(pages, blocks)
        self._pinned.extend(blocks)
        self.counters.stored += 1

    def of(self, blocks: Sequence[KVCacheBlock]) -> Snapshot:
        """The snapshot that owns ``blocks``, as ``find`` returned them."""
        snapshot = self._by_block[blocks[0].block_id]
        assert list(snapshot.blocks) == list(blocks)
        return snapshot

    def adopt(self, blocks: Sequence[KVCacheBlock], needed: int) -> list[KVCacheBlock]:
        """Provide a request with pages that will hold a snapshot's state.

        Args:
            blocks: The snapshot's pages, as ``find`` returned them.
            needed: Free pages that this request and all admitted requests may still take.

        Returns:
            New pages that a copy will fill, so that the snapshot stays. If too few pages are free
            for both, the snapshot's own pages; the snapshot is then dropped.
        """
        snapshot = self.of(blocks)
        self._by_key.move_to_end(snapshot.key)
        self.pool.touch(blocks)
        if self.pool.get_num_free_blocks() < needed:
            self._forget(snapshot)
            return list(blocks)
        self._pinned.extend(blocks)
        own = self.pool.get_new_blocks(len(blocks))
        self._copy(blocks, own)
        return own

    def end_of_step(self) -> list[KVCacheBlockCopy]:
        """Return the copies to make before this step's forward pass, and unpin all snapshots.

        The order of the copies does not matter: at most one copy writes each page, and every
        source is read before this step writes anything.
        """
        copies, self._copies = self._copies, []
        pinned, self._pinned = self._pinned, []
        self.pool.unpin_blocks(pinned, self._on_reuse)
        return copies

    @property
    def pending(self) -> bool:
        """Whether ``take_dropped`` has pages to return."""
        return bool(self._dropped)

    def take_dropped(self) -> list[int]:
        """First pages of the snapshots dropped since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def drop_oldest(self, frees: Callable[[Any], bool]) -> bool:
        """Drop the least recently used snapshot whose ``log`` passes ``frees``; False if none does.

        A snapshot that this step takes is not copied then. Its pages are free after the step.
        """
        snapshot = next((one for one in self._by_key.values() if frees(one.log)), None)
        if snapshot is None:
            return False
        own = {block.block_id for block in snapshot.blocks}
        copies = [copy for copy in self._copies if copy.dst_block_id not in own]
        taken_now = len(copies) < len(self._copies)
        self._copies = copies
        self._forget(snapshot)
        if taken_now:
            self._dropped.pop()  # no worker has heard of it
        self.counters.evicted += 1
        return True

    def clear(self) -> None:
        """Drop all snapshots and remembered prefixes. The snapshots' pages are already free."""
        self._dropped += [snapshot.blocks[0].block_id for snapshot in self._by_key.values()]
        self._by_key.clear()
        self._by_block.clear()
        self._seen.clear()
        self._found.clear()

    def _copy(self, source: Iterable[KVCacheBlock], target: Iterable[KVCacheBlock]) -> None:
        self._copies += [
            KVCacheBlockCopy(src_block_id=src.block_id, dst_block_id=dst.block_id)
            for src, dst in zip(source, target, strict=True)
        ]

    def _forget(self, snapshot: Snapshot) -> None:
        self._found.clear()
        del self._by_key[snapshot.key]
        self._dropped.append(snapshot.blocks[0].block_id)
        for block in snapshot.blocks:
            del self._by_block[block.block_id]

    def _on_reuse(self, block: KVCacheBlock) -> None:
        """Drop the snapshot that owns a page the pool has reallocated, if it still exists."""
        snapshot = self._by_block.get(block.block_id)
        if snapshot is not None:
            self._forget(snapshot)
            self.counters.evicted += 1
