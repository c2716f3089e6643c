# SPDX-License-Identifier: Apache-2.0
"""A layer of a decode step in a replayed CUDA graph: the launches that a policy adds, one by one.

Every request has a full cache and evicts one token a step.
"""

import itertools
import math
from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.timings import Bench, Layer, Row, Sizes
from vllm_cascade.kernels.triton.attend import DecodeAttention
from vllm_cascade.kernels.triton.cached import CachedLayer
from vllm_cascade.kernels.triton.configs import attend_splits
from vllm_cascade.kernels.triton.insert import Insertion
from vllm_cascade.kernels.triton.merge import Merge, ScoredMerge
from vllm_cascade.kernels.triton.singles import Singles
from vllm_cascade.kernels.triton.strides import Tokens

Launches = list[Callable[[], None]]


def layer_rows(bench: Bench, sizes: Sizes) -> Iterator[Row]:
    """Microseconds of a layer's launches, with and without scores by attention."""

    def measure(case: Row) -> Row:
        queries, heads = map(int, case["heads"].split("/"))
        num_bytes = case["batch"] * case["cached"] * heads * 2 * sizes.head_size * 2
        l2 = torch.cuda.get_device_properties(bench.device).L2_cache_size if bench.on_gpu else 0
        copies = max(1, min(8, math.ceil(2 * l2 / num_bytes)))
        made = [layer(bench.device, sizes, queries, heads, case) for _ in range(copies)]
        row: Row = {}
        for count, name in enumerate(("attend", "and_merge", "and_insert"), 1):
            turn = itertools.cycle(made)

            def some(count: int = count, turn: Iterator[Launches] = turn) -> None:
                for launch in next(turn)[:count]:
                    launch()

            row[f"{name}_us"] = 1e3 * bench.replayed(some)
        return row

    cases = (
        {"heads": f"{queries}/{heads}", "cached": cached, "batch": batch, "scored": scored}
        for (queries, heads), cached, batch, scored in itertools.product(
            sizes.heads[:1], sizes.cached[:2], sizes.batches, (True, False)
        )
    )
    return bench.rows("layer", cases, measure)


def layer(device: torch.device, sizes: Sizes, queries: int, heads: int, case: Row) -> Launches:
    """A layer's launches on pages of its own."""
    batch, scored, size, dtype = case["batch"], case["scored"], sizes.head_size, torch.bfloat16
    pages = Layer.make(device, batch, heads, size, case["cached"], dtype)
    one = CachedLayer(
        **{name: getattr(pages, name) for name in ("kv", "rank", "born", "score")},
        rotation=pages.decode_rotation,
        scale=size**-0.5,
        num_queries=queries,
    )
    attention, insertion = DecodeAttention(one, scored), Insertion(one, has_cells=scored)
    num_pages, no_sinks = pages.table.shape[1], (queries, size, None)
    merge: Merge | ScoredMerge = Merge(*no_sinks)
    if scored:
        words = {"rank": pages.rank, "score": pages.score}
        merge = ScoredMerge(*no_sinks, **words, reduction="mean", unit=1)
    splits = attend_splits(device, batch, heads, num_pages * one.page)
    shapes = attention.shapes(batch, num_pages, splits) | insertion.shapes(batch, num_pages)
    shapes |= {"lse": (batch, queries), "new_score": (batch, one.num_sets)}
    made = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
    rules = torch.zeros(1, 4, dtype=torch.int32, device=device)
    singles = Singles(pages.steps, pages.table, rules=rules, **made)
    query = torch.randn(batch, queries, size, device=device).to(dtype)
    key, value = torch.randn(2, batch, heads, size, device=device).to(dtype)
    tokens = Tokens(query, key, value, torch.empty_like(query))
    return [
        lambda: attention(tokens, singles),
        lambda: merge(tokens, singles),
        lambda: insertion(tokens, singles),
    ]
