# SPDX-License-Identifier: Apache-2.0
"""What a step takes the host, on any machine: nothing is launched, everything else runs.

python -m tests.attention.host_time

A decode step is planned once for all layers; what its layers launch is in a CUDA graph. A prompt's
stride is launched by every layer. What is not counted: Triton's own launcher, and vLLM. Both are
counted in mixed steps, which come last, beside stock vLLM's (``mixed_time.py``).
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_cascade.attention.cuda.builder import CUDABuilder
from vllm_cascade.attention.cuda.impl import TritonKVPolicyImpl
from vllm_cascade.attention.cuda.metadata import DeviceWave
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.models.rotary import Rotary
from vllm_cascade.policies.registry import resolve
from vllm_cascade.step.builder import step_of

HEADS, GROUP, SIZE, BLOCK = 8, 4, 128, 16
POLICIES = ("sink", "lazy", "cascade", "h2o", "beehive")


@contextmanager
def nothing_launched() -> Iterator[list[str]]:
    """Kernels are not run; yields the names of those that would be."""
    launched: list[str] = []
    originals = [(kind, kind.run) for kind in (JITFunction, InterpretedFunction)]

    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        launched.append(self.fn.__name__)

    for kind, _ in originals:
        kind.run = note
    try:
        yield launched
    finally:
        for kind, run in originals:
            kind.run = run


class Served:
    """One layer of a model like Llama 8B under a policy, whose pages are never read."""

    def __init__(self, settings: dict[str, Any], rows: int, tokens: int) -> None:
        policy = resolve(settings)
        full = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.bfloat16
        )
        self.spec = KVPolicySpec.from_full(full, policy)
        limits = SimpleNamespace(max_num_batched_tokens=max(rows, tokens), max_num_seqs=rows)
        config = SimpleNamespace(scheduler_config=limits)
        self.builder = CUDABuilder(self.spec, ["layer"], config, torch.device("cpu"))
        self.impl = TritonKVPolicyImpl(
            HEADS * GROUP, SIZE, SIZE**-0.5, HEADS, None, None, "auto", None
        )
        page = self.spec.page_size_bytes
        self.pool = torch.zeros(2, page, dtype=torch.uint8).view(torch.bfloat16)
        shape, strides = (2, HEADS, BLOCK, 2 * SIZE), (page // 2, BLOCK * 2 * SIZE, 2 * SIZE, 1)
        self.pool = torch.as_strided(self.pool, shape, strides)
        frequencies = 10000.0 ** -(torch.arange(0, SIZE, 2) / SIZE)
        self.impl.prepare(self.spec, self.pool, Rotary(frequencies, True))
        pages = -(-self.spec.schedule.policy.capacity // BLOCK)
        self.table = torch.ones(rows, pages, dtype=torch.int32)

    def build(self, firsts: list[int], lengths: list[int]) -> Any:
        prompts = [length > 1 for length in lengths]
        common = step_of(firsts, lengths, prompts, self.table[: len(lengths)])
        return lambda: self.builder.build(0, common)

    def layer(self, metadata: Any, tokens: int) -> Callable[[], Any]:
        query = torch.zeros(tokens, HEADS * GROUP, SIZE, dtype=torch.bfloat16)
        key = torch.zeros(tokens, HEADS, SIZE, dtype=torch.bfloat16)
        layer, output = SimpleNamespace(layer_name="layer"), torch.empty_like(query)
        return lambda: self.impl.forward(layer, query, key, key, self.pool, metadata, output)


def microseconds(call: Callable[[], Any], trials: int) -> float:
    """Median of single calls."""
    times = []
    for trial in range(trials + 3):
        begin = time.perf_counter_ns()
        call()
        if trial >= 3:
            times.append((time.perf_counter_ns() - begin) / 1e3)
    return statistics.median(times)


def decode_step(settings: dict[str, Any], rows: int = 256, trials: int = 200) -> float:
    """Microseconds of planning a decode step of so many requests."""
    served = Served(settings, rows, rows)
    firsts = np.random.default_rng(0).integers(2500, 9000, rows).tolist()
    with nothing_launched():
        return microseconds(served.build(firsts, [1] * rows), trials)


def mixed_layer(settings: dict[str, Any], rows: int = 64, trials: int = 200) -> float:
    """Microseconds of the host in one layer, of ``rows`` requests that decode outside a graph."""
    served = Served(settings, rows + 1, rows + 2)
    firsts = np.random.default_rng(0).integers(2500, 9000, rows + 1).tolist()
    with nothing_launched():
        metadata = served.build(firsts, [1] * rows + [2])()
        decode = DeviceWave(None, decode=metadata.waves[0].decode)
        return microseconds(served.layer(replace(metadata, waves=[decode]), rows + 2), trials)


def prompt(
    settings: dict[str, Any], tokens: int = 4096, stride: int = 256, trials: int = 50
) -> dict[str, float]:
    """A chunk of a long prompt: microseconds of its plan, and of each stride in a layer."""
    served = Served({**settings, "prefill_stride": stride}, 8, tokens)
    with nothing_launched() as launched:
        build = served.build([2 * tokens], [tokens])
        planned = microseconds(build, trials)
        layer = served.layer(build(), tokens)
        layer()
        launched.clear()
        layer()
        num = len(launched)
        each = microseconds(layer, trials) / (tokens / stride)
    return {"plan_us": planned, "stride_us": each, "launches": num}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=int, default=2048)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"one thread; budget {args.budget}; a prompt's chunk of 4,096 tokens, strides of 256")
    for name in POLICIES:
        settings = {"name": name, "budget": args.budget}
        found = prompt(settings)
        print(
            f"{name:8s} decode step, 256 rows: {decode_step(settings):6.0f} us; outside a graph "
            f"{mixed_layer(settings):4.0f} us a layer; "
            f"chunk: planned in {found['plan_us']:6.0f} us, {found['launches']} launches a layer, "
            f"{found['stride_us']:5.1f} us a stride and layer",
            flush=True,
        )
    # Its own process: vLLM is imported beside a stub of the driver.
    subprocess.run([sys.executable, "-m", "tests.attention.mixed_time"], check=True)


if __name__ == "__main__":
    main()
