# SPDX-License-Identifier: Apache-2.0
"""A layer of a shape on meta tensors, and a call of every launcher with them."""

from dataclasses import dataclass

import torch

from vllm_cascade.kernels.triton.assign import assign
from vllm_cascade.kernels.triton.attend import attend
from vllm_cascade.kernels.triton.chunk import attend_chunks
from vllm_cascade.kernels.triton.column_sums import column_sums, num_sums
from vllm_cascade.kernels.triton.combine import merge, update
from vllm_cascade.kernels.triton.configs import WHOLE, Split, prefill_config
from vllm_cascade.kernels.triton.insert import insert
from vllm_cascade.kernels.triton.insert_stride import insert_strides
from vllm_cascade.kernels.triton.keep import NUMBER_ROWS, VALUE_ROWS, keep_of_strides
from vllm_cascade.kernels.triton.prefill import LINE_WORDS, attend_strides
from vllm_cascade.kernels.triton.recall import RECALL, judge_units
from vllm_cascade.kernels.triton.recall_choose import recall_units
from vllm_cascade.kernels.triton.recall_store import ranks_before, store_units
from vllm_cascade.kernels.triton.rotate import decode_dtype
from vllm_cascade.kernels.triton.schedule import (
    HEAD_COLUMNS,
    TABLE_COLUMNS,
    ScheduleTables,
    schedule,
)
from vllm_cascade.kernels.triton.split import MARKS, Partial
from vllm_cascade.kernels.triton.tiles import STEP_COLUMNS


@dataclass(frozen=True)
class Shape:
    """A layer as it would be served: batch 64, 2,052 cached tokens, pages of 16."""

    head_size: int = 128
    num_heads: int = 8
    group: int = 4
    dtype: torch.dtype = torch.float16
    per_head: bool = False
    interleaved: bool = False
    rotary: bool = True
    alibi: bool = False
    softcap: float = 0.0
    logit_scale: bool = False
    sinks: bool = False
    window: int | None = None
    reduction: str = "mean"
    keep_logits: bool = True
    token: bool = False
    batch: int = 64
    splits: int = 2
    block_size: int = 16
    pages: int = 130
    stride: int = 512
    parts: int = 1
    unit: int = 1
    recall: int = 0
    store: int = 32768
    only: str = ""

    def label(self) -> str:
        """Differences from the default, in words."""
        words = [f"{self.num_heads * self.group}/{self.num_heads} x {self.head_size}"]
        words.append(str(self.dtype).removeprefix("torch."))
        flags = ("per_head", "interleaved", "alibi", "logit_scale", "sinks", "token")
        words += [name for name in flags if getattr(self, name)]
        words += ["soft cap"] if self.softcap else []
        words += [f"window of {self.window}"] if self.window else []
        words += [f"pages of {self.block_size}"] if self.block_size != 16 else []
        words += [f"units of {self.unit}"] if self.unit > 1 else []
        words += [f"strides in {self.parts} parts"] if self.parts > 1 else []
        words += [f"recall {self.recall}"] if self.recall else []
        words += [f"{self.pages} pages"] if self.block_size * self.pages < 2000 else []
        words += [self.reduction] if self.reduction != "mean" else []
        words += [] if self.rotary or self.alibi else ["no rotation"]
        words += [] if self.keep_logits else ["no scores"]
        return ", ".join(words)


def _meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Layer:
    """Meta tensors of a shape, and a call of every launcher."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        heads, page, size = shape.num_heads, shape.block_size, shape.head_size
        sets = heads if shape.per_head else 1
        blocks = shape.batch * shape.pages + 1
        f32, i32 = torch.float32, torch.int32
        self.kv = _meta(blocks, heads, page, 2 * size, dtype=shape.dtype)
        units = page // shape.unit
        self.rank = _meta(blocks, sets, units, dtype=i32)
        self.born = torch.empty_like(self.rank)
        self.score = _meta(blocks, sets, units, dtype=f32)
        token = torch.empty_like(self.rank) if shape.token else None
        self.words = self.kv, self.rank, self.born, self.score, token
        self.table = _meta(shape.batch, shape.pages, dtype=i32)
        self.steps = _meta(shape.batch, STEP_COLUMNS, dtype=i32)
        half = size // 2 if shape.rotary and not shape.alibi else 0
        self.rotation = _meta(4096, 2, half, dtype=f32) if half else None
        self.decode_rotation = self.rotation
        if self.rotation is not None:
            self.decode_rotation = self.rotation.to(decode_dtype(shape.dtype))
        queries = heads * shape.group
        self.slopes = _meta(queries, dtype=f32) if shape.alibi else None
        self.sinks = _meta(queries, dtype=f32) if shape.sinks else None
        self.query = _meta(shape.batch, queries, size, dtype=shape.dtype)
        self.key = _meta(shape.batch, heads, size, dtype=shape.dtype)
        self.sets, self.queries = sets, queries

    def decode(self) -> None:
        """Schedule, attend, merge, update, assign and insert."""
        shape, f32, i32 = self.shape, torch.float32, torch.int32
        rows, heads = _meta(2100, TABLE_COLUMNS, dtype=i32), _meta(1, HEAD_COLUMNS, dtype=i32)
        lengths = _meta(shape.batch, dtype=i32)
        positions = _meta(shape.batch, dtype=torch.int64)
        tables = ScheduleTables(rows, heads, shape.unit)
        shared = positions if shape.window else None  # others say them
        own = None if shape.window else positions
        schedule(lengths, self.table, tables, lengths, self.steps, own)
        scale = _meta(shape.batch, dtype=f32) if shape.logit_scale else None
        parts, parts_lse, logits, own = attend(
            query=self.query,
            key=self.key,
            value=self.key,
            kv=self.kv,
            rank=self.rank,
            born=self.born,
            table=self.table,
            steps=self.steps,
            rotation=self.decode_rotation,
            slopes=self.slopes,
            logit_scale=scale,
            scale=0.088,
            softcap=shape.softcap,
            interleaved=shape.interleaved,
            splits=shape.splits,
            keep_logits=shape.keep_logits,
            positions=shared,
        )
        output = torch.empty_like(self.query)
        lse = merge(parts, parts_lse, self.steps, output, self.sinks)
        if shape.keep_logits:
            rows = logits, own, lse, self.rank, self.score, self.table, self.steps
            update(*rows, shape.reduction, shape.unit)
        given, ranks = _meta(shape.batch, dtype=f32), _meta(shape.batch, dtype=i32)
        assign(given, ranks, self.rank, self.score, self.table, self.steps, shape.unit)
        insert(
            *(self.key, self.key, _meta(shape.batch, self.sets, dtype=f32), *self.words),
            *(self.table, self.steps, _meta(9, 4, dtype=i32), shape.keep_logits, shared),
        )

    def prefill(self) -> None:
        """Attend, column sums and insert of one stride, and all strides of a chunk at once."""
        shape, f32, i32 = self.shape, torch.float32, torch.int32
        steps, table, tokens = self.steps[:1], self.table[:1], shape.stride
        query = _meta(tokens, self.queries, shape.head_size, dtype=shape.dtype)
        key = _meta(tokens, shape.num_heads, shape.head_size, dtype=shape.dtype)
        scale = _meta(tokens, dtype=f32) if shape.logit_scale else None
        common = (shape.interleaved, self.slopes, scale, 0.088, shape.softcap, tokens)
        output, lse = torch.empty_like(query), _meta(tokens, self.queries, dtype=f32)
        width = (2048 + tokens) // shape.unit
        line = _meta(1, self.sets, LINE_WORDS, width, dtype=i32)
        pages, where = self.words[:3], (table, steps, self.decode_rotation)
        split, partial = WHOLE, None
        if shape.parts > 1:
            tile = prefill_config(query.device, shape.dtype, shape.head_size).tile
            split = Split(shape.parts, -(-2048 // (shape.parts * tile)) * tile)
            each, counters = (tokens, self.queries, shape.parts), _meta(tokens * self.queries)
            sums, marks = _meta(*each, shape.head_size, dtype=f32), _meta(*each, MARKS, dtype=f32)
            partial = Partial(sums, marks, counters)
        last = output, lse, line, self.sinks, split, partial
        attend_strides(query, key, key, *self.words, *where, *common, *last)
        positions, finished = _meta(tokens, dtype=torch.int64), _meta(1, 2 * shape.num_heads)
        attend_chunks(
            *(query, key, key, *self.words, table, steps, steps, positions, finished),
            *(self.decode_rotation, self.rotation, *common, output, self.sinks, shape.window),
        )
        sums, parts = None, 1
        if shape.keep_logits:
            heads, parts = num_sums(query, shape.num_heads, shape.unit, shape.reduction)
            sums = _meta(1, heads, width * parts, dtype=f32)
            column_sums(
                *(query, key, *pages, *where, *common, lse, _meta(tokens, dtype=f32)),
                *(shape.reduction, 2048, sums),
            )
        given = None if shape.keep_logits else _meta(tokens, dtype=f32)
        notes = _meta(1, self.sets, 8, NUMBER_ROWS, width, dtype=i32)
        values = _meta(1, self.sets, 8, VALUE_ROWS, width, dtype=f32)
        insert_strides(
            *(key, key, *self.words, table, steps, self.rotation, shape.interleaved, sums, given),
            *(line, _meta(9000, dtype=i32), shape.reduction, self.queries // self.sets, parts),
            *(notes, values),
        )

    def recall(self, asking: int = 1) -> None:
        """Choose and store: of single tokens, or of strides of which so many tokens ask."""
        shape, capacity = self.shape, self.shape.store // self.shape.unit
        i32, rings, tokens = torch.int32, shape.batch * capacity, shape.stride
        keys = (shape.num_heads, rings, shape.unit)
        rows = _meta(*keys, 2 * shape.head_size, dtype=shape.dtype)
        codes = _meta(*keys, shape.head_size, dtype=torch.int8)
        scales, words = _meta(*keys, dtype=torch.float32), _meta(self.sets, rings, dtype=i32)
        recall = _meta(shape.batch, RECALL.value, dtype=i32)
        turning = self.rotation, shape.interleaved
        token = torch.empty_like(self.rank)
        query = _meta(tokens, self.queries, shape.head_size, dtype=shape.dtype)
        evidence = judge_units(
            *(query, codes, scales, self.steps, recall, *turning, 0.088, capacity, self.sets),
            asking,
        )
        recall_units(
            evidence=evidence,
            rows=rows,
            stored_born=words,
            stored_token=words,
            kv=self.kv,
            rank=self.rank,
            born=self.born,
            score=self.score,
            token=token,
            table=self.table,
            steps=self.steps,
            recall=recall,
            exchanged=_meta(1, dtype=i32),
            most=shape.recall,
        )
        lines = self.kv, self.rank, self.born, token, self.table, self.steps, recall
        store = *turning, rows, codes, scales, words, words, capacity
        if asking == 1:
            ranks = ranks_before(self.rank, self.table, self.steps, recall, shape.unit)
            store_units(None, ranks, None, None, *lines, *store)
            return
        key = _meta(tokens, shape.num_heads, shape.head_size, dtype=shape.dtype)
        width = (2048 + tokens) // shape.unit
        line = _meta(shape.batch, self.sets, LINE_WORDS, width, dtype=i32)
        notes = _meta(shape.batch, self.sets, 8, NUMBER_ROWS, width, dtype=i32)
        values = _meta(shape.batch, self.sets, 8, VALUE_ROWS, width, dtype=torch.float32)
        heads, parts = num_sums(query, shape.num_heads, shape.unit, shape.reduction)
        sums = _meta(shape.batch, heads, width * parts, dtype=torch.float32)
        plans = _meta(9000, dtype=i32)
        keep = keep_of_strides(
            token=token,
            steps=self.steps,
            recall=recall,
            unit=shape.unit,
            sums=sums,
            given=None,
            line=line,
            plans=plans,
            reduction=shape.reduction,
            query_heads=self.queries // self.sets,
            parts=parts,
            notes=notes,
            values=values,
        )
        store_units(keep, None, key, key, *lines, *store)
        insert_strides(
            *(key, key, self.kv, self.rank, self.born, self.score, token, self.table, self.steps),
            *(*turning, sums, None, line, plans, shape.reduction, self.queries // self.sets),
            *(parts, notes, values, recall),
        )
