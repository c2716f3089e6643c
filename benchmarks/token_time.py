# SPDX-License-Identifier: Apache-2.0
"""Time per output token beside stock vLLM, step by step: ``python -m benchmarks.token_time``.

Several engines live in one process and take their steps in turn: stock vLLM, the policy, and the
policy once more at a short context. Whatever else the machine does hits all of them within the same
few milliseconds, so the ratios hold where ``benchmarks.throughput``, whose trials lie seconds
apart, has nothing but noise. A step is all that an engine does for a token: scheduling, model,
sampling. Not in it: HTTP and text, which cost every arm the same.

For each context the engines read a prompt of that length (their chunks also in turn, and in those
of the third engine prompts of 4,096 tokens, one after the other), then generate ``--output-len``
tokens. This is done twice, the policy's two engines in exchanged roles, because two engines of one
kind differ by some percent, by where their weights lie in memory. The table has medians over those
steps, the median of the paired ratios, and what stock would take with an attention that costs
nothing: no cache can be faster than that.
"""

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.reporting import results
from benchmarks.reporting.tables import number
from benchmarks.reporting.token_report import goal_table, prompt_table, token_table
from benchmarks.running import engines
from benchmarks.running.token_points import (
    ANCHOR,
    POLICY,
    STOCK,
    Point,
    Step,
    short_length,
    summary,
)
from benchmarks.throughput import kv_bytes_per_token, model_arguments

ATTENTION = ("forward", "do_kv_cache_update")
"""What an attention layer's implementation does in a step."""

LARGEST_STRIDE = 1024
"""Tokens that a policy may need above its budget while it reads a prompt."""


class Arm:
    """An engine in this process, with a clock around its steps and its attention."""

    def __init__(self, settings: engines.EngineSettings) -> None:
        self.engine = settings.start().llm_engine
        self._attention = 0.0
        self._requests = itertools.count()
        self._generated = 0
        worker = self.engine.model_executor.driver_worker.worker
        for layer in worker.vllm_config.compilation_config.static_forward_context.values():
            for name in ATTENTION:
                if hasattr(layer.impl, name):
                    setattr(layer.impl, name, self._clocked(getattr(layer.impl, name)))

    def _clocked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = call(*args, **kwargs)
            self._attention += time.perf_counter() - begin
            return result

        return clocked

    def add(self, prompt: list[int], output_len: int) -> None:
        """A request that generates ``output_len`` tokens, whatever they are."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=output_len, ignore_eos=True, temperature=0, detokenize=False
        )
        self._generated = 0
        name = f"{id(self)}-{next(self._requests)}"
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def read(self, prompt: list[int]) -> Iterator[float]:
        """The prompt alone, a step at a time; ms of each."""
        self.add(prompt, 1)
        while self.reading:
            yield self.step().total

    @property
    def reading(self) -> bool:
        """Whether the request has no output yet."""
        return self._generated == 0

    def step(self) -> Step:
        self._attention, begin = 0.0, time.perf_counter()
        outputs = self.engine.step()
        total = time.perf_counter() - begin
        for output in outputs:
            self._generated = len(output.outputs[0].token_ids)
        return Step(total * 1e3, self._attention * 1e3)

    def finish(self) -> None:
        while self.engine.has_unfinished_requests():
            self.engine.step()


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.token_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="llama-125m", help="as of benchmarks.throughput")
    parser.add_argument("--tokenizer")
    parser.add_argument("--policy", default="cascade")
    parser.add_argument("--policy-config", type=json.loads, default={}, help="its settings, JSON")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[512, 2048, 4096, 8192, 16384, 32768, 65536]
    )
    parser.add_argument("--anchor", type=int, default=2048, help="context of the policy beside it")
    parser.add_argument("--stock-longest", type=int, default=16384, help="stock's longest context")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--chunk", type=int, default=2048, help="prompt tokens a step, all arms")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="vLLM's default; else eager")
    results.add_arguments(parser, "token-time")
    args = parser.parse_args(argv)
    if min(args.contexts) < 1 or args.output_len < 3:
        parser.error("--contexts must be at least 1, --output-len at least 3")
    if max(args.contexts) > args.stock_longest < min(args.contexts):
        parser.error("--stock-longest is below every context: nothing would be compared")
    return args


def settings(args: argparse.Namespace, arm: str) -> engines.EngineSettings:
    """An arm's engine; all have the same pool, which holds stock's longest context."""
    model, tokenizer, _ = model_arguments(args)
    longest = max(args.contexts)
    stock_longest = max(c for c in args.contexts if c <= args.stock_longest)
    held = max(stock_longest, args.anchor, args.budget + LARGEST_STRIDE) + args.output_len
    pages = -(-held // args.block_size) + 2
    arguments: dict[str, Any] = {
        "tokenizer": tokenizer,
        "enforce_eager": not args.compile,
        "enable_prefix_caching": False,
        "hf_overrides": {"max_position_embeddings": max(args.contexts) + args.output_len},
    }
    if model != args.model and args.model != "books-5m":
        arguments["load_format"] = "dummy"
    policy = {"name": args.policy, "budget": args.budget, **args.policy_config}
    return engines.EngineSettings(
        model=model,
        policy=None if arm == STOCK else policy,
        dtype="auto",
        max_model_len=max(args.anchor, stock_longest if arm == STOCK else longest)
        + args.output_len,
        max_num_batched_tokens=args.chunk,
        block_size=args.block_size,
        memory_bytes=pages * args.block_size * kv_bytes_per_token(model),
        arguments=arguments,
    )


def in_turn(names: Sequence[str], turn: int) -> Sequence[str]:
    """Every other turn the other way round."""
    return names if turn % 2 == 0 else names[::-1]


def read(
    arms: dict[str, Arm], prompts: dict[str, list[int]], args: argparse.Namespace
) -> tuple[dict[str, float], float]:
    """All prompts step by step, with the anchor's as the last, after short ones meanwhile.

    Returns:
        ms of each prompt by arm, and the mean ms a token of the short prompts.
    """
    short_prompt = prompts[POLICY][:1] * short_length(args)
    others = [name for name in arms if name != ANCHOR]
    for name in others:
        arms[name].add(prompts[name], args.output_len)
    took, beside = dict.fromkeys(arms, 0.0), []
    meanwhile, spent = arms[ANCHOR].read(short_prompt), 0.0
    turn = 0
    while not beside or any(arms[name].reading for name in others):
        for name in in_turn(others, turn):
            if arms[name].reading:
                took[name] += arms[name].step().total
        spent += next(meanwhile)
        if not arms[ANCHOR].reading:
            beside.append(spent / len(short_prompt))
            meanwhile, spent = arms[ANCHOR].read(short_prompt), 0.0
        turn += 1
    arms[ANCHOR].finish()
    arms[ANCHOR].add(prompts[ANCHOR], args.output_len)
    while arms[ANCHOR].reading:
        took[ANCHOR] += arms[ANCHOR].step().total
    return took, mean(beside)


def measure(arms: dict[str, Arm], context: int, args: argparse.Namespace) -> Point:
    """A prompt of ``context`` tokens, then ``output_len`` tokens, all arms step by step."""
    rng = np.random.default_rng(context)
    lengths = {name: args.anchor if name == ANCHOR else context for name in arms}
    prompts = {name: rng.integers(5, 4000, length).tolist() for name, length in lengths.items()}
    prompt, beside = read(arms, prompts, args)
    steps: dict[str, list[Step]] = {name: [] for name in arms}
    for turn in range(args.output_len - 1):
        for name in in_turn(list(arms), turn):
            steps[name].append(arms[name].step())
    for arm in arms.values():
        arm.finish()
    return Point(context, {name: [ms] for name, ms in prompt.items()}, [beside], steps)


def measure_twice(arms: dict[str, Arm], context: int, args: argparse.Namespace) -> Point:
    """The same with the policy's engines in exchanged roles, as one point."""
    first = measure(arms, context, args)
    second = measure(arms | {POLICY: arms[ANCHOR], ANCHOR: arms[POLICY]}, context, args)
    return Point(
        context,
        {name: first.prompt[name] + second.prompt[name] for name in arms},
        first.beside + second.beside,
        {name: first.steps[name] + second.steps[name] for name in arms},
    )


def run(args: argparse.Namespace) -> tuple[list[Point], int]:
    """Measure, context by context: the points, and the threads that they were measured with."""
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    engines.quiet()
    names = [STOCK, POLICY, ANCHOR]
    arms = {name: Arm(settings(args, name)) for name in names}
    import torch

    measure_twice(arms, min(256, *args.contexts), args)  # warm-up
    points = []
    for context in args.contexts:
        some = {n: a for n, a in arms.items() if n != STOCK or context <= args.stock_longest}
        points.append(measure_twice(some, context, args))
        times = ", ".join(f"{name} {number(points[-1].token(name))} ms" for name in some)
        print(f"{context:,}: {times}", flush=True)
    return points, torch.get_num_threads()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure in a process that ends with its engines."""
    args = parse_args(argv)
    ((points, threads),) = engines.in_children(run, [args])
    tables = [token_table(points, args), prompt_table(points, args), goal_table(points, args)]
    data = {"threads": threads, "points": [summary(point) for point in points]}
    results.save(args.out, tables, data, vars(args), argv)


if __name__ == "__main__":
    main()
