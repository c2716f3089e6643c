# SPDX-License-Identifier: Apache-2.0
"""One layer's attention on the CPU beside vLLM's own op: ``python -m benchmarks.cpu_attention``.

Both attend to the same number of cached tokens, 12 query and 4 KV heads. Ours is all that a
layer does in a step of the default cascade policy once tokens are being evicted: attention with
every key rotated to its present position, the score update over all heads, the choice of the
victim and the insertion. With units of several tokens a row is the mean over the tokens of a unit,
of which the last one evicts. Stock's is its attention op alone; its op that writes the new token's
key and value is timed beside it and not part of the ratio. A prefill row is one stride of 256.

A latent row is decode with multi-head latent attention as DeepSeek V3 has it: rows of 576 channels
that all query heads share, 16 (a rank of eight) or 128. Both get absorbed queries.

A trial times both in turn; the table has medians over the trials, and the median of the ratios.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.reporting import results
from benchmarks.reporting.tables import Table

NUM_HEADS, NUM_KV_HEADS = 12, 4
BLOCK_SIZE = 128  # vLLM's default on the CPU
STRIDE = 256
LATENT, LATENT_ROW = 512, 576
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Ours:
    """The plugin's implementation of a layer, its page pool and the metadata of its steps.

    Args:
        settings: a policy's. ``new``: tokens of a request in a step.
        heads: query heads and KV heads.
        latent: channels of a latent row's value; None: rows are keys, then values.
        steps: successive steps, taken in turn. In decode a whole unit of them leaves the number of
            cached tokens unchanged.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        dtype: torch.dtype,
        head_size: int,
        batch: int,
        new: int,
        heads: tuple[int, int] = (NUM_HEADS, NUM_KV_HEADS),
        steps: int = 1,
        latent: int | None = None,
    ) -> None:
        from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

        from vllm_cascade.attention.cpu.builder import CPUBuilder
        from vllm_cascade.attention.cpu.impl import CPUKVPolicyImpl
        from vllm_cascade.cache.layout import page_views
        from vllm_cascade.cache.spec import KVPolicySpec
        from vllm_cascade.models.rotary import Rotary
        from vllm_cascade.policies.registry import resolve

        num_heads, kv_heads = heads
        policy = resolve(settings)
        full = (FullAttentionSpec if latent is None else MLAAttentionSpec)(
            block_size=BLOCK_SIZE, num_kv_heads=kv_heads, head_size=head_size, dtype=dtype
        )
        spec = KVPolicySpec.from_full(full, policy)
        num_pages = spec.num_pages(1 << 20)
        pool = torch.zeros(1 + batch * num_pages, spec.page_size_bytes, dtype=torch.uint8)
        row, self.value_size = spec.row_size, latent or head_size
        head = BLOCK_SIZE * row
        view = torch.as_strided(
            pool.view(dtype),
            (len(pool), kv_heads, BLOCK_SIZE, row),
            (spec.page_size_bytes // dtype.itemsize, head, row, 1),
        )
        self.impl = CPUKVPolicyImpl(
            num_heads, head_size, head_size**-0.5, kv_heads, None, None, "auto"
        )
        self.impl.latent = latent
        turning = head_size - (latent or 0)
        inverse = 1e4 ** -(torch.arange(0, turning, 2) / turning)
        self.impl.prepare(spec, view, Rotary(inverse, True))
        self.view = view
        self.pages = page_views(view, spec)
        self._fill(policy.num_sinks + policy.budget, batch)
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=4096, max_num_seqs=batch)
        )
        builder = CPUBuilder(spec, ["layer"], config, torch.device("cpu"))
        table = 1 + torch.arange(batch * num_pages, dtype=torch.int32).view(batch, num_pages)
        common = [self._common(table, batch, new, first) for first in range(steps)]
        self.steps = [builder.build(0, one) for one in common]
        self.turn = 0

    def _fill(self, cached: int, batch: int) -> None:
        """Any state of a stream long past its budget: ranks in no order, every key moved."""
        self.view.normal_()
        num_blocks, _, units = self.pages.rank.shape
        unit, per_request = self.pages.unit, (num_blocks - 1) // batch
        held = cached // unit
        for first in range(1, num_blocks, per_request):
            rank = torch.full((per_request * units,), -1, dtype=torch.int32)
            rank[:held] = torch.randperm(held, dtype=torch.int32)
            position = rank * unit
            born = torch.minimum(
                position + torch.randint(0, cached, rank.shape), torch.tensor(cached)
            )
            pages = slice(first, first + per_request)
            self.pages.rank[pages] = rank.view(per_request, 1, units)
            self.pages.born[pages] = born.view(per_request, 1, units).int()
            self.pages.score[pages] = torch.rand(per_request, 1, units)

    @staticmethod
    def _common(table: torch.Tensor, batch: int, new: int, first: int):
        from vllm.v1.attention.backend import CommonAttentionMetadata

        seen = (1 << 19) // STRIDE * STRIDE + first  # tokens of each stream so far
        offsets = torch.arange(batch + 1, dtype=torch.int32) * new
        ends = torch.full((batch,), seen + new)
        return CommonAttentionMetadata(
            query_start_loc=offsets,
            query_start_loc_cpu=offsets,
            seq_lens=ends,
            seq_lens_cpu_upper_bound=ends,
            num_reqs=batch,
            num_actual_tokens=batch * new,
            max_query_len=new,
            max_seq_len=seen + new,
            block_table_tensor=table,
            slot_mapping=torch.zeros(0),
            is_prefilling=torch.full((batch,), new > 1),
        )

    def next(self) -> Any:
        """The metadata of the next step."""
        self.turn = (self.turn + 1) % len(self.steps)
        return self.steps[self.turn - 1]

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        layer: Any = SimpleNamespace(layer_name="layer")
        output = query.new_empty(*query.shape[:2], self.value_size)
        self.impl.forward(layer, query, key, value, self.view, self.next(), output)

    def changed_bytes(self, batch: int, *new: torch.Tensor) -> int:
        """Bytes of a request's metadata that a step changes, in the mean over its steps."""
        words = [self.pages.rank, self.pages.born, self.pages.score]
        changed = 0
        for _ in self.steps:
            before = [word.clone() for word in words]
            self(*new)
            changed += sum(
                int((old != word).sum()) for old, word in zip(before, words, strict=True)
            )
        return round(changed * 4 / len(self.steps) / batch)


class Stock:
    """vLLM's op on a cache of its own with as many tokens before the new ones."""

    def __init__(self, dtype: torch.dtype, head_size: int, cached: int, batch: int, new: int):
        from vllm import _custom_ops as ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        self.ops, self.scale = ops, head_size**-0.5
        per_request = -(-(cached + new) // BLOCK_SIZE)
        cache = torch.randn(
            1 + batch * per_request, NUM_KV_HEADS, BLOCK_SIZE, 2 * head_size, dtype=dtype
        )
        halves = cache.view(len(cache), NUM_KV_HEADS, 2 * BLOCK_SIZE, head_size)
        self.keys, self.values = halves.chunk(2, dim=2)
        table = 1 + torch.arange(batch * per_request, dtype=torch.int32)
        self.table = table.view(batch, per_request)
        self.lengths = torch.full((batch,), cached + new, dtype=torch.int32)
        self.offsets = torch.arange(batch + 1, dtype=torch.int32) * new
        place = cached + torch.arange(new)
        blocks = self.table[:, place // BLOCK_SIZE].long()
        self.slots = (blocks * BLOCK_SIZE + place % BLOCK_SIZE).flatten()
        torch.cpu._init_amx()  # Linux must allow its use; in an engine matrix products ask for it
        self.isa = _get_attn_isa(dtype, BLOCK_SIZE, head_size)
        self.schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=batch,
            num_heads=NUM_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=head_size,
            seq_lens=self.lengths,
            dtype=dtype,
            query_start_loc=self.offsets,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=True,
        )

    def write(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        self.ops.cpu_attn_reshape_and_cache(
            key, value, self.keys, self.values, self.slots, self.isa
        )

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        self.ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=self.keys,
            value_cache=self.values,
            output=torch.empty_like(query),
            query_start_loc=self.offsets,
            seq_lens=self.lengths,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self.table,
            softcap=0,
            scheduler_metadata=self.schedule,
            s_aux=None,
        )


class LatentStock:
    """vLLM's op for multi-head latent attention, on its pages of 16 tokens."""

    block_size = 16

    def __init__(self, dtype: torch.dtype, cached: int, batch: int) -> None:
        from vllm import _custom_ops as ops

        self.ops, self.lengths = ops, torch.full((batch,), cached + 1, dtype=torch.int32)
        per_request = -(-(cached + 1) // self.block_size)
        blocks = batch * per_request
        self.cache = torch.randn(blocks, self.block_size, LATENT_ROW, dtype=dtype)
        self.table = torch.arange(blocks, dtype=torch.int32).view(batch, per_request)
        self.slots = self.table[:, -1].long() * self.block_size + cached % self.block_size

    def write(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """As vLLM's implementation for CPUs does it, in PyTorch."""
        self.cache.view(-1, LATENT_ROW)[self.slots] = key[:, 0]

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        output = query.new_zeros(*query.shape[:2], LATENT)
        self.ops.mla_decode_kvcache_cpu(
            output, query, self.cache, LATENT_ROW**-0.5, self.table, self.lengths
        )


def milliseconds(call: Callable[[], None], repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - started) / repeats * 1e3


def measure(
    kind: str,
    num_heads: int,
    unit: int,
    dtype: str,
    head_size: int,
    batch: int,
    cached: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """A row: paired trials of one shape, about ``args.seconds`` long in all.

    Milliseconds are medians over the trials, and so is the ratio of ours to stock's attention op.

    Args:
        kind: ``decode`` (a token for each of ``batch`` requests), ``latent`` (the same with
            multi-head latent attention) or ``prefill`` (a stride of one).
        num_heads: query heads.
    """
    new, trials = STRIDE if kind == "prefill" else 1, args.trials
    torch.manual_seed(0)
    # The cascade's budget must be a multiple of 32, and of four units; the rest are sinks.
    sinks, steps = max(32, 4 * unit), unit if new == 1 else 1
    policy = {"name": "cascade", "unit": unit, "num_sinks": sinks, "prefill_stride": STRIDE}
    policy["budget"] = cached - sinks
    latent = LATENT if kind == "latent" else None
    kv_heads = NUM_KV_HEADS if latent is None else 1
    heads = num_heads, kv_heads
    ours = Ours(policy, DTYPES[dtype], head_size, batch, new, heads, steps=steps, latent=latent)
    query = torch.randn(batch * new, num_heads, head_size, dtype=DTYPES[dtype])
    key, value = torch.randn(2, batch * new, kv_heads, head_size, dtype=DTYPES[dtype])
    stock: Stock | LatentStock
    if latent is None:
        stock = Stock(DTYPES[dtype], head_size, cached, batch, new)
    else:
        stock, value = LatentStock(DTYPES[dtype], cached, batch), key[..., -latent:]
    calls = [
        lambda: ours(query, key, value),
        lambda: stock(query, key, value),
        lambda: stock.write(query, key, value),
    ]
    metadata_bytes = ours.changed_bytes(batch, query, key, value)
    once = [min(milliseconds(call, 1) for _ in range(3)) for call in calls]
    repeats = [max(int(args.seconds * 1e3 / 3 / trials / ms), 1) for ms in once]
    repeats[0] = -(-repeats[0] // len(ours.steps)) * len(ours.steps)  # whole units
    repeats[2] = min(repeats[2], 200)
    times = np.zeros((trials, 3))
    for trial in range(trials):
        for index in (0, 1, 2) if trial % 2 == 0 else (1, 0, 2):
            times[trial, index] = milliseconds(calls[index], repeats[index])
    own, others, write = np.median(times, axis=0).tolist()
    return {
        "": kind,
        "query heads": num_heads,
        "unit": unit,
        "dtype": dtype,
        "head size": head_size,
        "batch": batch,
        "cached": cached,
        "path": type(ours.impl.path).__name__.removesuffix("Path").lower(),
        "ours ms": own,
        "stock ms": others,
        "stock's write ms": write,
        "metadata bytes": metadata_bytes,
        "ours / stock": float(np.median(times[:, 0] / times[:, 1])),
    }


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = results.parser_of("cpu_attention", __doc__)
    parser.add_argument("--kind", nargs="+", default=["decode", "prefill"])
    parser.add_argument("--heads", nargs="+", type=int, default=[16, 128], help="latent only")
    parser.add_argument("--unit", nargs="+", type=int, default=[1, 16, 32])
    parser.add_argument("--dtype", nargs="+", default=["bf16", "fp32"], choices=list(DTYPES))
    parser.add_argument("--head-size", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16], help="decode only")
    parser.add_argument("--cached", nargs="+", type=int, default=[1024, 2048, 4096])
    parser.add_argument("--trials", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each row")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    shapes = [
        (kind, *shape)
        for kind in args.kind
        for shape in itertools.product(
            args.heads if kind == "latent" else [NUM_HEADS],
            args.unit,
            args.dtype,
            [LATENT_ROW] if kind == "latent" else args.head_size,
            [1] if kind == "prefill" else args.batch,
            args.cached,
        )
    ]
    rows = [measure(*shape, args) for shape in tqdm(shapes, leave=False)]
    table = Table.of(
        f"One layer, {NUM_KV_HEADS} KV heads or one latent row, threads: {args.threads}",
        [
            {name: f"{x:.3f}" if isinstance(x, float) else str(x) for name, x in row.items()}
            for row in rows
        ],
        "Ours: attention with every key rotated to its position, score update, victim, insertion. "
        "Stock: attention alone. Medians of paired trials. Metadata bytes: of a request and layer, "
        "that a step changes.",
    )
    results.finish(args, argv, [table])


if __name__ == "__main__":
    main()
