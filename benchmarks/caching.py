# SPDX-License-Identifier: Apache-2.0
"""The caching operation of a layer (cascade paper, Table 4): ``python -m benchmarks.caching``.

Three ways to take one more token into a full cache of every request of a batch: concatenating the
kept keys and values with the new ones, as StreamingLLM's code does; our insertion into pages with
one sub-cache; and with four. ``operation`` is that alone, for the sub-caches with the update of the
attention average. ``layer`` is a whole decode step of the attention layer: what the backend really
runs, with rotation and attention, and for the baseline PyTorch's.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from benchmarks.reporting import results
from benchmarks.reporting.tables import Table, mean_std
from benchmarks.running.engines import quiet

STREAM_LENGTH = 1_000_000
"""Tokens each stream has seen: far enough for every sub-cache to be full."""
ROWS = {"concatenation": None, "1 sub-cache": 1, "4 sub-caches": 4}


@dataclass(frozen=True)
class Sizes:
    """The paper's: batch 8, 32 heads of 128, 4 sinks, 1,024 tokens, fp32."""

    batch: int = 8
    num_heads: int = 32
    head_size: int = 128
    num_sinks: int = 4
    budget: int = 1024
    block_size: int = 32
    steps: int = 12
    warm_up: int = 3


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.caching",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, default in vars(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    results.add_arguments(parser, "caching")
    return parser.parse_args(argv)


def timed(step: Callable[[int], Any], sizes: Sizes) -> list[float]:
    """Milliseconds of every step after the warm-up."""
    taken = []
    for index in range(sizes.warm_up + sizes.steps):
        start = time.perf_counter()
        step(index)
        taken.append(1e3 * (time.perf_counter() - start))
    return taken[sizes.warm_up :]


def concatenation(sizes: Sizes) -> tuple[list[float], list[float]]:
    """The baseline: operation, then a whole layer step."""
    import torch

    shape = (sizes.batch, sizes.num_heads, sizes.num_sinks + sizes.budget, sizes.head_size)
    cache = [torch.randn(shape), torch.randn(shape)]
    new = torch.randn(*shape[:2], 1, sizes.head_size)
    angle = torch.rand(shape[2] + 1, sizes.head_size // 2)
    cos, sin = angle.cos(), angle.sin()

    def insert(_: int) -> None:
        for index, kept in enumerate(cache):
            sinks, recent = kept[:, :, : sizes.num_sinks], kept[:, :, sizes.num_sinks + 1 :]
            cache[index] = torch.cat([sinks, recent, new], dim=2)

    def layer(step: int) -> torch.Tensor:
        keys = torch.cat([cache[0], new], dim=2)
        first, second = keys.chunk(2, dim=-1)
        keys = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        values = torch.cat([cache[1], new], dim=2)
        output = torch.nn.functional.scaled_dot_product_attention(new, keys, values)
        insert(step)
        return output

    return timed(insert, sizes), timed(layer, sizes)


class PagedLayer:
    """A layer of the CPU backend over pages that are full, as an engine would drive it."""

    def __init__(self, num_subcaches: int, sizes: Sizes) -> None:
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        from vllm_cascade.attention.cpu.builder import CPUBuilder
        from vllm_cascade.attention.cpu.impl import CPUKVPolicyImpl
        from vllm_cascade.cache.layout import page_views
        from vllm_cascade.cache.spec import KVPolicySpec
        from vllm_cascade.models.rotary import Rotary
        from vllm_cascade.policies.registry import resolve

        self.sizes = sizes
        self.policy = resolve(
            {
                "name": "cascade",
                "budget": sizes.budget,
                "num_sinks": sizes.num_sinks,
                "num_subcaches": num_subcaches,
                "prefill_stride": 1,
            }
        )
        full = FullAttentionSpec(
            block_size=sizes.block_size,
            num_kv_heads=sizes.num_heads,
            head_size=sizes.head_size,
            dtype=torch.float32,
        )
        spec = KVPolicySpec.from_full(full, self.policy)
        self.schedule = spec.schedule
        per_request = spec.num_pages(STREAM_LENGTH)
        pool = torch.zeros(1 + sizes.batch * per_request, spec.page_size_bytes // 4)
        view = torch.as_strided(
            pool,
            (len(pool), sizes.num_heads, sizes.block_size, 2 * sizes.head_size),
            (pool.stride(0), sizes.block_size * 2 * sizes.head_size, 2 * sizes.head_size, 1),
        )
        self.table = torch.arange(1, len(pool), dtype=torch.int32).view(sizes.batch, -1)
        self.pages = page_views(view, spec)
        self._fill(per_request)
        self.impl = CPUKVPolicyImpl(
            sizes.num_heads, sizes.head_size, sizes.head_size**-0.5, sizes.num_heads, None, None,
            "auto",
        )  # fmt: skip
        frequencies = 1.0 / 10_000.0 ** (torch.arange(0, sizes.head_size, 2) / sizes.head_size)
        self.impl.prepare(spec, view, Rotary(frequencies, True))
        scheduler = SimpleNamespace(max_num_batched_tokens=max(sizes.batch, 16))
        config: Any = SimpleNamespace(scheduler_config=scheduler)
        self.builder = CPUBuilder(spec, ["layer"], config, torch.device("cpu"))
        self.new = torch.randn(sizes.batch, sizes.num_heads, sizes.head_size)

    def _fill(self, per_request: int) -> None:
        """Slots hold ranks in a random order, as after a long stream."""
        import torch

        pages, count = self.pages, self.schedule.count_at(STREAM_LENGTH)
        slots = per_request * self.sizes.block_size
        for request in self.table.long():
            rank = torch.full((slots,), -1, dtype=torch.int32)
            rank[:count] = torch.randperm(count, dtype=torch.int32)
            pages.rank[request] = rank.view(per_request, 1, -1)
            pages.born[request] = rank.clamp_min(0).view(per_request, 1, -1)
            pages.score[request] = torch.rand(per_request, 1, self.sizes.block_size)
        pages.kv[1:].normal_()

    def metadata(self, step: int) -> Any:
        """One decode step of all requests."""
        import torch
        from vllm.v1.attention.backend import CommonAttentionMetadata

        batch = self.sizes.batch
        offsets = torch.arange(batch + 1, dtype=torch.int32)
        ends = torch.full((batch,), STREAM_LENGTH + step + 1)
        common = CommonAttentionMetadata(
            query_start_loc=offsets,
            query_start_loc_cpu=offsets,
            seq_lens=ends,
            seq_lens_cpu_upper_bound=ends,
            num_reqs=batch,
            num_actual_tokens=batch,
            max_query_len=1,
            max_seq_len=int(ends.max()),
            block_table_tensor=self.table,
            slot_mapping=torch.zeros(0),
            is_prefilling=torch.zeros(batch, dtype=torch.bool),
        )
        return self.builder.build(0, common)

    def layer(self, step: int) -> None:
        """What the backend runs in a decode step, its plan included."""
        import torch

        name: Any = SimpleNamespace(layer_name="layer")
        new = self.new
        self.impl.forward(
            name, new, new, new, self.pages.kv, self.metadata(step), torch.empty_like(new)
        )

    def operation(self, step: int) -> None:
        """Score update and insertion alone, in PyTorch, from made-up probabilities."""
        from vllm_cascade.attention.torch import tokens
        from vllm_cascade.kernels.columns import OLD_SLOTS

        (wave,) = self.metadata(step).waves
        singles, scoring = wave.singles, self.schedule.scoring
        words = tokens._Words.of(singles, self.pages)
        rank = words.gather(self.pages.rank)
        slot = rank.new_tensor(range(rank.shape[-1]))
        rank = rank.masked_fill(slot >= singles.column(OLD_SLOTS), -1)
        shape = len(self.new), self.sizes.num_heads, 1, rank.shape[-1] + 1
        score = scoring.weight * self.impl._layer.reduce_heads(self.new.new_full(shape, 1e-3))
        score[..., :-1] += scoring.decay * words.gather(self.pages.score)
        new_kv = self.new.repeat(1, 1, 2)
        tokens._insert(self.pages, singles, words, rank, score, new_kv)


def measure(num_subcaches: int | None, sizes: Sizes) -> tuple[list[float], list[float]]:
    """Milliseconds of the operation and of a layer's step; None: the baseline."""
    if num_subcaches is None:
        return concatenation(sizes)
    layer = PagedLayer(num_subcaches, sizes)
    return timed(layer.operation, sizes), timed(layer.layer, sizes)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the three."""
    args = parse_args(argv)
    quiet()
    sizes = Sizes(**{name: getattr(args, name) for name in vars(Sizes())})
    taken = {row: measure(num, sizes) for row, num in ROWS.items()}
    paper = ("1.33", "0.54", "0.64")
    rows = tuple(
        (row, gpu, mean_std(operation), mean_std(layer))
        for (row, (operation, layer)), gpu in zip(taken.items(), paper, strict=True)
    )
    columns = ("", "paper, GPU, operation", "operation ms", "layer ms")
    note = (
        f"Batch {sizes.batch}, {sizes.num_heads} heads of {sizes.head_size}, {sizes.budget:,} "
        f"tokens and {sizes.num_sinks} sinks, fp32; mean and standard deviation of {sizes.steps} "
        "steps. The paper's row with one sub-cache has no score update, ours has."
    )
    table = Table("The caching operation (cascade paper, Table 4)", columns, rows, note)
    results.save(args.out, [table], {"milliseconds": taken}, vars(args), argv)


if __name__ == "__main__":
    main()
