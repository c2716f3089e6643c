# SPDX-License-Identifier: Apache-2.0
"""One new token a request against its cached tokens: split-KV attention over pages.

Each program reads one KV head's share of the slots in physical order: attention does not care
about order, so nothing is gathered. Key tiles are rotated by ``rank - born`` as they are read and
shared by the query heads of the group; the new token's own key and value come from the forward
pass, not from a page. Raw logits go out for the score update, log-sum-exps for the merge. In pages
of units of several tokens the kernel is another one (``attend_units.py``).
Its reference is that of a stride of one token (``prefill.py``).
Source: split-KV decoding as in Flash-Decoding (https://pytorch.org/blog/flash-decoding/).
"""

import torch
import triton
import triton.language as tl

from .attend_units import attend_units, masses_of
from .configs import attend_config
from .tiles import (
    CACHED,
    OLD_SLOTS,
    STEP,
    STREAM,
    check_pages,
    check_steps,
    dot_keys,
    load_pair,
    load_rows,
    online_softmax,
    padded,
    rotate_pair,
    slot_tile,
    soft_cap,
    store_rows,
)


@triton.jit
def _attend(
    query,
    key,
    value,
    kv,
    rank,
    born,
    table,
    steps,
    rotation,
    slopes,
    logit_scale,
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
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KEEP_LOGITS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    if tl.load(steps + row * STEP + STREAM) < 0:
        return
    cached = tl.load(steps + row * STEP + CACHED)
    slots = tl.load(steps + row * STEP + OLD_SLOTS)
    member = tl.arange(0, GROUP_PAD)
    real = member < GROUP
    query_head = head * GROUP + member
    row64 = row.to(tl.int64)
    if logit_scale is not None:
        scale = scale * tl.load(logit_scale + row)

    # The new token: split 0 starts from it, the others from nothing.
    queries = query + row64 * query_stride + query_head * HEAD
    new_key = key + row64 * key_stride + head * HEAD + tl.zeros([1], tl.int32)
    new_value = value + row64 * value_stride + head * HEAD + tl.zeros([1], tl.int32)
    here = tl.full([1], split, tl.int32) == 0
    itself = tl.zeros([GROUP_PAD], tl.float32)
    if HALF > 0:
        q1, q2 = load_pair(queries, real, HALF, INTERLEAVED)
        k1, k2 = load_pair(new_key, here, HALF, INTERLEAVED)
        itself += tl.sum(q1.to(tl.float32) * k1.to(tl.float32), axis=1)
        itself += tl.sum(q2.to(tl.float32) * k2.to(tl.float32), axis=1)
    if 2 * HALF < HEAD:
        q3 = load_rows(queries, real, 2 * HALF, HEAD)
        k3 = load_rows(new_key, here, 2 * HALF, HEAD)
        itself += tl.sum(q3.to(tl.float32) * k3.to(tl.float32), axis=1)
    itself = soft_cap(itself * scale, cap)
    out_head = row64 * (NUM_HEADS * GROUP) + query_head
    if KEEP_LOGITS:
        tl.store(own + out_head, itself, mask=real & (split == 0))
    top = tl.where(split == 0, itself, float("-inf"))
    total = tl.where(split == 0, 1.0, 0.0) + tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, padded(HEAD)], tl.float32)
    acc += load_rows(new_value, here, 0, HEAD).to(tl.float32)

    table += row64 * table_stride
    per_split = tl.cdiv(tl.cdiv(slots, TILE), SPLITS)
    begin = split * per_split * TILE
    end = tl.minimum(begin + per_split * TILE, slots)
    for first in range(begin, end, TILE):
        slot, inside, block, word = slot_tile(
            table, first, end, head % NUM_SETS, word_stride, PAGE, TILE
        )
        place = tl.load(rank + word, mask=inside, other=-1)
        valid = place >= 0
        source = kv + block * page_stride + (head * PAGE + slot % PAGE) * (2 * HEAD)
        products = tl.zeros([GROUP_PAD, TILE], tl.float32)
        # K and V loads do not wait for ranks; what an empty slot holds may be NaN and is cut off.
        if HALF > 0:
            distance = tl.load(born + word, mask=valid, other=0) - place
            x, y = load_pair(source, inside, HALF, INTERLEAVED)
            x, y = rotate_pair(x, y, rotation, distance, valid, HALF)
            x = tl.where(valid[:, None], x, 0.0).to(q1.dtype)
            y = tl.where(valid[:, None], y, 0.0).to(q1.dtype)
            products += dot_keys(q1, x)
            products += dot_keys(q2, y)
        if 2 * HALF < HEAD:
            rest = load_rows(source, inside, 2 * HALF, HEAD)
            rest = tl.where(valid[:, None], rest, 0.0).to(q3.dtype)
            products += dot_keys(q3, rest)
        products = soft_cap(products * scale, cap)
        if slopes is not None:
            # Not before the loop: one value more through it, and registers spill on sm_100.
            slope = tl.load(slopes + query_head, mask=real, other=0.0)
            products += slope[:, None] * (place - cached).to(tl.float32)[None, :]
        products = tl.where(valid[None, :], products, float("-inf"))
        if KEEP_LOGITS:
            target = logits + out_head[:, None] * logits_stride + slot[None, :]
            tl.store(target, products, mask=real[:, None] & inside[None, :])
        values = load_rows(source + HEAD, inside, 0, HEAD)
        values = tl.where(valid[:, None], values, 0.0).to(values.dtype)
        top, total, acc = online_softmax(top, total, acc, products, values)

    # An empty split has total 0: its sum is 0, its log-sum-exp -inf.
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    lse = tl.where(total > 0.0, top + tl.log(tl.where(total > 0.0, total, 1.0)), float("-inf"))
    place = out_head * SPLITS + split
    store_rows(partial + place * HEAD, acc, real, 0, HEAD)
    tl.store(partial_lse + place, lse, mask=real)


@torch.library.custom_op("kv_cascade::attend", mutates_args=())
def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv: torch.Tensor,
    rank: torch.Tensor,
    born: torch.Tensor,
    table: torch.Tensor,
    steps: torch.Tensor,
    rotation: torch.Tensor | None,
    slopes: torch.Tensor | None,
    logit_scale: torch.Tensor | None,
    scale: float,
    softcap: float,
    interleaved: bool,
    splits: int,
    keep_logits: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of one token a request, in ``splits`` parts that ``combine.merge`` joins.

    ``B`` requests, ``H`` KV heads, ``G`` query heads each, ``D`` channels, ``N = P * block_size``.

    Args:
        query: ``[B, H * G, D]``, rotated at position ``cached``; fp16, bf16 or fp32.
        key, value: ``[B, H, D]`` of the new token, rotated likewise.
        kv, rank, born: ``Pages`` views.
        table: int32 ``[>= B, P]`` block numbers.
        steps: int32 ``[B, STEP_COLUMNS]`` step rows (``tiles``).
        rotation: ``[max_distance + 1, 2, rotary_dim / 2]``, or None: keys stay as they are.
        slopes: fp32 ``[H * G]`` of ALiBi, or None.
        logit_scale: fp32 ``[B]``, factors on the logits, or None.
        softcap: 0 is none.
        keep_logits: whether raw logits are needed afterwards.

    Returns:
        fp32: partial outputs ``[B, H * G, splits, D]``, their log-sum-exps
        ``[B, H * G, splits]``, logits ``[B, H * G, N]`` by slot (-inf: empty; beyond ``old_slots``
        not written), and the new token's own logits ``[B, H * G]``. The last two are empty
        without ``keep_logits``. Rows that are padding are not written. In pages of units there is
        no logit a slot, but one log-sum-exp a unit, or a part of one where it is longer than a
        tile: ``masses_of`` says how many.
    """
    unit = check_pages(kv, rank, born)
    check_steps(steps, table)
    num_rows, num_queries, head_size = query.shape
    num_heads, page = kv.shape[1], kv.shape[2]
    assert steps.shape[0] == num_rows and num_queries % num_heads == 0, query.shape
    assert query.stride()[1:] == (head_size, 1) and key.stride()[1:] == (head_size, 1)
    assert value.stride()[1:] == (head_size, 1) and 2 * head_size == kv.shape[3]
    assert query.dtype == key.dtype == value.dtype == kv.dtype, (query.dtype, kv.dtype)
    group = num_queries // num_heads
    half = 0 if rotation is None else rotation.shape[2]
    num_slots = table.shape[1] * page
    masses = masses_of(query, num_slots, unit) if keep_logits else 0
    outputs = partial, partial_lse, logits, own = _outputs(query, splits, masses)
    if num_rows == 0:
        return outputs
    if unit > 1:
        tensors = query, key, value, kv, rank, born, table, steps, rotation, slopes, logit_scale
        attend_units(tensors, outputs, scale, softcap, interleaved, splits, keep_logits, unit)
        return outputs
    config = attend_config(query.device, query.dtype, head_size)
    _attend[(num_rows, num_heads, splits)](
        *(query, key, value, kv, rank, born, table, steps, rotation, slopes, logit_scale),
        *(partial, partial_lse, logits, own, scale, softcap or None),
        *(query.stride(0), key.stride(0), value.stride(0)),
        *(kv.stride(0), rank.stride(0), table.stride(0), num_slots),
        NUM_HEADS=num_heads,
        NUM_SETS=rank.shape[1],
        GROUP=group,
        GROUP_PAD=1 if group == 1 else max(16, triton.next_power_of_2(group)),
        HEAD=head_size,
        HALF=half,
        INTERLEAVED=interleaved,
        KEEP_LOGITS=keep_logits,
        PAGE=page,
        TILE=config.tile,
        SPLITS=splits,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return outputs


def _outputs(
    query: torch.Tensor, splits: int, masses: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows, num_queries, head_size = query.shape

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=query.device)

    return (
        empty(num_rows, num_queries, splits, head_size),
        empty(num_rows, num_queries, splits),
        empty(num_rows, num_queries, masses) if masses else empty(0),
        empty(num_rows, num_queries) if masses else empty(0),
    )


@attend.register_fake
def _(query, key, value, kv, rank, born, table, *others):
    *_, splits, keep_logits = others
    num_slots, unit = table.shape[1] * kv.shape[2], kv.shape[2] // rank.shape[2]
    return _outputs(query, splits, masses_of(query, num_slots, unit) if keep_logits else 0)
