# SPDX-License-Identifier: Apache-2.0
"""What the driver is given for each launch, beside what Triton's own launcher gives it.

python -m tests.attention.launch_bytes

Layers of every policy and shape of ``test_paged.py``, with drafts and with recall, run random steps
as on an H100, without a card (``no_card.py``). Each step runs several times: with all launches by
Triton, then with the layers' own launches, which later layers repeat, and then all layers do. Name,
grid, block, shared memory, stream and the bytes of all arguments must be the same.
"""

import argparse
import random
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.attention import no_card

no_card.pretend()

import torch

from tests.attention import test_paged
from tests.attention.test_paged import CASES, IN_UNITS, UNIT_CASES, Shape
from tests.attention.test_repeat import (
    LAYERS,
    OVER_RANKS,
    POLICIES,
    Model,
    decide_together,
)
from vllm_cascade.attention.cuda.builder import CUDABuilder
from vllm_cascade.attention.cuda.impl import TritonKVPolicyImpl
from vllm_cascade.attention.cuda.repeats import only_launches
from vllm_cascade.kernels.triton import launch, repeat

BFLOAT16 = {"rotary_dim": 128, "dtype": torch.bfloat16}
LLAMA = Shape(num_kv_heads=8, group=4, head_size=128, **BFLOAT16)
OTHERS: dict[str, tuple[Shape, dict[str, Any]]] = {
    "fp8": (Shape(cache_dtype="fp8", dtype=torch.bfloat16), IN_UNITS),
    "llama": (LLAMA, POLICIES["recall"][1]),
}
RANKS = {f"{name} over ranks": case for name, case in OVER_RANKS.items()}
ALL = CASES | UNIT_CASES | POLICIES | OTHERS | RANKS


def new_rows(shape: Shape, num: int) -> tuple[torch.Tensor, ...]:
    """A layer's query, key and value, of one projection as in a model, and its output."""
    heads, size = (shape.num_kv_heads * shape.group, *[shape.num_kv_heads] * 2), shape.head_size
    rows = torch.zeros(num, sum(heads) * size, dtype=shape.dtype)
    parts = rows.split([number * size for number in heads], dim=1)
    query, key, value = (part.view(num, -1, size) for part in parts)
    if shape.latent:
        value = shape.value_of(key)
    return query, key, value, torch.empty(num, heads[0], shape.value_size, dtype=shape.dtype)


def steps(number: int, drafts: int, seed: int) -> Any:
    """Tokens before, new tokens, and whether several are a prompt's; of two requests."""
    choose, seen = random.Random(seed), [0, 0]
    for _ in range(number):
        lengths = [choose.choice((1, 1, 1, 5, 8, 24)) for _ in seen]
        prompts = not drafts or choose.random() < 0.6
        if not prompts:
            lengths = [1 + choose.randint(0, drafts) for _ in seen]
        yield list(seen), lengths, prompts
        seen = [0 if done > 150 else done + n for done, n in zip(seen, lengths, strict=True)]


def differing(name: str, drafts: int, number: int) -> tuple[list[str], int]:
    """Launches that are not Triton's, and how many layers have repeated any."""
    shape, settings = ALL[name]
    model, found, before = Model(shape, settings, drafts), [], repeat.Repeater.number
    if name in RANKS:
        decide_together(model)
    for firsts, lengths, prompts in steps(number, drafts, len(name)):
        metadata = model.plan(firsts, lengths, prompts)
        if not only_launches(metadata, alone=name not in RANKS):
            continue
        rows = [new_rows(shape, sum(lengths)) for _ in model.layers]

        def run(metadata: Any = metadata, rows: Any = rows) -> None:
            for layer, (*new, output) in zip(model.layers, rows, strict=True):
                name = SimpleNamespace(layer_name="layer")
                layer.impl.forward(name, *new, layer.pool, metadata, output)

        run()  # the first launches of a kind are Triton's
        wanted = by_triton(run)
        assert len(wanted) >= 3 * LAYERS, wanted
        metadata.launched.clear()
        for _ in range(3):  # the third time the first layer repeats itself
            given = no_card.launched_by(run)
            assert len(given) == len(wanted), (len(given), len(wanted))
            found += [str(y) for x, y in zip(given, wanted, strict=True) if x != y]
        found += unnoticed(run)
    return found, repeat.Repeater.number - before


def by_triton(run: Callable[[], None]) -> list[tuple[Any, ...]]:
    """What the driver is given if Triton binds all arguments."""
    profiled = launch.profiled
    launch.profiled = repeat.profiled = lambda: True
    try:
        return no_card.launched_by(run)
    finally:
        launch.profiled = repeat.profiled = profiled


def unnoticed(run: Callable[[], None]) -> list[str]:
    """Whether an error of the driver is not raised by a layer that repeats."""
    no_card.library().fail(700)
    try:
        run()
    except RuntimeError as error:
        return [] if "CUDA error 700" in str(error) else [str(error)]
    finally:
        no_card.library().fail(0)
    return ["an error of the driver"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    test_paged.CPUKVPolicyImpl, test_paged.CPUBuilder = TritonKVPolicyImpl, CUDABuilder
    repeated = 0
    with torch.inference_mode():
        for name in ALL:
            for drafts in (0, 3):
                found, number = differing(name, drafts, args.steps)
                assert not found, (name, drafts, found[:3])
                repeated += number
    print(f"{len(ALL)} cases; {repeated} times a layer repeated launches, with Triton's bytes")


if __name__ == "__main__":
    sys.exit(main())
