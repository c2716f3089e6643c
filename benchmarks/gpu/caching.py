# SPDX-License-Identifier: Apache-2.0
"""One caching operation on a GPU, in the protocol of the cascade paper's Table 4."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu.timings import AVERAGE, Bench, Layer, Row, Sizes
from tests.kernels.random_pool import float_bits
from vllm_cascade.kernels.triton.schedule import ScheduleTables, schedule


def cascade_schedule(device: torch.device, sinks: int, window: int, levels: int) -> ScheduleTables:
    """Step tables of a full cascade: an eviction at every step, periods of ``2**(levels - 1)``.

    Step ``j`` ends with a contest between the newest token of the first sub-cache that does not
    accept and the one that arrives there, or else drops the oldest token.
    """
    total = sinks + levels * window
    rows = []
    for j in range(2 ** (levels - 1)):
        level = 1 + ((j & -j).bit_length() - 1 if j else levels)  # the first that does not accept
        newest = sinks + (levels - level) * window - 1
        contest = level < levels
        lo, hi = (newest, newest + 2) if contest else (sinks, sinks + 1)
        rows.append([lo, hi, 1, 0, 0, 0, total, total])
    average = [float_bits(value) for value in AVERAGE]
    table, heads = (
        torch.tensor(lines, dtype=torch.int32, device=device)
        for lines in (rows, [[0, 0, len(rows), 0, 1, *average, 0]])
    )
    return ScheduleTables(table, heads)


def caching_rows(bench: Bench, sizes: Sizes) -> Iterator[Row]:
    """One caching operation, step by step, in the protocol of the cascade paper's Table 4."""

    def measure(case: Row) -> Row:
        dtype = getattr(torch, case["dtype"])
        row: Row = {"ms": _steps(bench, sizes, _our_caching(bench, sizes, dtype, case["cascades"]))}
        row["concatenation_ms"] = _steps(bench, sizes, _concatenation(bench, sizes, dtype))
        return row | {"speedup": row["concatenation_ms"] / row["ms"]}

    pairs = itertools.product(("float32", "float16"), (1, 4))
    cases = ({"dtype": d, "cascades": n, "score_update": n > 1} for d, n in pairs)
    return bench.rows("caching", cases, measure)


def _steps(bench: Bench, sizes: Sizes, step: Callable[[], Any]) -> float:
    """Mean milliseconds a step, an event pair and a synchronisation around each, as theirs."""
    times = []
    for _ in range(sizes.cache_steps):
        if bench.on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            times.append(bench.milliseconds(step))
    kept = times[sizes.cache_dropped :]
    return sum(kept) / len(kept)


def _our_caching(bench: Bench, sizes: Sizes, dtype: torch.dtype, levels: int) -> Callable[[], Any]:
    """Schedule, score update (with several cascades) and insertion; one graph on a GPU."""
    device, sinks = bench.device, 4
    batch, heads, size = sizes.cache_batch, sizes.cache_heads, sizes.head_size
    cached = sinks + sizes.cache_window
    layer = Layer.make(device, batch, heads, size, cached, dtype, spare=0)
    tables = cascade_schedule(device, sinks, sizes.cache_window // levels, levels)
    seq_lens = torch.full((batch,), cached + 1, dtype=torch.int32, device=device)
    positions = torch.zeros(batch, dtype=torch.int64, device=device)
    key, value = torch.randn(2, batch, heads, size, device=device).to(dtype)
    slots = layer.table.shape[1] * layer.kv.shape[2]
    logits = torch.randn(batch, heads, slots, device=device)
    own, lse = torch.randn(batch, heads, device=device), torch.full((batch, heads), 8.0).to(device)
    fixed = torch.zeros(batch, 1, device=device)
    schedule_of = torch.zeros(batch, dtype=torch.int32, device=device)
    no_rules = torch.zeros(1, 4, dtype=torch.int32, device=device)

    def step() -> None:
        seq_lens.add_(1)
        schedule(seq_lens, layer.table, tables, schedule_of, layer.steps, positions)
        new = layer.update(logits, own, lse) if levels > 1 else fixed
        layer.insert(key, value, new, rules=no_rules, has_cells=False)

    if not bench.on_gpu:
        return step
    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _concatenation(bench: Bench, sizes: Sizes, dtype: torch.dtype) -> Callable[[], Any]:
    """StreamingLLM's cache: sinks, the window less its oldest token, the new one, joined anew."""
    sinks = 4
    shape = sizes.cache_batch, sizes.cache_heads, sinks + sizes.cache_window, sizes.head_size
    cache = [torch.randn(shape, device=bench.device).to(dtype) for _ in range(2)]
    new = torch.randn(2, *shape[:2], 1, shape[3], device=bench.device).to(dtype)

    def step() -> None:
        for i in range(2):
            old = cache[i]
            cache[i] = torch.cat([old[:, :, :sinks], old[:, :, sinks + 1 :], new[i]], dim=2)

    return step
