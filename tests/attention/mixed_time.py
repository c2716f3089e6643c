# SPDX-License-Identifier: Apache-2.0
"""What a mixed step takes the host, beside stock vLLM's Triton backend, without a card.

python -m tests.attention.mixed_time [--ranks]

64 requests decode and one reads 512 tokens of its prompt, in a model like Llama 8B. Such a step
runs outside full CUDA graphs: the metadata is built once, and each of 32 layers runs its attention
from Python. All of that runs here, through vLLM's own operators, and every launch runs down to the
driver's library, which is a stub (``no_card.py``). Not counted: the driver's part of a
launch, the same for both, which the last column multiplies; and what PyTorch's operators would
launch, which run on the CPU here. Stock vLLM on an H100 chooses FlashAttention, whose operators are
C++ and are not here; its Triton backend is what can be compared.

With ``--ranks`` the model is one of several tensor-parallel ranks, which decide together. What they
exchange is not sent.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from tests.attention import no_card

no_card.pretend()

import numpy as np
import torch
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers.attention import attention
from vllm.v1.attention.backends import triton_attn
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_cascade.attention.cuda.builder import CUDABuilder
from vllm_cascade.attention.cuda.impl import TritonKVPolicyImpl
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.models.rotary import Rotary
from vllm_cascade.policies.registry import resolve
from vllm_cascade.recall.log import UnitShape
from vllm_cascade.recall.rings import Rings
from vllm_cascade.step.builder import step_of

LAYERS, HEADS, GROUP, SIZE, BLOCK = 32, 8, 4, 128, 16
ROWS, CHUNK, BUDGET = 64, 512, 2048
TOKENS = ROWS + CHUNK
UNITS = {"unit": 16, "num_sinks": 16}
POLICIES: dict[str, dict[str, Any]] = {
    "sink": {"name": "sink"},
    "cascade": {"name": "cascade"},
    "cascade, units": {"name": "cascade", **UNITS},
    "cascade, recall": {"name": "cascade", **UNITS, "recall": 8, "recall_store": 1024},
}
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.bfloat16)


@dataclass
class Side:
    """One backend's model: plans a step, and runs a layer of it.

    Attributes:
        build: returns a step's metadata.
        layers: vLLM's attention layers by name.
        writes_apart: whether vLLM writes new rows by an operator of their own.
    """

    build: Callable[[], Any]
    layers: dict[str, Any]
    writes_apart: bool = False

    def step(self) -> Callable[[], None]:
        """One step on the host: the metadata, then all layers."""
        query, key, value, output = _new_rows()
        slots = torch.zeros(TOKENS, dtype=torch.int64)
        names = {name: attention._encode_layer_name(name) for name in self.layers}
        slot_mapping = dict.fromkeys(self.layers, slots)
        write = torch.ops.vllm.unified_kv_cache_update
        attend = torch.ops.vllm.unified_attention_with_output

        def run() -> None:
            metadata = dict.fromkeys(self.layers, self.build())
            context = ForwardContext(self.layers, metadata, slot_mapping)
            with override_forward_context(context):
                for encoded in names.values():
                    written = write(key, value, encoded) if self.writes_apart else None
                    attend(query, key, value, output, encoded, kv_cache_dummy_dep=written)

        return run


def _new_rows() -> tuple[torch.Tensor, ...]:
    """A layer's new rows, of one projection as in a model, and its output."""
    rows = torch.zeros(TOKENS, (GROUP + 2) * HEADS * SIZE, dtype=torch.bfloat16)
    heads = GROUP * HEADS, HEADS, HEADS
    parts = rows.split([number * SIZE for number in heads], dim=1)
    views = (part.view(TOKENS, -1, SIZE) for part in parts)
    return *views, torch.empty(TOKENS, GROUP * HEADS, SIZE, dtype=torch.bfloat16)


def steps_at(evicts: bool) -> tuple[list[int], list[int], list[bool]]:
    """Tokens before, new tokens, and whether they are a prompt's; decoding requests come first, as
    in vLLM's second model runner."""
    first, last = (2500, 9000) if evicts else (100, 1500)
    firsts = np.random.default_rng(0).integers(first, last, ROWS).tolist()
    return [*firsts, 8192 if evicts else 512], [1] * ROWS + [CHUNK], [False] * ROWS + [True]


def stock(evicts: bool) -> Side:
    """vLLM's Triton backend: nothing is evicted."""
    model = SimpleNamespace(
        rswa_window=None,
        get_num_attention_heads=lambda _: HEADS * GROUP,
        get_num_kv_heads=lambda _: HEADS,
        get_head_size=lambda: SIZE,
    )
    compilation = SimpleNamespace(cudagraph_mode=None, static_forward_context={})
    config = SimpleNamespace(
        model_config=model, compilation_config=compilation, parallel_config=None
    )
    builder = triton_attn.TritonAttentionMetadataBuilder(FULL, [], config, torch.device("cpu"))
    pool = torch.zeros(2, HEADS, BLOCK, 2 * SIZE, dtype=torch.bfloat16)
    table = torch.ones(ROWS + 1, 1 + 9000 // BLOCK, dtype=torch.int32)
    common = step_of(*steps_at(evicts), table)
    one = torch.ones(1)
    layers = {
        f"layers.{i}": SimpleNamespace(
            impl=triton_attn.TritonAttentionImpl(
                HEADS * GROUP, SIZE, SIZE**-0.5, HEADS, None, None, "auto"
            ),
            kv_cache=pool, _q_scale=one, _k_scale=one, _v_scale=one,
        )
        for i in range(LAYERS)
    }  # fmt: skip
    return Side(lambda: builder.build(0, common), layers, writes_apart=True)


def not_sent(values: torch.Tensor, _: str) -> torch.Tensor:
    """What ranks would put together."""
    return values


def ours(settings: dict[str, Any], evicts: bool, ranks: bool = False) -> Side:
    """Our CUDA backend under a policy; each layer has two pages, which nothing reads."""
    policy = resolve({"recall": 0, **settings, "budget": BUDGET})
    spec = KVPolicySpec.from_full(FULL, policy)
    limits = SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=256)
    config = SimpleNamespace(scheduler_config=limits)
    builder = CUDABuilder(spec, ["layer"], config, torch.device("cpu"))
    page = spec.page_size_bytes
    shape, strides = (2, HEADS, BLOCK, 2 * SIZE), (page // 2, BLOCK * 2 * SIZE, 2 * SIZE, 1)
    rotary = Rotary(10000.0 ** -(torch.arange(0, SIZE, 2) / SIZE), True)
    rings = None
    if policy.recall:
        most = policy.recall_store // policy.unit
        of_units = UnitShape(
            2, HEADS, spec.num_sets, policy.unit, SIZE, torch.bfloat16, most,
            policy.recall,
        )  # fmt: skip
        rings = Rings(of_units, ROWS + 1, torch.device("cpu"))
        names = [str(row) for row in range(ROWS + 1)]
        rings.rings = {name: row for row, name in enumerate(names)}
        builder.stores, builder.requests.names = rings, lambda _: names
    layers = {}
    for i in range(LAYERS):
        pool = torch.zeros(2, page, dtype=torch.uint8).view(torch.bfloat16)
        pool = torch.as_strided(pool, shape, strides)
        impl = TritonKVPolicyImpl(HEADS * GROUP, SIZE, SIZE**-0.5, HEADS, None, None, "auto", None)
        impl.prepare(spec, pool, rotary)
        if ranks:
            assert impl._layer is not None
            impl._layer = replace(impl._layer, over_ranks=not_sent)
        if rings is not None:
            impl.recall_from(rings, i % 2, policy.recall_queries)
        layers[f"layers.{i}"] = SimpleNamespace(impl=impl, kv_cache=pool, layer_name=f"layers.{i}")
    table = torch.ones(ROWS + 1, -(-policy.capacity // BLOCK), dtype=torch.int32)
    step = steps_at(evicts)
    common, firsts = step_of(*step, table), step[0]

    def build() -> Any:
        if rings is not None:  # as before the step
            rings.end[:] = spec.schedule.evicted(np.asarray(firsts))
            rings.shown[:] = spec.schedule.recalled(np.asarray(firsts))
        return builder.build(0, common)

    return Side(build, layers)


def milliseconds(*runs: Callable[[], Any], trials: int) -> list[float]:
    """Median of single calls that take turns, so that all see the same machine.

    It is the thread's own time, to which other processes add less than to the clock's.
    """
    times: list[list[float]] = [[] for _ in runs]
    for trial in range(trials + 3):
        for run, own in zip(runs, times, strict=True):
            begin = time.thread_time_ns()
            run()
            if trial >= 3:
                own.append((time.thread_time_ns() - begin) / 1e6)
    return [statistics.median(own) for own in times]


def measure(
    settings: dict[str, Any], evicts: bool, trials: int = 40, ranks: bool = False
) -> dict[str, float]:
    """Milliseconds of a step and launches of a layer, ours and stock's."""
    sides = ours(settings, evicts, ranks), stock(evicts)
    steps = [side.step() for side in sides]
    counts = []
    for side, step in zip(sides, steps, strict=True):
        step()
        before = no_card.launches()
        step()
        counts.append((no_card.launches() - before) / len(side.layers))
    ms = milliseconds(*steps, sides[0].build, sides[1].build, trials=trials)
    names = ("ours", "stock", "our_plan", "stock_plan")
    found = dict(zip(names, ms, strict=True))
    return found | {"our_launches": counts[0], "stock_launches": counts[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--ranks", action="store_true", help="as on one of several ranks")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"one thread; {ROWS} requests decode, one reads {CHUNK} tokens; {LAYERS} layers, budget "
        f"{BUDGET}; ms of the host a step, of that the plan; launches a layer"
    )
    for name in args.policies:
        for evicts in (False, True):
            with torch.inference_mode():
                found = measure(POLICIES[name], evicts, args.trials, args.ranks)
            print(
                f"{name:16s} {'evicts' if evicts else 'grows':6s} "
                f"ours {found['ours']:6.2f} (plan {found['our_plan']:4.2f}), "
                f"stock {found['stock']:5.2f} (plan {found['stock_plan']:4.2f}), "
                f"beyond stock {found['ours'] - found['stock']:+6.2f}; "
                f"launches {found['our_launches']:4.1f} and {found['stock_launches']:3.1f}",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
