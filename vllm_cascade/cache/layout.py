# SPDX-License-Identifier: Apache-2.0
"""Memory layout of a page, and typed views of a layer's page pool.

A page is one vLLM block. It holds, in this order:

- rows, ``[num_kv_heads, block_size, row_size]``, in the model's dtype or in 8 bits. A row is a key
  and a value, or a latent row that is both (``attention/latent.py``);
- 4-byte words for each unit and head set (``UNIT_WORDS``), with speculative decoding also
  versions of some of them;
- scales for each row, if the cache quantises rows separately (``quantised.py``).

The page size includes all three. A unit is ``unit`` slots that hold consecutive tokens in order. In
a request's slots ``0 .. peak - 1``, every slot that holds a token is initialised, so fresh pages
need no clearing. This module does not decide which tokens are kept or allocate pages
(``manager.py``).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_cascade.cache.quantised import Quantised
from vllm_cascade.cache.spec import ROW_SCALES, VERSIONED, WORD_BYTES, KVPolicySpec


@dataclass(frozen=True)
class Pages:
    """Views of one layer's page pool, all sharing the pool's storage.

    Attributes:
        kv: ``[num_blocks, num_kv_heads, block_size, row_size]``.
        rank: int32 ``[num_blocks, num_sets, block_size // unit]``, chronological rank of the unit;
            -1: empty slots.
        born: int32, same shape: position at which the unit's first key was rotated. The unit's
            other keys have the positions after it.
        score: fp32, same shape: sum of the unit's attention scores.
        token: int32, same shape: stream index of the unit's first token. None unless the policy
            needs it (``Policy.keeps_ages``).
        quantised: Encoding of ``kv``; None: unquantised.
        scale: fp32 ``[num_blocks, num_kv_heads, block_size, 2]``, scales of each slot's key and
            value. A page stores a head's key scales before its value scales. None: rows have no
            scales of their own.
        versions: int32 ``[num_blocks, drafts, 2, num_sets, block_size // unit]``, rank and score
            (its bits) before each draft token of the last step. None without drafts.
    """

    kv: torch.Tensor
    rank: torch.Tensor
    born: torch.Tensor
    score: torch.Tensor
    token: torch.Tensor | None = None
    quantised: Quantised | None = None
    scale: torch.Tensor | None = None
    versions: torch.Tensor | None = None

    @property
    def block_size(self) -> int:
        return self.kv.shape[2]

    @property
    def unit(self) -> int:
        """Slots per unit."""
        return self.kv.shape[2] // self.rank.shape[2]

    def rows(self, blocks: torch.Tensor) -> torch.Tensor:
        """Read pages as ``[..., num_kv_heads, block_size, row_size]``.

        The dtype is the cache's, or fp32 if the cache is quantised.
        """
        return self.read(self.kv[blocks], None if self.scale is None else self.scale[blocks])

    def read(self, stored: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """Decode stored rows ``[..., row_size]`` with their scales ``[..., 2]``, if any."""
        return stored if self.quantised is None else self.quantised.decode(stored, scale)

    def stored(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Encode rows ``[..., row_size]`` for a page; also returns scales ``[..., 2]``."""
        if self.quantised is None:
            return rows.to(self.kv.dtype), None
        return self.quantised.encode(rows)

    def write_rows(self, at: tuple[Any, ...], rows: torch.Tensor) -> None:
        """Store rows; ``at`` indexes blocks, KV heads and slots."""
        self.kv[at], scale = self.stored(rows)
        if self.scale is not None and scale is not None:
            self.scale[at] = scale


def page_views(
    kv_cache: torch.Tensor, spec: KVPolicySpec, quantised: Quantised | None = None
) -> Pages:
    """Create views of a layer's keys and values and of the tail of each page.

    Args:
        kv_cache: vLLM's tensor for the layer, ``[num_blocks, num_kv_heads, page_slots,
            row_size]``.
        quantised: The layer's encoding; None: unquantised.
    """
    num_blocks, num_heads, block_size, width = kv_cache.shape
    assert (num_heads, block_size) == (spec.num_kv_heads, spec.page_slots), kv_cache.shape
    assert width == spec.row_size, kv_cache.shape
    assert kv_cache[0].is_contiguous(), "a page's keys and values must be contiguous"
    page_bytes = kv_cache.stride(0) * kv_cache.element_size()
    start = int(kv_cache.storage_offset()) * kv_cache.element_size() + spec.unpadded_page_size_bytes
    assert page_bytes >= spec.page_size_bytes and page_bytes % WORD_BYTES == 0
    assert start % WORD_BYTES == 0
    units = block_size // spec.policy.unit
    storage, page_words = kv_cache.untyped_storage(), page_bytes // WORD_BYTES
    words = torch.empty(0, dtype=torch.int32, device=kv_cache.device).set_(
        storage,
        start // WORD_BYTES,
        (num_blocks, spec.num_words, spec.num_sets, units),
        (page_words, spec.num_sets * units, units, 1),
    )
    num_words = len(spec.words)
    tail = dict(zip(spec.words, words[:, :num_words].unbind(1), strict=True))
    if spec.drafts:
        tail["versions"] = words[:, num_words:].unflatten(1, (spec.drafts, len(VERSIONED)))
    tail["score"] = tail["score"].view(torch.float32)
    own_scales = quantised is not None and quantised.scales is None
    assert own_scales == (spec.scale_bytes > 0), (quantised, spec.kv_quant_mode)
    if own_scales:
        tail["scale"] = torch.empty(0, dtype=torch.float32, device=kv_cache.device).set_(
            storage,
            start // WORD_BYTES + spec.num_words * spec.num_sets * units,
            (num_blocks, num_heads, block_size, ROW_SCALES),
            (page_words, ROW_SCALES * block_size, 1, block_size),
        )
    return Pages(kv_cache, **tail, quantised=quantised)


def whole_pages(kv_cache: torch.Tensor) -> torch.Tensor:
    """View a layer's pages, tails included, as int8 ``[num_blocks, page bytes]`` for copying."""
    page_bytes = kv_cache.stride(0) * kv_cache.element_size()
    return torch.empty(0, dtype=torch.int8, device=kv_cache.device).set_(
        kv_cache.untyped_storage(),
        kv_cache.storage_offset() * kv_cache.element_size(),
        (kv_cache.shape[0], page_bytes),
        (page_bytes, 1),
    )


def page_pools(kv_caches: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Unique tensors, int8 ``[num_blocks, page bytes]``, that hold all of every page.

    Layers of different cache groups can share a tensor.
    """
    return list({cache.data_ptr(): whole_pages(cache) for cache in kv_caches}.values())
