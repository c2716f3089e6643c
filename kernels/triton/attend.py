# SPDX-License-Identifier: Apache-2.0
"""Split-KV attention of one new token per request over its cached tokens.

Each program reads a part of the slots of one or more KV heads. It reads them in physical order,
because the order does not change attention, so nothing is gathered. Keys are rotated by
``rank - born`` as they are read, and shared by the query heads of a group. The new token's key and
value come from the forward pass, not from a page. The kernel writes raw logits for the score update
and log-sum-exps for the merge of the parts. Units of a multiple of 16 tokens have another kernel
(``attend_units.py``), but for those of latent rows.
Source: split-KV decoding as in Flash-Decoding (https://pytorch.org/blog/flash-decoding/).
"""

import triton
import triton.language as tl

from .attend_tiles import (
    LOWEST,
    columns,
    dots,
    keys_of,
    parted,
    turned_products,
    values_of,
    wide_of,
    words_of,
)
from .attend_units import units_launcher
from .cached import CachedLayer
from .configs import TURNED, attend_config, sharing
from .launch import Launcher
from .singles import Singles
from .stored import apart, load_scales, scale_place
from .strides import Tokens
from .tiles import (
    CACHED,
    LN_2,
    LOG2_E,
    OLD_SLOTS,
    START,
    STEP,
    STREAM,
    chunk_of,
    first_part,
    load_pair,
    load_rows,
    padded,
    shift_of,
    soft_cap,
    tile_blocks,
    tile_offsets,
)

MOST_PAIRS = tl.constexpr(64)
"""Most pairs of channels rotated at a time. A head with more rotates a quarter of its pairs at a
time, so that pairs and angles fit a warp's registers."""


@triton.jit
def _attend(
    query,
    key,
    value,
    kv,
    rank,
    born,
    scales,
    table,
    steps,
    rotation,
    slopes,
    logit_scale,
    positions,
    partial,
    partial_lse,
    logits,
    own,
    scale,
    cap,
    query_stride,
    key_stride,
    value_stride,
    page_stride,
    word_stride,
    table_stride,
    logits_stride,
    NUM_HEADS: tl.constexpr,
    NUM_SETS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    LEAD: tl.constexpr,
    SHARED: tl.constexpr,
    HEAD: tl.constexpr,
    VALUE: tl.constexpr,
    ROW: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KEEP_LOGITS: tl.constexpr,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    FLAT: tl.constexpr,
    CODE: tl.constexpr,
    OF_ROWS: tl.constexpr,
):
    PARTS: tl.constexpr = 1 if HALF <= MOST_PAIRS else 4
    row = tl.program_id(0)
    first_head = tl.program_id(1) * HEADS
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    if tl.load(steps + row * STEP + STREAM) < 0:
        return
    cached = tl.load(steps + row * STEP + CACHED)
    slots = tl.load(steps + row * STEP + OLD_SLOTS)
    if positions is not None:
        shift = shift_of(positions, tl.load(steps + row * STEP + START), cached)
    member = tl.arange(0, HEADS * LEAD)
    real = member % LEAD < GROUP
    head = first_head + member // LEAD
    query_head = head * GROUP + member % LEAD
    first_kv = first_head
    kv_head = head
    if SHARED > 1:  # programs that share a KV head
        first_kv = first_head // SHARED
        kv_head = head // SHARED
    row64 = row.to(tl.int64)
    out_head = row64 * (NUM_HEADS * GROUP) + query_head
    queries = query + row64 * query_stride + query_head * HEAD
    if logit_scale is not None:
        scale = scale * tl.load(logit_scale + row)

    # Split 0 starts with the new token, the others with no token. Logits are in base 2.
    new_keys = key + row64 * key_stride + kv_head * HEAD
    here = real & (split == 0)
    itself = tl.zeros([HEADS * LEAD], tl.float32)
    if HALF > 0:
        q1, q2 = load_pair(queries, real, HALF, INTERLEAVED)
        k1, k2 = load_pair(new_keys, here, HALF, INTERLEAVED)
        itself += tl.sum(q1.to(tl.float32) * k1.to(tl.float32), axis=1)
        itself += tl.sum(q2.to(tl.float32) * k2.to(tl.float32), axis=1)
        q1 = parted(q1, PARTS, HEADS, LEAD)
        q2 = parted(q2, PARTS, HEADS, LEAD)
    if 2 * HALF < HEAD:
        q3 = load_rows(queries, real, 2 * HALF, HEAD)
        k3 = load_rows(new_keys, here, 2 * HALF, HEAD)
        itself += tl.sum(q3.to(tl.float32) * k3.to(tl.float32), axis=1)
        q3 = columns(q3, HEADS, LEAD)
    itself = soft_cap(itself * scale, cap)
    if KEEP_LOGITS:
        tl.store(own + out_head, itself, mask=here)
    top = tl.reshape(tl.where(split == 0, itself * LOG2_E, LOWEST), [HEADS, LEAD])
    total = tl.zeros([HEADS, LEAD], tl.float32) + tl.where(split == 0, 1.0, 0.0)
    new_values = value + row64 * value_stride + kv_head * VALUE
    acc = columns(load_rows(new_values, here, 0, VALUE).to(tl.float32), HEADS, LEAD)

    table += row64 * table_stride
    UNITS: tl.constexpr = PAGE // UNIT
    rank += first_kv % NUM_SETS * UNITS
    born += first_kv % NUM_SETS * UNITS
    heads = (first_kv + tl.arange(0, HEADS)) * (PAGE * ROW)
    of_head = tl.reshape(out_head, [HEADS, LEAD])
    is_real = tl.reshape(real, [HEADS, LEAD])
    per_split = tl.cdiv(tl.cdiv(slots, TILE), splits) * TILE
    begin = split * per_split
    end = tl.minimum(begin + per_split, slots)
    block = tile_blocks(table, begin, end, PAGE, TILE).to(tl.int64)
    unit_rank, unit_born = words_of(rank, born, block, begin, end, word_stride, PAGE, TILE, UNIT)
    next_block = tile_blocks(table, begin + TILE, end, PAGE, TILE)
    for first in tl.range(begin, end, TILE, num_stages=STAGES):
        slot = first + tl.arange(0, TILE)
        place = unit_rank * UNIT + slot % UNIT
        valid = unit_rank >= 0
        if UNIT > 1:
            valid = valid & (place < cached)  # a unit's last slots may wait for their tokens
        distance = unit_born - unit_rank * UNIT
        if positions is not None:
            distance -= shift
        distance = tl.where(valid, distance, 0)
        rows = kv + block * page_stride + tile_offsets(first, PAGE, TILE) * ROW
        rows = rows[None, :] + heads[:, None]
        values = values_of(rows + (ROW - VALUE), valid, VALUE)
        key_scale = None
        if CODE is not None:
            offset = tile_offsets(first, PAGE, TILE)[None, :]
            of_kv = (first_kv + tl.arange(0, HEADS))[:, None]
            pages = (block + tl.zeros([TILE], tl.int64))[None, :]
            at = scale_place(scales, pages, of_kv, offset, word_stride, PAGE, OF_ROWS)
            key_scale, value_scale = load_scales(at, valid[None, :], apart(PAGE, OF_ROWS))
            values = wide_of(values, value_scale[:, None, :], CODE).to(query.dtype.element_ty)
        products = tl.zeros([HEADS, TILE, LEAD], tl.float32)
        if HALF > 0:
            for part in tl.static_range(PARTS):
                products = turned_products(
                    products=products,
                    q1=q1[part],
                    q2=q2[part],
                    rows=rows,
                    valid=valid,
                    rotation=rotation,
                    distance=distance,
                    FROM=part * (padded(HALF) // PARTS),
                    HALF=HALF,
                    INTERLEAVED=INTERLEAVED,
                    FLAT=FLAT,
                    scale=None if CODE is None else key_scale[:, :, None],  # pyright: ignore[reportOptionalSubscript]
                    CODE=CODE,
                )
        if 2 * HALF < HEAD:
            if (2 * HALF == HEAD - VALUE) & (ROW == HEAD):  # latent rows
                rest = tl.permute(values, (0, 2, 1))
            else:
                rest = keys_of(rows, valid, 2 * HALF, HEAD, padded(HEAD - 2 * HALF))
                if CODE is not None:
                    channel = 2 * HALF + tl.arange(0, padded(HEAD - 2 * HALF))
                    of_key = (channel < first_part(HEAD, VALUE, ROW))[None, None, :]
                    of_row = key_scale[:, :, None], value_scale[:, :, None]  # pyright: ignore[reportOptionalSubscript]
                    rest = wide_of(rest, tl.where(of_key, *of_row), CODE).to(q3.dtype)
            products = dots(rest, q3, products, FLAT)

        block = next_block.to(tl.int64)
        second = first + TILE
        unit_rank, unit_born = words_of(
            rank, born, block, second, end, word_stride, PAGE, TILE, UNIT
        )
        next_block = tile_blocks(table, second + TILE, end, PAGE, TILE)

        if cap is None:
            products = products * (scale * LOG2_E)
        else:
            products = soft_cap(products * scale, cap) * LOG2_E
        if slopes is not None:
            slope = tl.load(slopes + query_head, mask=real, other=0.0) * LOG2_E
            slope = tl.reshape(slope, [HEADS, LEAD])[:, None, :]
            products += (place - cached).to(tl.float32)[None, :, None] * slope
        products = tl.where(valid[None, :, None], products, float("-inf"))
        highest = tl.maximum(top, tl.max(products, axis=1))
        probs = tl.exp2(products - highest[:, None, :])
        if KEEP_LOGITS:
            if CHUNK == 1:
                target = logits + of_head[:, None, :] * logits_stride + slot[None, :, None]
                kept = is_real[:, None, :] & (slot < end)[None, :, None]
                tl.store(target, products * LN_2, mask=kept)
            else:
                mass = tl.sum(tl.reshape(probs, [HEADS, TILE // CHUNK, CHUNK, LEAD]), axis=2)
                mass = (highest[:, None, :] + tl.log2(mass)) * LN_2
                chunk = first // CHUNK + tl.arange(0, TILE // CHUNK)
                target = logits + of_head[:, None, :] * logits_stride + chunk[None, :, None]
                kept = is_real[:, None, :] & (chunk * CHUNK < end)[None, :, None]
                tl.store(target, mass, mask=kept)
        fade = tl.exp2(top - highest)
        total = total * fade + tl.sum(probs, axis=1)
        acc = dots(values, probs.to(values.dtype), acc * fade[:, None, :], FLAT)
        top = highest

    # An empty split has total 0: its sum is 0, its log-sum-exp -inf.
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None, :]
    lse = tl.where(total > 0.0, (top + tl.log2(total)) * LN_2, float("-inf"))
    place = of_head * splits + split
    channel = tl.arange(0, padded(VALUE))
    inside = is_real[:, None, :] & (channel < VALUE)[None, :, None]
    tl.store(partial + place[:, None, :] * VALUE + channel[None, :, None], acc, mask=inside)
    tl.store(partial_lse + place, lse, mask=is_real)


def masses_of(num_slots: int, unit: int) -> int:
    """Numbers per query head that the scores are made of: one per slot, unit or part of a unit."""
    return num_slots // chunk_of(unit, TURNED)


class DecodeAttention:
    """Attention of one token per request in one layer, in parts that ``merge.Merge`` merges.

    ``B`` requests, ``H`` KV heads, ``G`` query heads each, ``D`` channels, ``N = P * block_size``.

    Args:
        keep_logits: whether to leave raw logits.
    """

    def __init__(self, layer: CachedLayer, keep_logits: bool) -> None:
        self._heads = num_queries, num_heads, head_size, new = layer.heads
        group, unit = num_queries // num_heads, layer.unit
        self._page, self._unit, self._keeps = layer.page, unit, keep_logits
        self.value_size = layer.value_size
        shared = sharing(head_size, group, layer.latent)
        # Few channels of latent rows rotate. With many long heads, rotated queries do not fit
        # into registers.
        self.turns_queries = unit % TURNED == 0 and layer.latent is None and shared == 1
        common = {**layer.pages, **layer.turning, **layer.logits, "PAGE": layer.page}
        if self.turns_queries:
            self._programs = num_heads
            own = {"NUM_HEADS": num_heads, "KEEP_MASSES": keep_logits}
            self._launch = units_launcher(new, group, **common, **own)
            return
        group, num_heads = group // shared, num_heads * shared
        alone = max(layer.num_sets, shared)  # programs that share a KV head have one each
        config, heads = attend_config(new, head_size, group, num_heads, alone, layer.latent)
        self._programs = num_heads // heads
        self._launch = Launcher(
            _attend,
            **common,
            **layer.rows,
            NUM_HEADS=num_heads,
            HEADS=heads,
            GROUP=group,
            LEAD=triton.next_power_of_2(group),
            SHARED=shared,
            KEEP_LOGITS=keep_logits,
            CHUNK=chunk_of(unit, TURNED),
            TILE=config.tile,
            STAGES=config.stages,
            FLAT=config.warps > heads,
            num_warps=config.warps,
            num_stages=config.stages,
        )

    def shapes(self, num_rows: int, num_pages: int, splits: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what it leaves, by attribute of ``Singles``."""
        num_queries = self._heads[0]
        masses = masses_of(num_pages * self._page, self._unit) if self._keeps else 0
        return {
            "partial": (num_rows, num_queries, splits, self.value_size),
            "partial_lse": (num_rows, num_queries, splits),
            "logits": (num_rows, num_queries, masses) if masses else (0,),
            "own": (num_rows, num_queries) if masses else (0,),
        }

    def __call__(self, tokens: Tokens, singles: Singles) -> None:
        """Write ``partial``, ``partial_lse``, ``logits`` and ``own``, but for padding rows."""
        assert tokens.heads == self._heads, (tokens.heads, self._heads)
        of_logits = "masses" if self.turns_queries else "logits"
        own = {of_logits: singles.logits, f"{of_logits}_stride": singles.num_masses}
        if not self.turns_queries:
            own["positions"] = singles.positions
        query_stride, key_stride, value_stride, _ = tokens.places
        self._launch(
            (singles.num_rows, self._programs, singles.splits),
            (tokens.variant, singles.variant),
            query=tokens.query,
            key=tokens.key,
            value=tokens.value,
            table=singles.table,
            steps=singles.steps,
            logit_scale=singles.logit_scale,
            partial=singles.partial,
            partial_lse=singles.partial_lse,
            own=singles.own,
            query_stride=query_stride,
            key_stride=key_stride,
            value_stride=value_stride,
            table_stride=singles.table_place,
            **own,
        )
