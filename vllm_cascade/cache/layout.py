# SPDX-License-Identifier: Apache-2.0
"""What a page holds: its bytes, and the views of a layer's pool.

A page is vLLM's own block: ``[num_kv_heads, block_size, 2 * head_size]`` keys and values in the
model's dtype or in 8 bits, followed by 4-byte numbers per unit of slots and head set
(``UNIT_WORDS``) and, where every row has its own scales (``quantised.py``), these. All are counted
in the page's size. A unit is ``unit`` slots that hold consecutive tokens in order. A request's
slots ``0 .. peak - 1`` are always initialised, as far as they hold tokens; fresh pages need no
clearing. Nothing here knows which tokens are kept, or who owns a page (``manager.py``).
"""

from dataclasses import dataclass
from typing import Any

import torch

from vllm_cascade.cache.quantised import Quantised
from vllm_cascade.cache.spec import ROW_SCALES, WORD_BYTES, KVPolicySpec


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
        quantised: what the codes in ``kv`` stand for; None: the numbers themselves.
        scale: fp32 ``[num_blocks, num_kv_heads, block_size, 2]``, of every slot's key and value;
            in a page a head's keys' stand before its values'. None: rows have none of their own.
    """

    kv: torch.Tensor
    rank: torch.Tensor
    born: torch.Tensor
    score: torch.Tensor
    token: torch.Tensor | None = None
    quantised: Quantised | None = None
    scale: torch.Tensor | None = None

    @property
    def block_size(self) -> int:
        return self.kv.shape[2]

    @property
    def unit(self) -> int:
        """Slots that share one number of each kind."""
        return self.kv.shape[2] // self.rank.shape[2]

    def rows(self, blocks: torch.Tensor) -> torch.Tensor:
        """``[..., num_kv_heads, block_size, 2 * head_size]`` of some pages: what rows are read as.

        In the cache's type or, where that is quantised, fp32.
        """
        return self.read(self.kv[blocks], None if self.scale is None else self.scale[blocks])

    def read(self, stored: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """What stored rows ``[..., 2 * head_size]`` with their scales are read as."""
        return stored if self.quantised is None else self.quantised.decode(stored, scale)

    def stored(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows ``[..., 2 * head_size]`` as pages have them, and the scales ``[..., 2]`` of each."""
        if self.quantised is None:
            return rows.to(self.kv.dtype), None
        return self.quantised.encode(rows)

    def write_rows(self, at: tuple[Any, ...], rows: torch.Tensor) -> None:
        """Store rows; ``at`` indexes blocks, KV heads and slots."""
        self.kv[at], scale = self.stored(rows)
        if self.scale is not None:
            self.scale[at] = scale


def page_views(
    kv_cache: torch.Tensor, spec: KVPolicySpec, quantised: Quantised | None = None
) -> Pages:
    """Split vLLM's view of a layer's pool into K/V and the numbers in each page's tail.

    Args:
        quantised: what the layer's codes stand for.
    """
    num_blocks, num_heads, block_size, width = kv_cache.shape
    assert (num_heads, block_size) == (spec.num_kv_heads, spec.page_slots), kv_cache.shape
    assert width == 2 * spec.head_size, kv_cache.shape
    assert kv_cache[0].is_contiguous(), "a page's keys and values must be contiguous"
    page_bytes = kv_cache.stride(0) * kv_cache.element_size()
    start = kv_cache.storage_offset() * kv_cache.element_size() + spec.unpadded_page_size_bytes
    assert page_bytes >= spec.page_size_bytes and page_bytes % WORD_BYTES == 0
    assert start % WORD_BYTES == 0
    units = block_size // spec.policy.unit
    storage, page_words = kv_cache.untyped_storage(), page_bytes // WORD_BYTES
    words = torch.empty(0, dtype=torch.int32, device=kv_cache.device).set_(
        storage,
        start // WORD_BYTES,
        (num_blocks, len(spec.words), spec.num_sets, units),
        (page_words, spec.num_sets * units, units, 1),
    )
    tail = dict(zip(spec.words, words.unbind(1), strict=True))
    tail["score"] = tail["score"].view(torch.float32)
    own_scales = quantised is not None and quantised.scales is None
    assert own_scales == (spec.scale_bytes > 0), (quantised, spec.kv_quant_mode)
    if own_scales:
        tail["scale"] = torch.empty(0, dtype=torch.float32, device=kv_cache.device).set_(
            storage,
            start // WORD_BYTES + len(spec.words) * spec.num_sets * units,
            (num_blocks, num_heads, block_size, ROW_SCALES),
            (page_words, ROW_SCALES * block_size, 1, block_size),
        )
    return Pages(kv_cache, **tail, quantised=quantised)


def whole_pages(kv_cache: torch.Tensor) -> torch.Tensor:
    """int8 ``[num_blocks, page bytes]``: a layer's pages with their tails, for copying."""
    page_bytes = kv_cache.stride(0) * kv_cache.element_size()
    return torch.empty(0, dtype=torch.int8, device=kv_cache.device).set_(
        kv_cache.untyped_storage(),
        kv_cache.storage_offset() * kv_cache.element_size(),
        (kv_cache.shape[0], page_bytes),
        (page_bytes, 1),
    )
