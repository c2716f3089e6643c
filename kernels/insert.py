# SPDX-License-Identifier: Apache-2.0
"""Put one new token a request into its pages: find the victim, close the gap, write the row.

Every policy is one rule here: of the ranks ``[lo, hi)``, the new token's being the highest, delete
none (the cache grows), all, or the one with the lowest score. A fixed victim is a range of one, a
contest of two neighbours a range of two, heavy hitters the range between sinks and window.
The new token takes a freed or fresh slot and the highest rank; nothing else moves.
Source: Algorithm 1 of Cascading KV Cache (https://arxiv.org/abs/2406.17808) on slots with ranks.
"""

import torch
import triton
import triton.language as tl

from .tiles import (
    CACHED,
    EVICTS,
    HI,
    LO,
    NEVER,
    NEW_SLOTS,
    OLD_SLOTS,
    STREAM,
    block_of,
    check_pages,
    check_steps,
    copy_rows,
    victim_key,
    victim_rank,
)


@triton.jit
def _compared(score, token, now, HAS_AGE: tl.constexpr):
    """What is compared: the score, or the score per query that saw the token."""
    if HAS_AGE:
        score = score / tl.maximum(now - token, 1).to(tl.float32)
    return score


@triton.jit
def _insert(
    key,
    value,
    new_score,
    kv,
    rank,
    born,
    score,
    token,
    table,
    steps,
    key_stride,
    value_stride,
    page_stride,
    word_stride,
    table_stride,
    NUM_SETS: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    KEEP_LATER: tl.constexpr,
    HAS_TOKEN: tl.constexpr,
    PER_QUERY: tl.constexpr,
    STEP: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head_set = tl.program_id(1)
    stream = tl.load(steps + row * STEP + STREAM)
    if stream < 0:
        return
    cached = tl.load(steps + row * STEP + CACHED)
    old_slots = tl.load(steps + row * STEP + OLD_SLOTS)
    new_slots = tl.load(steps + row * STEP + NEW_SLOTS)
    lo = tl.load(steps + row * STEP + LO)
    hi = tl.load(steps + row * STEP + HI)
    evicts = tl.load(steps + row * STEP + EVICTS)
    table += row * table_stride
    mine = tl.load(new_score + row * NUM_SETS + head_set)

    if (evicts > 0) & (evicts < hi - lo):  # one of several: the lowest score
        best = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
        if cached < hi:
            own = _compared(mine, stream, stream + 1, PER_QUERY)
            best = victim_key(own, cached, KEEP_LATER)
        for first in range(0, old_slots, TILE):
            slot = first + tl.arange(0, TILE)
            inside = slot < old_slots
            word = block_of(table, slot, inside, PAGE) * word_stride + head_set * PAGE + slot % PAGE
            place = tl.load(rank + word, mask=inside, other=-1)
            candidate = (place >= lo) & (place < hi)
            theirs = tl.load(score + word, mask=candidate, other=0.0)
            if PER_QUERY:
                born_at = tl.load(token + word, mask=candidate, other=0)
                theirs = _compared(theirs, born_at, stream + 1, PER_QUERY)
            keys = victim_key(theirs, place, KEEP_LATER)
            keys = tl.where(candidate, keys, 0x7FFFFFFFFFFFFFFF)
            best = tl.minimum(best, tl.min(keys, axis=0))
        lo = victim_rank(best, KEEP_LATER)
        hi = lo + 1
    hi = tl.where(evicts > 0, hi, lo)  # from here on: all ranks in [lo, hi) are deleted

    # Renumber, and find the first slot that is free afterwards.
    target = tl.full([], NEVER, tl.int32)
    for first in range(0, new_slots, TILE):
        slot = first + tl.arange(0, TILE)
        inside = slot < new_slots
        word = block_of(table, slot, inside, PAGE) * word_stride + head_set * PAGE + slot % PAGE
        place = tl.load(rank + word, mask=slot < old_slots, other=-1)
        gone = (place >= lo) & (place < hi)
        place = tl.where(gone | (place < 0), -1, tl.where(place >= hi, place - (hi - lo), place))
        tl.store(rank + word, place, mask=inside)
        free = tl.where(inside & (place < 0), slot, NEVER)
        target = tl.minimum(target, tl.min(free, axis=0))
    if (cached >= lo) & (cached < hi):
        return  # the new token itself is the victim
    if target == NEVER:
        return
    tl.debug_barrier()  # the rank that the loop wrote there is replaced
    block = tl.load(table + target // PAGE).to(tl.int64)
    word = block * word_stride + head_set * PAGE + target % PAGE
    tl.store(rank + word, cached - (hi - lo))
    tl.store(born + word, cached)
    tl.store(score + word, mine)
    if HAS_TOKEN:
        tl.store(token + word, stream)
    head = head_set * HEADS + tl.arange(0, HEADS_PAD)
    real = tl.arange(0, HEADS_PAD) < HEADS
    keys = key + row * key_stride + head * HEAD
    values = value + row * value_stride + head * HEAD
    slots = kv + block * page_stride + (head * PAGE + target % PAGE) * (2 * HEAD)
    copy_rows(keys, values, slots, real, HEAD, HEAD_PAD)


@torch.library.custom_op(
    "kv_cascade::insert", mutates_args=("kv", "rank", "born", "score", "token")
)
def insert(
    key: torch.Tensor,
    value: torch.Tensor,
    new_score: torch.Tensor,
    kv: torch.Tensor,
    rank: torch.Tensor,
    born: torch.Tensor,
    score: torch.Tensor,
    token: torch.Tensor | None,
    table: torch.Tensor,
    steps: torch.Tensor,
    keep_later: bool,
    per_query: bool,
) -> None:
    """Insert one token a request; ``steps`` says which ranks may be deleted.

    Args:
        key, value: ``[B, H, D]``, keys rotated at position ``cached``.
        new_score: fp32 ``[B, S]``, the new tokens' scores.
        kv, rank, born, score, token: ``Pages`` views, written; ``token`` None where not kept.
        table: int32 ``[>= B, P]``.
        steps: int32 ``[B, 7]``; rows with ``STREAM`` -1 write nothing.
        keep_later: of equal scores the later token stays (``tie`` incoming), or the earlier one.
        per_query: compare ``score / queries that saw the token``; needs ``token``.
    """
    words = (rank, born, score) if token is None else (rank, born, score, token)
    check_pages(kv, *words)
    check_steps(steps, table)
    num_rows, num_heads, head_size = key.shape
    assert key.stride()[1:] == (head_size, 1) and value.stride()[1:] == (head_size, 1)
    assert new_score.is_contiguous() and new_score.shape == (num_rows, rank.shape[1])
    assert key.dtype == kv.dtype and (token is not None or not per_query)
    if num_rows == 0:
        return
    num_sets, page = rank.shape[1:]
    heads = num_heads // num_sets
    # One program a request and set: latency decides, so all slots are one tile where they can be.
    tile = min(4096, triton.next_power_of_2(table.shape[1] * page))
    _insert[(num_rows, num_sets)](
        *(key, value, new_score, kv, rank, born, score),
        *(token if token is not None else rank, table, steps, key.stride(0), value.stride(0)),
        *(kv.stride(0), rank.stride(0), table.stride(0)),
        NUM_SETS=num_sets,
        HEADS=heads,
        HEADS_PAD=triton.next_power_of_2(heads),
        HEAD=head_size,
        HEAD_PAD=triton.next_power_of_2(head_size),
        KEEP_LATER=keep_later,
        HAS_TOKEN=token is not None,
        PER_QUERY=per_query,
        STEP=steps.shape[1],
        PAGE=page,
        TILE=tile,
        num_warps=8 if tile > 1024 else 4,
    )


@insert.register_fake
def _(
    key, value, new_score, kv, rank, born, score, token, table, steps, keep_later, per_query
) -> None:
    return None


def survivors_reference(
    step: list[int], compared: torch.Tensor, keep_later: bool
) -> list[list[int]]:
    """Ranks among ``cached + 1`` that stay, per head set, from literal lists.

    Args:
        compared: fp64 ``[S, cached + 1]``, what is compared, chronological.
    """
    lo, hi, evicts = (step[c.value] for c in (LO, HI, EVICTS))
    kept = []
    for row in compared.tolist():
        candidates = list(range(lo, hi))
        if evicts == len(candidates):
            gone = set(candidates)
        elif evicts:
            gone = {min(candidates, key=lambda r: (row[r], r if keep_later else -r))}
        else:
            gone = set()
        kept.append([r for r in range(len(row)) if r not in gone])
    return kept
