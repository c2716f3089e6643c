# SPDX-License-Identifier: Apache-2.0
"""One new token a request against its cached tokens: split-KV attention over pages.

Each program reads one KV head's share of the slots in physical order: attention does not care
about order, so nothing is gathered. Key tiles are rotated by ``rank - born`` as they are read and
shared by the query heads of the group; the new token's own key and value come from the forward
pass, not from a page. Raw logits go out for the score update, log-sum-exps for the merge.
Source: split-KV decoding as in Flash-Decoding (https://pytorch.org/blog/flash-decoding/).
"""

import torch
import triton
import triton.language as tl

from .configs import attend_config
from .rotate import gather_reference
from .tiles import (
    CACHED,
    OLD_SLOTS,
    STREAM,
    check_pages,
    check_steps,
    dot_keys,
    load_pair,
    load_rows,
    online_softmax,
    rotate_pair,
    slot_tile,
    soft_cap,
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
    HALF_PAD: tl.constexpr,
    REST: tl.constexpr,
    REST_PAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_LOGIT_SCALE: tl.constexpr,
    KEEP_LOGITS: tl.constexpr,
    STEP: tl.constexpr,
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
    if HAS_LOGIT_SCALE:
        scale = scale * tl.load(logit_scale + row)

    # The new token: split 0 starts from it, the others from nothing.
    queries = query + row64 * query_stride + query_head * HEAD
    new_key = key + row64 * key_stride + head * HEAD + tl.zeros([1], tl.int32)
    new_value = value + row64 * value_stride + head * HEAD + tl.zeros([1], tl.int32)
    here = tl.full([1], split, tl.int32) == 0
    itself = tl.zeros([GROUP_PAD], tl.float32)
    if HALF > 0:
        q1, q2 = load_pair(queries, real, HALF, HALF_PAD, INTERLEAVED)
        k1, k2 = load_pair(new_key, here, HALF, HALF_PAD, INTERLEAVED)
        itself += tl.sum(q1.to(tl.float32) * k1.to(tl.float32), axis=1)
        itself += tl.sum(q2.to(tl.float32) * k2.to(tl.float32), axis=1)
    if REST > 0:
        q3 = load_rows(queries, real, 2 * HALF, HEAD, REST_PAD)
        k3 = load_rows(new_key, here, 2 * HALF, HEAD, REST_PAD)
        itself += tl.sum(q3.to(tl.float32) * k3.to(tl.float32), axis=1)
    itself = soft_cap(itself * scale, cap, HAS_CAP)
    out_head = row64 * (NUM_HEADS * GROUP) + query_head
    if KEEP_LOGITS:
        tl.store(own + out_head, itself, mask=real & (split == 0))
    top = tl.where(split == 0, itself, float("-inf"))
    total = tl.where(split == 0, 1.0, 0.0) + tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
    acc += load_rows(new_value, here, 0, HEAD, HEAD_PAD).to(tl.float32)

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
            x, y = load_pair(source, inside, HALF, HALF_PAD, INTERLEAVED)
            x, y = rotate_pair(x, y, rotation, distance, valid, HALF, HALF_PAD)
            x = tl.where(valid[:, None], x, 0.0).to(q1.dtype)
            y = tl.where(valid[:, None], y, 0.0).to(q1.dtype)
            products += dot_keys(q1, x)
            products += dot_keys(q2, y)
        if REST > 0:
            rest = load_rows(source, inside, 2 * HALF, HEAD, REST_PAD)
            rest = tl.where(valid[:, None], rest, 0.0).to(q3.dtype)
            products += dot_keys(q3, rest)
        products = soft_cap(products * scale, cap, HAS_CAP)
        if HAS_SLOPES:
            # Not before the loop: one value more through it, and registers spill on sm_100.
            slope = tl.load(slopes + query_head, mask=real, other=0.0)
            products += slope[:, None] * (place - cached).to(tl.float32)[None, :]
        products = tl.where(valid[None, :], products, float("-inf"))
        if KEEP_LOGITS:
            target = logits + out_head[:, None] * logits_stride + slot[None, :]
            tl.store(target, products, mask=real[:, None] & inside[None, :])
        values = load_rows(source + HEAD, inside, 0, HEAD, HEAD_PAD)
        values = tl.where(valid[:, None], values, 0.0).to(values.dtype)
        top, total, acc = online_softmax(top, total, acc, products, values)

    # An empty split has total 0: its sum is 0, its log-sum-exp -inf.
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    lse = tl.where(total > 0.0, top + tl.log(tl.where(total > 0.0, total, 1.0)), float("-inf"))
    place = out_head * SPLITS + split
    channel = tl.arange(0, HEAD_PAD)
    tl.store(
        partial + place[:, None] * HEAD + channel[None, :],
        acc,
        mask=real[:, None] & (channel < HEAD)[None, :],
    )
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
        without ``keep_logits``. Rows that are padding are not written.
    """
    check_pages(kv, rank, born)
    check_steps(steps, table)
    num_rows, num_queries, head_size = query.shape
    num_heads, page = kv.shape[1], kv.shape[2]
    assert steps.shape[0] == num_rows and num_queries % num_heads == 0, query.shape
    assert query.stride()[1:] == (head_size, 1) and key.stride()[1:] == (head_size, 1)
    assert value.stride()[1:] == (head_size, 1) and 2 * head_size == kv.shape[3]
    assert query.dtype == key.dtype == value.dtype == kv.dtype, (query.dtype, kv.dtype)
    group = num_queries // num_heads
    half = 0 if rotation is None else rotation.shape[2]
    rest = head_size - 2 * half
    num_slots = table.shape[1] * page
    partial, partial_lse, logits, own = _outputs(query, splits, num_slots, keep_logits)
    if num_rows == 0:
        return partial, partial_lse, logits, own
    config = attend_config(query.device, query.dtype, head_size)
    _attend[(num_rows, num_heads, splits)](
        *(query, key, value, kv, rank, born, table, steps),
        rotation if rotation is not None else partial,
        slopes if slopes is not None else partial,
        logit_scale if logit_scale is not None else partial,
        *(partial, partial_lse, logits, own, scale, softcap),
        *(query.stride(0), key.stride(0), value.stride(0)),
        *(kv.stride(0), rank.stride(0), table.stride(0), num_slots),
        NUM_HEADS=num_heads,
        NUM_SETS=rank.shape[1],
        GROUP=group,
        GROUP_PAD=1 if group == 1 else max(16, triton.next_power_of_2(group)),
        HEAD=head_size,
        HALF=half,
        HALF_PAD=max(16, triton.next_power_of_2(max(half, 1))),
        REST=rest,
        REST_PAD=max(16, triton.next_power_of_2(max(rest, 1))),
        HEAD_PAD=max(16, triton.next_power_of_2(head_size)),
        INTERLEAVED=interleaved,
        HAS_CAP=softcap != 0,
        HAS_SLOPES=slopes is not None,
        HAS_LOGIT_SCALE=logit_scale is not None,
        KEEP_LOGITS=keep_logits,
        STEP=steps.shape[1],
        PAGE=page,
        TILE=config.tile,
        SPLITS=splits,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return partial, partial_lse, logits, own


def _outputs(
    query: torch.Tensor, splits: int, num_slots: int, keep_logits: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows, num_queries, head_size = query.shape

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=query.device)

    return (
        empty(num_rows, num_queries, splits, head_size),
        empty(num_rows, num_queries, splits),
        empty(num_rows, num_queries, num_slots) if keep_logits else empty(0),
        empty(num_rows, num_queries) if keep_logits else empty(0),
    )


@attend.register_fake
def _(
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
    scale,
    softcap,
    interleaved,
    splits,
    keep_logits,
):
    return _outputs(query, splits, table.shape[1] * kv.shape[2], keep_logits)


def attend_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv: torch.Tensor,
    rank: torch.Tensor,
    born: torch.Tensor,
    blocks: torch.Tensor,
    step: list[int],
    inv_freq: torch.Tensor | None,
    *,
    scale: float,
    slopes: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One request in fp64: output ``[H * G, D]``, lse ``[H * G]``, chronological logits.

    The logits are ``[H * G, cached + 1]``, the new token's last.
    """
    score = torch.zeros(rank.shape, dtype=torch.float32)
    keys, values, _, _ = gather_reference(
        kv, rank, born, score, blocks, step, inv_freq, interleaved
    )
    group = query.shape[0] // kv.shape[1]
    keys = torch.cat([keys, key.double()[:, None]], dim=1).repeat_interleave(group, 0)
    values = torch.cat([values, value.double()[:, None]], dim=1).repeat_interleave(group, 0)
    logits = torch.einsum("hd,hnd->hn", query.double(), keys) * scale * logit_scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if slopes is not None:
        distance = torch.arange(logits.shape[1]) - (logits.shape[1] - 1)
        logits = logits + slopes.double()[:, None] * distance
    output = torch.einsum("hn,hnd->hd", logits.softmax(-1), values)
    return output, logits.logsumexp(-1), logits
