# SPDX-License-Identifier: Apache-2.0
"""A layer of a shape on meta tensors, and a call of every launcher with them."""

from dataclasses import dataclass

import torch

from tests.kernels.decode_calls import attend, insert, merge, merge_scored
from tests.kernels.recall_calls import judge_units, ranks_before, recall_units, store_units
from vllm_cascade.kernels.rotation_table import decode_dtype
from vllm_cascade.kernels.triton.assign import Assignment
from vllm_cascade.kernels.triton.cached import CachedLayer
from vllm_cascade.kernels.triton.chunk import ChunkAttention
from vllm_cascade.kernels.triton.column_sums import ColumnSums, num_sums
from vllm_cascade.kernels.triton.configs import WHOLE, Split, stride_config
from vllm_cascade.kernels.triton.drafts import UNDONE_COLUMNS, DraftUndo, Saved, VersionSaver
from vllm_cascade.kernels.triton.gather import StrideGather
from vllm_cascade.kernels.triton.insert_stride import StrideInsertion
from vllm_cascade.kernels.triton.keep import StrideChoice
from vllm_cascade.kernels.triton.prefill import StrideAttention
from vllm_cascade.kernels.triton.recall_columns import RECALL
from vllm_cascade.kernels.triton.schedule import (
    HEAD_COLUMNS,
    TABLE_COLUMNS,
    ScheduleTables,
    schedule,
)
from vllm_cascade.kernels.triton.scores import update
from vllm_cascade.kernels.triton.split import MARKS, Partial
from vllm_cascade.kernels.triton.stored import Codes
from vllm_cascade.kernels.triton.strides import (
    LINE_WORDS,
    NUMBER_ROWS,
    VALUE_ROWS,
    Chunks,
    Strides,
    Tokens,
)
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
    chunked: bool = False
    reduction: str = "mean"
    keep_logits: bool = True
    salted: bool = False
    token: bool = False
    batch: int = 64
    splits: int = 2
    block_size: int = 16
    pages: int = 130
    stride: int = 512
    parts: int = 1
    unit: int = 1
    recall: int = 0
    drafts: int = 0
    store: int = 32768
    only: str = ""
    latent: int | None = None
    code: torch.dtype | None = None
    row_scales: bool = True

    def label(self) -> str:
        """Differences from the default, in words."""
        words = [f"{self.num_heads * self.group}/{self.num_heads} x {self.head_size}"]
        words += [f"latents of {self.latent}"] if self.latent else []
        words.append(str(self.dtype).removeprefix("torch."))
        if self.code is not None:
            words.append(f"stored as {str(self.code).removeprefix('torch.')}")
            words += [] if self.row_scales else ["a layer's scales"]
        flags = ("per_head", "interleaved", "alibi", "logit_scale", "sinks", "token")
        words += [name for name in flags if getattr(self, name)]
        words += ["soft cap"] if self.softcap else []
        kind = "chunks" if self.chunked else "window"
        words += [f"{kind} of {self.window}"] if self.window else []
        words += [f"pages of {self.block_size}"] if self.block_size != 16 else []
        words += [f"units of {self.unit}"] if self.unit > 1 else []
        words += [f"strides in {self.parts} parts"] if self.parts > 1 else []
        words += [f"recall {self.recall}"] if self.recall else []
        words += [f"{self.drafts} drafts"] if self.drafts else []
        words += [f"{self.pages} pages"] if self.block_size * self.pages < 2000 else []
        words += [self.reduction] if self.reduction != "mean" else []
        words += [] if self.rotary or self.alibi else ["no rotation"]
        words += [] if self.keep_logits else ["no scores"]
        words += ["drawn scores"] if self.salted else []
        return ", ".join(words)

    @property
    def row_size(self) -> int:
        """Channels of a stored row: a key and a value, or a latent row."""
        return self.head_size if self.latent else 2 * self.head_size

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of rows in pages: of codes that are floats, of their bits."""
        if self.code in (None, torch.int8):
            return self.code or self.dtype
        return torch.uint8

    def value_of(self, key: torch.Tensor) -> torch.Tensor:
        return key[..., -self.latent :] if self.latent else key

    def output_of(self, query: torch.Tensor) -> torch.Tensor:
        return query.new_empty(*query.shape[:2], self.latent or self.head_size)


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
        self.kv = _meta(blocks, heads, page, shape.row_size, dtype=shape.stored_dtype)
        units = page // shape.unit
        self.rank = _meta(blocks, sets, units, dtype=i32)
        self.born = torch.empty_like(self.rank)
        self.score = _meta(blocks, sets, units, dtype=f32)
        token = torch.empty_like(self.rank) if shape.token else None
        self.words = {
            "kv": self.kv,
            "rank": self.rank,
            "born": self.born,
            "score": self.score,
            "token": token,
        }
        self.stored = None
        if shape.code is not None:
            scales = _meta(2, dtype=f32)
            if shape.row_scales:
                where = (sets * units, 2 * page, 1, page)
                scales = _meta(1, dtype=f32).as_strided((blocks, heads, page, 2), where)
            self.stored = Codes(shape.code, scales)
        self.rows = {"latent": shape.latent, "stored": self.stored}
        self.table = _meta(shape.batch, shape.pages, dtype=i32)
        self.steps = _meta(shape.batch, STEP_COLUMNS, dtype=i32)
        turning = size - (shape.latent or 0)  # channels that rotate
        half = turning // 2 if shape.rotary and not shape.alibi else 0
        self.rotation = _meta(4096, 2, half, dtype=f32) if half else None
        self.decode_rotation = self.rotation
        if self.rotation is not None:
            self.decode_rotation = self.rotation.to(decode_dtype(shape.dtype))
        queries = heads * shape.group
        self.slopes = _meta(queries, dtype=f32) if shape.alibi else None
        self.sinks = _meta(queries, dtype=f32) if shape.sinks else None
        self.query = _meta(shape.batch, queries, size, dtype=shape.dtype)
        self.key = _meta(shape.batch, heads, size, dtype=shape.dtype)
        self.value = shape.value_of(self.key)
        self.salts = _meta(sets, dtype=i32) if shape.salted else None
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
        schedule(
            seq_lens=lengths,
            blocks=self.table,
            tables=tables,
            schedule_of=lengths,
            steps=self.steps,
            positions=own,
        )
        scale = _meta(shape.batch, dtype=f32) if shape.logit_scale else None
        parts, parts_lse, logits, own = attend(
            query=self.query,
            key=self.key,
            value=self.value,
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
            **self.rows,
        )
        found = {"partial": parts, "partial_lse": parts_lse, "sinks": self.sinks}
        found["output"] = shape.output_of(self.query)
        lse = merge(**found, steps=self.steps)
        scored = {"rank": self.rank, "score": self.score, "table": self.table, "steps": self.steps}
        if shape.keep_logits:
            left = {"logits": logits, "own": own}
            how = {"reduction": shape.reduction, "unit": shape.unit}
            merge_scored(**found, **left, **scored, **how)
            update(**left, lse=lse, **scored, **how)  # tensor-parallel ranks merge first
        given, ranks = _meta(shape.batch, dtype=f32), _meta(shape.batch, dtype=i32)
        assignment = Assignment(self.rank, self.score, shape.unit, self.salts)
        assignment(given, ranks, self.table, self.steps)
        insert(
            key=self.key,
            value=self.value,
            new_score=_meta(shape.batch, self.sets, dtype=f32),
            **self.words,
            table=self.table,
            steps=self.steps,
            rules=_meta(9, 4, dtype=i32),
            has_cells=shape.keep_logits,
            positions=shared,
            **self.rows,
        )

    def drafting(self) -> None:
        """Schedule rows with drafts, save what a draft replaces, insert it, and undo drafts."""
        shape, i32, most = self.shape, torch.int32, self.shape.drafts
        lengths = _meta(shape.batch, dtype=i32)
        rows, heads = _meta(2100, TABLE_COLUMNS, dtype=i32), _meta(1, HEAD_COLUMNS, dtype=i32)
        schedule(
            seq_lens=lengths,
            blocks=self.table,
            tables=ScheduleTables(rows, heads, shape.unit),
            schedule_of=lengths,
            steps=_meta(1 + most, 256, STEP_COLUMNS, dtype=i32),
            positions=_meta(shape.batch * (1 + most), dtype=torch.int64),
        )
        blocks, sets, units = self.rank.shape
        places = shape.batch * most
        # All words of a page are in one tensor and have its stride.
        words = _meta(blocks, 2 * (most + 2), sets, units, dtype=i32)
        own = self.words | {"rank": words[:, 0], "born": words[:, 1]}
        own["score"] = words[:, 2].view(torch.float32)
        own["token"] = words[:, 3] if shape.token else None
        versions = words[:, 4:].unflatten(1, (most, 2))
        heads, slots = shape.num_heads, shape.block_size
        own_scales = None
        if shape.token:  # rows with scales of their own
            words_of_page = _meta(blocks, 2 * (most + 2) * sets * units, dtype=torch.float32)
            strides = (words_of_page.stride(0), 2 * slots, 1, slots)
            own_scales = words_of_page.as_strided((blocks, heads, slots, 2), strides)
        saved = Saved(
            rows=_meta(places, heads, shape.row_size, dtype=shape.dtype),
            words=_meta(places, 3, sets, dtype=i32),
            scale=None if own_scales is None else _meta(places, heads, 2, dtype=torch.float32),
            page_scale=own_scales,
        )
        scored = {name: own[name] for name in ("rank", "score")}
        where = {"table": self.table, "steps": self.steps}
        VersionSaver(**scored, versions=versions, unit=shape.unit)(lengths, **where)
        insert(
            key=self.key,
            value=self.value,
            new_score=_meta(shape.batch, sets, dtype=torch.float32),
            **own,
            **where,
            rules=_meta(9, 4, dtype=i32),
            has_cells=shape.keep_logits,
            saves=lengths,
            saved=saved,
            **self.rows,
        )
        undone = _meta(shape.batch, UNDONE_COLUMNS, dtype=i32)
        DraftUndo(**own, versions=versions, saved=saved)(undone, self.table)

    def prefill(self) -> None:
        """All launches of one stride, and of a chunk."""
        shape, f32, i32 = self.shape, torch.float32, torch.int32
        steps, table, num_tokens = self.steps[:1], self.table[:1], shape.stride
        query = _meta(num_tokens, self.queries, shape.head_size, dtype=shape.dtype)
        key = _meta(num_tokens, shape.num_heads, shape.head_size, dtype=shape.dtype)
        scale = _meta(num_tokens, dtype=f32) if shape.logit_scale else None
        value, output = shape.value_of(key), shape.output_of(query)
        width = (2048 + num_tokens) // shape.unit
        split, partial = WHOLE, None
        if shape.parts > 1:
            tile = stride_config(query.device, shape.dtype, shape.head_size).tile
            split = Split(shape.parts, -(-2048 // (shape.parts * tile)) * tile)
            each = num_tokens, self.queries, shape.parts
            partial = Partial(
                output=_meta(*each, shape.latent or shape.head_size, dtype=f32),
                marks=_meta(*each, MARKS, dtype=f32),
                arrived=_meta(num_tokens * self.queries),
            )
        sums, parts = None, 1
        if shape.keep_logits:
            heads, parts = num_sums(query, shape.num_heads, shape.unit, shape.reduction)
            sums = _meta(1, heads, width * parts, dtype=f32)
        tokens = Tokens(query=query, key=key, value=value, output=output, logit_scale=scale)
        strides = Strides(
            steps=steps,
            table=table,
            max_length=num_tokens,
            max_slots=2048,
            lse=_meta(num_tokens, self.queries, dtype=f32),
            gathered=_meta(1, shape.num_heads, 2048, shape.row_size, dtype=shape.dtype),
            line=_meta(1, self.sets, LINE_WORDS, width, dtype=i32),
            partial=partial,
            decays=_meta(num_tokens, dtype=f32),
            sums=sums,
            parts=parts,
            query_heads=self.queries // self.sets,
            given=None if shape.keep_logits else _meta(num_tokens, dtype=f32),
            plans=_meta(9000, dtype=i32),
            notes=_meta(1, self.sets, 8, NUMBER_ROWS, width, dtype=i32),
            values=_meta(1, self.sets, 8, VALUE_ROWS, width, dtype=f32),
        )
        reads = {"slopes": self.slopes, "scale": 0.088, "softcap": shape.softcap}
        turning = {"rotation": self.decode_rotation, "interleaved": shape.interleaved}
        own = {**self.rows, "num_queries": self.queries, "dtype": shape.dtype}
        layer = CachedLayer(**self.words, **turning, **reads, **own)
        StrideGather(layer)(strides)
        StrideAttention(layer, self.sinks, split)(tokens, strides)
        positions, finished = _meta(num_tokens, dtype=torch.int64), _meta(1, self.sets)
        chunks = Chunks(steps, steps, table, positions, finished, num_tokens, 2048, 2048)
        chunked = ChunkAttention(layer, self.rotation, self.sinks, shape.window, shape.chunked)
        chunked(tokens, chunks, chunks.parts(strides.gathered))
        if shape.keep_logits:
            ColumnSums(layer, shape.reduction)(tokens, strides)
        self._insertion(self.words)(tokens, strides)

    def _insertion(self, words: dict[str, torch.Tensor | None]) -> StrideInsertion:
        shape = self.shape
        turning = {"rotation": self.rotation, "interleaved": shape.interleaved}
        layer = CachedLayer(**words, **turning, **self.rows, dtype=shape.dtype)
        return StrideInsertion(layer, shape.reduction, self.salts)

    def recall(self, asking: int = 1) -> None:
        """Choose and store: of single tokens, or of strides of which so many tokens ask."""
        shape, capacity = self.shape, self.shape.store // self.shape.unit
        i32, rings, tokens = torch.int32, shape.batch * capacity, shape.stride
        keys = (shape.num_heads, rings, shape.unit)
        rows = _meta(*keys, shape.row_size, dtype=shape.stored_dtype)
        row_scales = None
        if self.stored is not None and self.stored.of_rows:
            row_scales = _meta(*keys, 2, dtype=torch.float32)
        codes = _meta(*keys, shape.head_size, dtype=torch.int8)
        scales, words = _meta(*keys, dtype=torch.float32), _meta(self.sets, rings, dtype=i32)
        recall = _meta(shape.batch, RECALL.value, dtype=i32)
        turning = {"rotation": self.rotation, "interleaved": shape.interleaved}
        own = self.words | {"token": torch.empty_like(self.rank)}
        where = {"table": self.table, "steps": self.steps, "recall": recall}
        query = _meta(tokens, self.queries, shape.head_size, dtype=shape.dtype)
        layer = CachedLayer(**own, **turning, **self.rows, scale=0.088)
        evidence = judge_units(
            query=query,
            codes=codes,
            scales=scales,
            **where,
            layer=layer,
            capacity=capacity,
            most_asking=asking,
        )
        ring = {"rows": rows, "stored_born": words, "stored_token": words, "row_scales": row_scales}
        recall_units(
            evidence=evidence,
            **where,
            layer=layer,
            **ring,
            exchanged=_meta(1, dtype=torch.int64),
            most=shape.recall,
        )
        judged = {"codes": codes, "scales": scales, "capacity": capacity}
        store = {**where, "layer": layer, **ring, **judged}
        if asking == 1:
            ranks = ranks_before(**store)
            store_units(keep=None, ranks=ranks, key=None, value=None, **store)
            return
        key = _meta(tokens, shape.num_heads, shape.head_size, dtype=shape.dtype)
        width = (2048 + tokens) // shape.unit
        heads, parts = num_sums(query, shape.num_heads, shape.unit, shape.reduction)
        strides = Strides(
            **where,
            line=_meta(shape.batch, self.sets, LINE_WORDS, width, dtype=i32),
            sums=_meta(shape.batch, heads, width * parts, dtype=torch.float32),
            parts=parts,
            query_heads=self.queries // self.sets,
            plans=_meta(9000, dtype=i32),
            notes=_meta(shape.batch, self.sets, 8, NUMBER_ROWS, width, dtype=i32),
            values=_meta(shape.batch, self.sets, 8, VALUE_ROWS, width, dtype=torch.float32),
        )
        keep = StrideChoice(own["token"], shape.unit, shape.reduction, self.salts)(strides)
        value = shape.value_of(key)
        store_units(keep=keep, ranks=None, key=key, value=value, **store)
        self._insertion(own)(Tokens(query=None, key=key, value=value), strides)
