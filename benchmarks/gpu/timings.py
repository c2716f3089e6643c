# SPDX-License-Identifier: Apache-2.0
"""Timings of the kernels on one GPU, beside what they must be compared with.

Times are medians of ``triton.testing.do_bench`` over inputs that rotate through more memory than
the L2 cache holds. Sizes come in a ``Sizes``, so that a test can run this code with tiny ones.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.kernels.decode_calls import attend, insert, merge_scored
from tests.kernels.random_pool import float_bits
from vllm_cascade.kernels.rotation_table import decode_dtype, rotation_table
from vllm_cascade.kernels.triton import configs
from vllm_cascade.kernels.triton import stride_columns as columns
from vllm_cascade.kernels.triton.cached import CachedLayer
from vllm_cascade.kernels.triton.column_sums import ColumnSums
from vllm_cascade.kernels.triton.gather import StrideGather
from vllm_cascade.kernels.triton.insert_stride import StrideInsertion, num_programs
from vllm_cascade.kernels.triton.prefill import StrideAttention
from vllm_cascade.kernels.triton.strides import (
    LINE_WORDS,
    NUMBER_ROWS,
    VALUE_ROWS,
    Strides,
    Tokens,
)
from vllm_cascade.kernels.triton.tiles import STEP_COLUMNS

Row = dict[str, Any]
SDPA = torch.nn.functional.scaled_dot_product_attention
GIB = 1 << 30
AVERAGE = (0.991, 0.009)
"""Decay and weight of the scores' average."""


@dataclass(frozen=True)
class Sizes:
    """What is measured; the defaults are the issue's."""

    batches: tuple[int, ...] = (1, 16, 64, 256)
    cached: tuple[int, ...] = (1024, 2048, 4096, 8192)
    heads: tuple[tuple[int, int], ...] = ((32, 8), (8, 8))
    head_size: int = 128
    copy_bytes: int = GIB
    prefill_lengths: tuple[int, ...] = (4096, 8192, 32768, 131072)
    prefill_strides: tuple[int, ...] = (256, 512, 1024, 4096)
    prefill_budget: int = 2048


TINY = Sizes(
    batches=(2,),
    cached=(24,),
    heads=((2, 1),),
    head_size=16,
    copy_bytes=1 << 16,
    prefill_lengths=(48, 96),
    prefill_strides=(24,),
    prefill_budget=24,
)


class Bench:
    """Milliseconds of a call on a device, and whether there is time for more."""

    def __init__(self, device: torch.device, deadline: float) -> None:
        self.device, self.deadline = device, deadline

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def milliseconds(self, call: Callable[[], Any]) -> float:
        """Median; without a GPU a single run, which only shows that the code runs."""
        if self.on_gpu:
            from triton.testing import do_bench

            return float(do_bench(call, warmup=15, rep=60, return_mode="median"))
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3

    def replayed(self, call: Callable[[], Any]) -> float:
        """Median of a call in a replayed CUDA graph, as decode runs: no launches from Python."""
        if not self.on_gpu:
            return self.milliseconds(call)
        from triton.testing import do_bench_cudagraph

        return float(do_bench_cudagraph(call, rep=20, return_mode="median"))

    def rows(self, what: str, cases: Iterable[Row], measure: Callable[[Row], Row]) -> Iterator[Row]:
        """A row a case: its sizes and what was measured, or that there was no time left."""
        for case in cases:
            found = {"skipped": "out of time"} if self.late() else measure(case)
            yield {"what": what, **case, **found}


def copy_bandwidth(bench: Bench, sizes: Sizes) -> float:
    """GB/s read and written by a device-to-device copy: the roof of a memory-bound kernel."""
    source = torch.empty(sizes.copy_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return 2 * sizes.copy_bytes / bench.milliseconds(lambda: target.copy_(source)) / 1e6


@dataclass
class Layer:
    """Random pages of a batch in which every request has the same number of tokens."""

    kv: torch.Tensor
    rank: torch.Tensor
    born: torch.Tensor
    score: torch.Tensor
    table: torch.Tensor
    steps: torch.Tensor
    rotation: torch.Tensor
    decode_rotation: torch.Tensor

    @classmethod
    def make(
        cls,
        device: torch.device,
        batch: int,
        heads: int,
        head_size: int,
        cached: int,
        dtype: torch.dtype,
        spare: int = 16,
    ) -> "Layer":
        page, slots = 16, cached + spare
        pages = math.ceil(slots / page)
        blocks = batch * pages + 1
        kv = torch.empty(blocks, heads, page, 2 * head_size, dtype=dtype, device=device)
        kv.normal_()
        table = torch.arange(1, blocks, dtype=torch.int32, device=device)
        table = table[torch.randperm(blocks - 1, device=device)].view(batch, pages).contiguous()
        one = torch.full((pages * page,), -1, dtype=torch.int32, device=device)
        one[:cached] = torch.randperm(cached, device=device).int()
        rank = torch.full((blocks, 1, page), -1, dtype=torch.int32, device=device)
        rank[table.long(), 0] = one.view(pages, page)
        born = rank + torch.randint_like(rank, 0, cached)
        average = [float_bits(value) for value in AVERAGE]
        first = [10 * cached, cached, cached, cached, 0, 1, 4, 5, 1, 0, 0, 0, 0, 1, *average]
        steps = torch.tensor(first, dtype=torch.int32)
        exponent = torch.arange(0, head_size, 2) / head_size
        turning = {"inv_freq": 10000.0**-exponent, "max_distance": 2 * cached + 8}
        turning["device"] = device
        return cls(
            kv=kv,
            rank=rank,
            born=born,
            score=torch.rand(rank.shape, device=device),
            table=table,
            steps=steps.to(device).repeat(batch, 1),
            rotation=rotation_table(**turning),
            decode_rotation=rotation_table(**turning, dtype=decode_dtype(dtype)),
        )

    def _views(self, *names: str) -> dict[str, Any]:
        """Fields as arguments of a kernel."""
        return {name: getattr(self, name) for name in names}

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, output: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One decode step's attention with rotation and score update: the new tokens' scores."""
        batch, slots = query.shape[0], self.table.shape[1] * self.kv.shape[2]
        splits = configs.attend_splits(query.device, batch, self.kv.shape[1], slots)
        parts, parts_lse, logits, own = attend(
            query=query,
            key=key,
            value=key,
            **self._views("kv", "rank", "born", "table", "steps"),
            rotation=self.decode_rotation,
            slopes=None,
            logit_scale=None,
            scale=query.shape[2] ** -0.5,
            softcap=0.0,
            interleaved=False,
            splits=splits,
            keep_logits=True,
        )
        output = torch.empty_like(query) if output is None else output
        found = {"partial": parts, "partial_lse": parts_lse, "steps": self.steps, "output": output}
        scored = self._views("rank", "score", "table")
        return merge_scored(**found, logits=logits, own=own, **scored, reduction="mean")

    def insert(
        self, key: torch.Tensor, value: torch.Tensor, score: torch.Tensor, **rules: Any
    ) -> None:
        """Insert a decode step's tokens."""
        insert(
            key=key,
            value=value,
            new_score=score,
            **self._views("kv", "rank", "born", "score", "table", "steps"),
            token=None,
            **rules,
        )


def attend_rows(bench: Bench, sizes: Sizes, copy_gbps: float) -> Iterator[Row]:
    """Decode attention and scores in replayed graphs, beside torch's SDPA."""
    device, size, dtype = bench.device, sizes.head_size, torch.float16

    def measure(case: Row) -> Row:
        queries, heads = map(int, case["heads"].split("/"))
        cached, batch = case["cached"], case["batch"]
        kv_bytes = batch * cached * heads * 2 * size * dtype.itemsize
        l2 = torch.cuda.get_device_properties(device).L2_cache_size if bench.on_gpu else 0
        copies = max(1, min(8, math.ceil(2 * l2 / kv_bytes)))
        layers = [Layer.make(device, batch, heads, size, cached, dtype) for _ in range(copies)]
        query = torch.randn(batch, queries, size, dtype=dtype, device=device)
        key = torch.randn(batch, heads, size, dtype=dtype, device=device)
        turn = itertools.cycle(range(copies))
        row: Row = {"ms": bench.replayed(lambda: layers[next(turn)].attend(query, key))}
        row["gbps"] = kv_bytes / row["ms"] / 1e6
        row["of_copy"] = row["gbps"] / copy_gbps
        layers.clear()
        # As many keys, gathered ahead.
        shape = 2, batch, heads, cached, size
        dense = [torch.randn(shape, dtype=dtype, device=device) for _ in range(copies)]
        one = query[:, :, None]
        row["sdpa_ms"] = bench.replayed(lambda: SDPA(one, *dense[next(turn)], enable_gqa=True))
        return row | {"over_sdpa": row["ms"] / row["sdpa_ms"]}

    cases = (
        {"heads": f"{queries}/{heads}", "cached": cached, "batch": batch}
        for (queries, heads), cached, batch in itertools.product(
            sizes.heads, sizes.cached, sizes.batches
        )
    )
    return bench.rows("attend", cases, measure)


def prefill_rows(bench: Bench, sizes: Sizes) -> Iterator[Row]:
    """A prompt through a bounded cache, stride by stride, and full causal attention."""
    queries, heads = sizes.heads[0]

    def measure(case: Row) -> Row:
        length = case["tokens"]
        prompt = _Prompt(bench, sizes, case["stride"], queries, heads, torch.float16)
        row: Row = {"ms": bench.milliseconds(lambda: prompt.run(length))}
        row["us_per_token"] = row["ms"] * 1e3 / length
        query = torch.randn(1, queries, length, sizes.head_size, device=bench.device).half()
        key = torch.randn(1, heads, length, sizes.head_size, device=bench.device).half()
        full = bench.milliseconds(lambda: SDPA(query, key, key, is_causal=True, enable_gqa=True))
        row["full_us_per_token"] = full * 1e3 / length
        launches = {"gather": prompt.gather, "stride_attention": prompt.attend}
        launches |= {"column_sums": prompt.add_up, "insertion": prompt.insert}
        for name, call in launches.items():
            row[f"{name}_ms"] = bench.milliseconds(call)
        return row

    pairs = itertools.product(sizes.prefill_strides, sizes.prefill_lengths)
    cases = ({"stride": stride, "tokens": length} for stride, length in pairs)
    return bench.rows("prefill", cases, measure)


class _Prompt:
    """Strides over a full cache: gathering it, attention, column sums, and a window's insertion.

    Which tokens stay is a fixed window here, as one group each.
    """

    def __init__(
        self,
        bench: Bench,
        sizes: Sizes,
        stride: int,
        queries: int,
        heads: int,
        dtype: torch.dtype,
    ) -> None:
        device, size, budget = bench.device, sizes.head_size, sizes.prefill_budget
        self.layer = Layer.make(device, 1, heads, size, budget, dtype, spare=0)
        self.layer.rotation = rotation_table(
            10000.0 ** -(torch.arange(0, size, 2) / size), budget + stride, device
        )
        self.stride, self.budget = stride, budget
        step = [0] * STEP_COLUMNS
        step[:6] = [10 * budget, budget, budget, budget, 0, stride]
        step[columns.PLAN : columns.STAY + 1] = [0, 1, budget + stride, budget]
        step[columns.FADE] = float_bits(0.5)
        self.layer.steps = torch.tensor([step], dtype=torch.int32, device=device)
        query = torch.randn(stride, queries, size, device=device).to(dtype)
        key, value = torch.randn(2, stride, heads, size, device=device).to(dtype)
        self.tokens = Tokens(query=query, key=key, value=value, output=torch.empty_like(query))
        begins = torch.arange(budget + 1) + budget + 1
        width, programs = budget + stride, num_programs(1, 1)
        int32 = {"dtype": torch.int32, "device": device}
        self.strides = Strides(
            steps=self.layer.steps,
            table=self.layer.table,
            max_length=stride,
            max_slots=budget,
            lse=torch.empty(stride, queries, device=device),
            gathered=torch.empty(1, heads, budget, 2 * size, device=device, dtype=dtype),
            line=torch.empty(1, 1, LINE_WORDS, width, **int32),
            decays=0.991 ** torch.arange(stride, device=device, dtype=torch.float32),
            sums=torch.empty(1, heads, width, device=device),
            query_heads=queries,
            plans=torch.cat([begins, torch.arange(stride, budget + stride)]).int().to(device),
            notes=torch.empty(1, 1, programs, NUMBER_ROWS, width, **int32),
            values=torch.empty(1, 1, programs, VALUE_ROWS, width, device=device),
        )
        pages = self.layer._views("kv", "rank", "born", "score")
        own = {"rotation": self.layer.rotation, "scale": size**-0.5, "num_queries": queries}
        cached = CachedLayer(**pages, **own)
        self.gathering, self.attention = StrideGather(cached), StrideAttention(cached)
        self.sums, self.insertion = ColumnSums(cached, "mean"), StrideInsertion(cached, "mean")

    def attend(self) -> None:
        self.attention(self.tokens, self.strides)

    def gather(self) -> None:
        self.gathering(self.strides)

    def add_up(self) -> None:
        self.sums(self.tokens, self.strides)

    def insert(self) -> None:
        self.insertion(self.tokens, self.strides)

    def run(self, length: int) -> None:
        for _ in range(length // self.stride):
            self.gather()
            self.attend()
            self.add_up()
            self.insert()
