# SPDX-License-Identifier: Apache-2.0
"""Time per output token beside stock vLLM, step by step: ``python -m benchmarks.token_time``.

Several engines live in one process and take their steps in turn: stock vLLM, the policy, and the
policy once more at a short context. So the ratios hold where ``benchmarks.throughput``, whose
trials lie seconds apart, has nothing but noise. A step is all that an engine does for a token:
scheduling, model, sampling. Not in it: HTTP and text, which cost every arm the same.

For each context the engines read a prompt of that length (their chunks also in turn, and in those
of the third engine prompts of 4,096 tokens, one after the other), then generate ``--output-len``
tokens. This is done twice, the policy's two engines in exchanged roles, because two engines of one
kind differ by some percent, by where their weights lie in memory. The table has medians over those
steps, the median of the paired ratios, and what stock would take with an attention that costs
nothing: no cache can be faster than that.
"""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import geometric_mean, mean, median
from typing import Any

import numpy as np

from benchmarks.reporting import results
from benchmarks.reporting.tables import Goal, Table, number, table_of_goals, times
from benchmarks.running import engines
from benchmarks.running.children import in_children
from benchmarks.running.stepping import Arm, Step, generate, in_turn
from benchmarks.throughput import kv_bytes_per_token, model_arguments

LARGEST_STRIDE = 1024
"""Tokens that a policy may need above its budget while it reads a prompt."""

LONG = 16384
TOKEN_FLAT, PROMPT_FLAT = 0.05, 0.10
TOKEN_FASTER, PROMPT_FASTER = 3.5, 2.5  # than stock's, at LONG
TOKEN_COST = 1.1  # over stock's, where nothing is evicted
STOCK, POLICY, ANCHOR = "stock", "policy", "anchor"

SHORT_PROMPT = 4096
"""From here on, the time a prompt token is to be flat."""


@dataclass(frozen=True)
class Point:
    """One context, of the arms that took part.

    Attributes:
        prompt: ms of the whole prompt, each time it was read, by arm.
        beside: mean ms a token of the short prompts read meanwhile, each time.
        steps: of each generated token after the first, by arm.
    """

    context: int
    prompt: dict[str, list[float]]
    beside: list[float]
    steps: dict[str, list[Step]]

    def token(self, arm: str) -> float | None:
        """Median ms a token."""
        found = self.steps.get(arm)
        return median(step.total for step in found) if found else None

    def paired(self, over: str, under: str) -> float | None:
        """One arm's time over another's: medians of each half's steps, and their mean."""
        if over not in self.steps or under not in self.steps:
            return None
        pairs = zip(self.steps[over], self.steps[under], strict=True)
        ratios = [a.total / b.total for a, b in pairs]
        half = len(ratios) // 2
        return geometric_mean([median(ratios[:half]), median(ratios[half:])])

    def prompt_token(self, arm: str) -> float | None:
        """Mean ms a prompt token."""
        return mean(self.prompt[arm]) / self.context if arm in self.prompt else None

    @property
    def prompt_over_short(self) -> float:
        """The policy's time a prompt token over the time in the short prompts read meanwhile."""
        pairs = zip(self.prompt[POLICY], self.beside, strict=True)
        return geometric_mean([ms / self.context / beside for ms, beside in pairs])

    def without_attention(self, arm: str) -> float | None:
        """Median ms a token less its attention."""
        found = self.steps.get(arm)
        return median(step.total - step.attention for step in found) if found else None


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = results.parser_of("token_time", __doc__)
    add = parser.add_argument
    add("--model", default="llama-125m", help="as of benchmarks.throughput")
    add("--tokenizer")
    add("--policy", default="cascade")
    add("--policy-config", type=json.loads, default={}, help="its settings, JSON")
    add("--budget", type=int, default=1024)
    contexts = [512, 2048, 4096, 8192, 16384, 32768, 65536]
    add("--contexts", type=int, nargs="+", default=contexts)
    add("--anchor", type=int, default=2048, help="context of the policy beside it")
    add("--stock-longest", type=int, default=16384, help="stock's longest context")
    add("--output-len", type=int, default=128)
    add("--chunk", type=int, default=2048, help="prompt tokens a step, all arms")
    add("--block-size", type=int, default=128)
    add("--threads", type=int, default=1)
    add("--compile", action="store_true", help="vLLM's default; else eager")
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
    steps = generate(arms, args.output_len - 1)
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


def token_table(points: Sequence[Point], args: argparse.Namespace) -> Table:
    """Time a generated token, by context."""
    rows = []
    for point in points:
        stock, floor = point.token(STOCK), point.without_attention(STOCK)
        over = point.paired(POLICY, ANCHOR)
        rows.append(
            {
                "context": f"{point.context:,}",
                "stock": number(stock),
                args.policy: number(point.token(POLICY)),
                "faster": times(point.paired(STOCK, POLICY)),
                "stock, attention free": number(floor),
                "faster at best": times(stock / floor if stock and floor else None),
                f"over {args.anchor:,} tokens": "-" if over is None else f"{over - 1:+.1%}",
            }
        )
    return Table.of(
        f"ms a token, {args.policy} with budget {args.budget:,} beside stock vLLM",
        rows,
        f"Medians of 2 x {args.output_len - 1} steps taken in turn, and of their paired ratios. "
        "Attention free: stock's steps less the time in its attention.",
    )


def prompt_table(points: Sequence[Point], args: argparse.Namespace) -> Table:
    """Time to read a prompt, by context."""
    rows = [
        {
            "context": f"{point.context:,}",
            "stock": number(point.prompt_token(STOCK), 3),
            args.policy: number(point.prompt_token(POLICY), 3),
            "faster": times(_prompt_ratio(point)),
            f"over {short_length(args):,} tokens": f"{point.prompt_over_short - 1:+.1%}",
        }
        for point in points
    ]
    title = f"ms a prompt token, in chunks of {args.chunk:,}"
    return Table.of(title, rows, "Means of two prompts; the last column beside short ones.")


def goal_table(points: Sequence[Point], args: argparse.Namespace) -> Table:
    """The project's goals, as far as the contexts reach them."""
    goals: list[Goal] = []
    by_context = {point.context: point for point in points}
    for context, point in by_context.items():
        if context + args.output_len <= args.budget:
            goal = f"at most {TOKEN_COST}x stock's time a token where nothing is evicted"
            cost = point.paired(POLICY, STOCK)
            goals.append((f"{goal} ({context:,})", cost, (0, TOKEN_COST), "{:.2f}x"))
    long = by_context.get(LONG)
    if long is not None:
        for what, speed_up, least in (
            ("token", long.paired(STOCK, POLICY), TOKEN_FASTER),
            ("prompt", _prompt_ratio(long), PROMPT_FASTER),
        ):
            goal = f"a {what} at least {least}x faster at {LONG:,}"
            goals.append((goal, speed_up, (least, inf), "{:.2f}x"))
    tokens = [x for p in points if p.context > args.anchor and (x := p.paired(POLICY, ANCHOR))]
    prompts = [p.prompt_over_short for p in points if p.context > SHORT_PROMPT]
    for what, over, begin, most in (
        ("a token", tokens, args.anchor, TOKEN_FLAT),
        ("a prompt token", prompts, SHORT_PROMPT, PROMPT_FLAT),
    ):
        worst = max(over, key=lambda x: abs(x - 1), default=None)
        goal = f"time {what} flat within {most:.0%} from {begin:,} to {max(by_context):,}"
        goals.append((goal, worst, (1 - most, 1 + most), "{:.3f}x at most"))
    return table_of_goals(goals)


def _prompt_ratio(point: Point) -> float | None:
    stock, ours = point.prompt_token(STOCK), point.prompt_token(POLICY)
    return stock / ours if stock and ours else None


def short_length(args: argparse.Namespace) -> int:
    """Tokens of the prompts that are read beside the others."""
    return min(SHORT_PROMPT, max(args.contexts))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure in a process that ends with its engines."""
    args = parse_args(argv)
    ((points, threads),) = in_children(run, [args])
    tables = [token_table(points, args), prompt_table(points, args), goal_table(points, args)]
    results.finish(args, argv, tables, {"threads": threads})


if __name__ == "__main__":
    main()
