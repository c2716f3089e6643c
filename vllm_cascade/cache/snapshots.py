# SPDX-License-Identifier: Apache-2.0
"""Prefix caching for pages that change in place: copies of a prompt's state at stride boundaries.

A request's pages are written over as its stream goes on, so they cannot be shared. What can be
reused is a copy of them, taken when the stream stands at an absolute multiple of the stride inside
its prompt: any prompt that begins with the same tokens passes through exactly this state. A
snapshot's pages wait at the tail of vLLM's queue of free blocks, as its own cached blocks do: they
count as free, are handed out last, least recently used first, and so never stand in a request's
way. A request that finds a snapshot copies it into pages of its own before its first step.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, KVCacheBlockCopy

from vllm_cascade.policies.schedule import Schedule

MAX_SEEN = 1 << 14
"""Prefixes remembered without a snapshot, to find where prompts part."""

Key = tuple[int, BlockHash]
"""A schedule's number and the hash of a prefix."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The state after a prefix of ``num_tokens`` tokens, in ``blocks``."""

    key: Key
    num_tokens: int
    blocks: tuple[KVCacheBlock, ...]


@dataclass
class SnapshotCounters:
    """What became of snapshots since the engine started.

    Attributes:
        hits: requests that began from one.
        hit_tokens: prompt tokens that they did not have to compute.
        stored: snapshots taken.
        evicted: given up because a page was needed.
        skipped: not taken because too few pages were free.
    """

    hits: int = 0
    hit_tokens: int = 0
    stored: int = 0
    evicted: int = 0
    skipped: int = 0


@dataclass
class SnapshotStore:
    """Finds, takes and gives up snapshots; moves no bytes itself.

    Attributes:
        pool: vLLM's block pool, which also holds the snapshots' pages.
        hash_block_size: tokens of one of vLLM's chained block hashes. They cover the tokens,
            LoRA adapter, cache salt and multi-modal inputs of the whole prefix.
        stride: the policy's prefill stride.
    """

    pool: BlockPool
    hash_block_size: int
    stride: int
    counters: SnapshotCounters = field(default_factory=SnapshotCounters)

    def __post_init__(self) -> None:
        self._by_key: dict[Key, Snapshot] = {}
        self._by_block: dict[int, Snapshot] = {}
        self._seen: OrderedDict[int, None] = OrderedDict()  # keys' 64-bit hashes
        self._pinned: list[KVCacheBlock] = []
        self._copies: list[KVCacheBlockCopy] = []
        self._dropped: list[int] = []

    @property
    def interval(self) -> int:
        """Snapshots are taken at multiples of this: stride boundaries at which a hash ends."""
        return math.lcm(self.stride, self.hash_block_size)

    def __len__(self) -> int:
        return len(self._by_key)

    def last_boundary(self, num_prompt_tokens: int) -> int:
        """Where a prompt's state is taken: its last token must be left to compute."""
        return max(num_prompt_tokens - 1, 0) // self.interval * self.interval

    def _key(self, schedule: Schedule, hashes: Sequence[BlockHash], num_tokens: int) -> Key:
        return schedule.number, hashes[num_tokens // self.hash_block_size - 1]

    def _prefixes(
        self, schedule: Schedule, hashes: Sequence[BlockHash], max_tokens: int
    ) -> Iterator[tuple[int, Key]]:
        """Lengths up to ``max_tokens`` at which a state may be taken, the longest first."""
        most = min(max_tokens, len(hashes) * self.hash_block_size)
        for num_tokens in range(most // self.interval * self.interval, 0, -self.interval):
            yield num_tokens, self._key(schedule, hashes, num_tokens)

    def has(self, schedule: Schedule, hashes: Sequence[BlockHash], num_tokens: int) -> bool:
        return self._key(schedule, hashes, num_tokens) in self._by_key

    def find(
        self, schedule: Schedule, hashes: Sequence[BlockHash], max_tokens: int
    ) -> Snapshot | None:
        """The snapshot of the longest prefix of at most ``max_tokens`` tokens."""
        prefixes = self._prefixes(schedule, hashes, max_tokens) if self._by_key else ()
        return next((self._by_key[key] for _, key in prefixes if key in self._by_key), None)

    def junction(
        self, schedule: Schedule, hashes: Sequence[BlockHash], max_tokens: int, known: int
    ) -> int:
        """Where a prompt parts from earlier ones, if they share more than ``known`` tokens.

        Prompts with a common beginning (a system prompt) end in different places, so none of
        their last boundaries serves the others. The second one to come shows where they part,
        and a snapshot there serves all that follow. Zero: nothing new is shared.
        """
        for num_tokens, key in self._prefixes(schedule, hashes, max_tokens):
            if num_tokens <= known:
                break
            if hash(key) in self._seen:  # one that collides costs a useless snapshot
                return num_tokens
        return 0

    def remember(self, schedule: Schedule, hashes: Sequence[BlockHash], max_tokens: int) -> None:
        """Note the prefixes of an admitted prompt, for ``junction``."""
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
    ) -> None:
        """Copy a running request's ``pages``, which hold the state after ``num_tokens``.

        Uses free pages, those of the least recently used snapshots among them. Where all that are
        free are ``reserved``, because admitted requests have yet to take them, a copy would be
        made only to be thrown away.
        """
        key = self._key(schedule, hashes, num_tokens)
        if key in self._by_key:
            return
        if self.pool.get_num_free_blocks() - reserved < len(pages):
            self.counters.skipped += 1
            return
        blocks = tuple(self.pool.get_new_blocks(len(pages)))
        snapshot = Snapshot(key, num_tokens, blocks)
        self._by_key[key] = snapshot
        self._by_block.update((block.block_id, snapshot) for block in blocks)
        self._copy(pages, blocks)
        self._pinned.extend(blocks)
        self.counters.stored += 1

    def adopt(self, blocks: Sequence[KVCacheBlock], needed: int) -> list[KVCacheBlock]:
        """Pages of a request's own that will hold a snapshot's state.

        Args:
            blocks: the snapshot's, as ``find`` returned them.
            needed: free pages that this and all admitted requests may come to take.

        Returns:
            Fresh pages to be filled by a copy, which leaves the snapshot in place; or the
            snapshot's own pages where there are not enough for both.
        """
        snapshot = self._by_block[blocks[0].block_id]
        assert list(snapshot.blocks) == list(blocks)
        self.pool.touch(blocks)
        if self.pool.get_num_free_blocks() < needed:
            self._forget(snapshot)
            return list(blocks)
        self._pinned.extend(blocks)
        own = self.pool.get_new_blocks(len(blocks))
        self._copy(blocks, own)
        return own

    def end_of_step(self) -> list[KVCacheBlockCopy]:
        """The copies to make before this step's forward pass; snapshots become evictable again.

        Every page is written by at most one copy and read before anything of this step is
        written, so their order does not matter.
        """
        copies, self._copies = self._copies, []
        pinned, self._pinned = self._pinned, []
        self.pool.unpin_blocks(pinned, self._on_reuse)
        return copies

    def take_dropped(self) -> list[int]:
        """First pages of the snapshots that were given up since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def clear(self) -> None:
        """Drop all snapshots and remembered prefixes; their pages are free already."""
        self._dropped += [snapshot.blocks[0].block_id for snapshot in self._by_key.values()]
        self._by_key.clear()
        self._by_block.clear()
        self._seen.clear()

    def _copy(self, source: Iterable[KVCacheBlock], target: Iterable[KVCacheBlock]) -> None:
        self._copies += [
            KVCacheBlockCopy(src_block_id=src.block_id, dst_block_id=dst.block_id)
            for src, dst in zip(source, target, strict=True)
        ]

    def _forget(self, snapshot: Snapshot) -> None:
        del self._by_key[snapshot.key]
        self._dropped.append(snapshot.blocks[0].block_id)
        for block in snapshot.blocks:
            del self._by_block[block.block_id]

    def _on_reuse(self, block: KVCacheBlock) -> None:
        """The pool handed out one of a snapshot's pages (or a page that was one long ago)."""
        snapshot = self._by_block.get(block.block_id)
        if snapshot is not None:
            self._forget(snapshot)
            self.counters.evicted += 1
