# SPDX-License-Identifier: Apache-2.0
"""What a page holds: its bytes, and the views of a layer's pool.

A page is vLLM's own block: ``[num_kv_heads, block_size, 2 * head_size]`` keys and values in the
model's dtype, followed by 4-byte numbers per unit of slots and head set (``UNIT_WORDS``), counted
in the page's size. A unit is ``unit`` slots that hold consecutive tokens in order. A request's
slots ``0 .. peak - 1`` are always initialised, as far as they hold tokens; fresh pages need no
clearing. Nothing here knows which tokens are kept, or who owns a page (``manager.py``).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm_cascade.cache.manager import KVPolicySpec

UNIT_WORDS = ("rank", "born", "score")
TRACE_WORDS = (*UNIT_WORDS, "token")
WORD_BYTES = 4


@dataclass(frozen=True)
class Pages:
    """Views of one layer's page pool, all sharing the pool's storage.

    Attributes:
        kv: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, K then V.
        rank: int32 ``[num_blocks, num_sets, block_size // unit]``, chronological rank of the unit;
            -1: empty slots.
        born: int32, the position that its first key was rotated with; the others follow.
        score: fp32, its tokens' attention scores, summed.
        token: int32, its first token's index in the stream; None unless the policy asks
            for ages or its ``trace`` is on.
    """

    kv: torch.Tensor
    rank: torch.Tensor
    born: torch.Tensor
    score: torch.Tensor
    token: torch.Tensor | None = None

    @property
    def block_size(self) -> int:
        return self.kv.shape[2]

    @property
    def unit(self) -> int:
        """Slots that share one number of each kind."""
        return self.kv.shape[2] // self.rank.shape[2]


def page_views(kv_cache: torch.Tensor, spec: "KVPolicySpec") -> Pages:
    """Split vLLM's view of a layer's pool into K/V and the numbers in each page's tail."""
    num_blocks, num_heads, block_size, width = kv_cache.shape
    assert (num_heads, block_size) == (spec.num_kv_heads, spec.page_slots), kv_cache.shape
    assert width == 2 * spec.head_size, kv_cache.shape
    assert kv_cache[0].is_contiguous(), "a page's keys and values must be contiguous"
    page_bytes = kv_cache.stride(0) * kv_cache.element_size()
    start = kv_cache.storage_offset() * kv_cache.element_size() + spec.unpadded_page_size_bytes
    assert page_bytes >= spec.page_size_bytes and page_bytes % WORD_BYTES == 0
    assert start % WORD_BYTES == 0
    units = block_size // spec.policy.unit
    words = torch.empty(0, dtype=torch.int32, device=kv_cache.device).set_(
        kv_cache.untyped_storage(),
        start // WORD_BYTES,
        (num_blocks, len(spec.words), spec.num_sets, units),
        (page_bytes // WORD_BYTES, spec.num_sets * units, units, 1),
    )
    tail = dict(zip(spec.words, words.unbind(1), strict=True))
    tail["score"] = tail["score"].view(torch.float32)
    return Pages(kv_cache, **tail)


def whole_pages(kv_cache: torch.Tensor) -> torch.Tensor:
    """int8 ``[num_blocks, page bytes]``: a layer's pages with their tails, for copying."""
    page_bytes = kv_cache.stride(0) * kv_cache.element_size()
    return torch.empty(0, dtype=torch.int8, device=kv_cache.device).set_(
        kv_cache.untyped_storage(),
        kv_cache.storage_offset() * kv_cache.element_size(),
        (kv_cache.shape[0], page_bytes),
        (page_bytes, 1),
    )
