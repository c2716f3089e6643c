# SPDX-License-Identifier: Apache-2.0
"""A token's time with recall, by the tokens in the store: ``python -m benchmarks.recall_cost``.

Engines live in one process and take their steps in turn, as in ``benchmarks.token_time``: a policy
that recalls evicted units, the same policy that attends to as many tokens and recalls nothing, and
stock vLLM as far as the model has positions. For each length of the store they read a prompt that
evicts so many tokens, then generate. Without recall a policy's cache holds as much after any
prompt, so of a longer one it reads the last tokens only. Choosing units takes time only at every
``recall_every``-th token, so a token's time is the mean over such a period, of the medians of its
steps.
"""

import argparse
import os
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.models import real_model
from benchmarks.reporting import results
from benchmarks.reporting.tables import Table, number
from benchmarks.running import engines
from benchmarks.running.children import in_children
from benchmarks.running.stepping import Arm, generate, in_turn
from benchmarks.throughput import kv_bytes_per_token

PLAIN, RECALL, STOCK = "no recall", "recall", "stock"
PLAIN_READS = 16_384
"""Most tokens of a prompt that the policy without recall reads."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = results.parser_of("recall_cost", __doc__)
    add = parser.add_argument
    add("--model", default=None, help="default: the real model")
    add("--policy", default="sink")
    add("--attended", type=int, default=512, help="tokens, recalled ones among them")
    add("--recall", type=int, default=8, help="units")
    add("--unit", type=int, default=16)
    add("--every", type=int, default=None, help="recall_every")
    add("--rows", default="exact", choices=("exact", "int8"), help="recall_rows")
    add("--stores", type=int, nargs="+", default=[0, 8192, 131072])
    add("--output-len", type=int, default=129)
    add("--chunk", type=int, default=1024, help="prompt tokens a step, all arms")
    add("--dtype", default="auto", help="as of the other commands")
    add("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    if args.attended <= (args.recall + 1) * args.unit:
        parser.error("--attended has no room besides --recall units and the sinks")
    return args


def policies(args: argparse.Namespace) -> dict[str, dict[str, Any] | None]:
    """The arms' settings: equal attended tokens, with one unit of sinks."""
    budget = args.attended - args.unit
    shared = {"name": args.policy, "unit": args.unit, "num_sinks": args.unit}
    every = {} if args.every is None else {"recall_every": args.every}
    store = max(*args.stores, args.recall * args.unit)
    recall = {"recall": args.recall, "recall_store": store, "recall_rows": args.rows, **every}
    return {
        PLAIN: {**shared, "budget": budget},
        RECALL: {**shared, "budget": budget - args.recall * args.unit, **recall},
        STOCK: None,
    }


def context(args: argparse.Namespace, store: int) -> int:
    """Prompt tokens after which so many have been evicted from both policies' caches."""
    return args.attended + store


def settings(args: argparse.Namespace, policy: dict[str, Any] | None) -> engines.EngineSettings:
    """An arm's engine."""
    longest = context(args, max(args.stores)) + args.output_len
    native = engines.native_positions(args.model)
    held = min(longest, native) if policy is None else 2 * args.attended
    return engines.EngineSettings(
        model=args.model,
        policy=policy,
        dtype=args.dtype,
        max_model_len=held if policy is None else longest,
        max_num_batched_tokens=args.chunk,
        memory_bytes=(held + 512) * kv_bytes_per_token(args.model, args.dtype),
        arguments={"enforce_eager": True, "enable_prefix_caching": False},
    )


def measure(arms: dict[str, Arm], num_prompt: int, args: argparse.Namespace) -> dict[str, Any]:
    """ms by arm: of the prompt's last chunks, and of generated tokens, medians over a period."""
    prompt = np.random.default_rng(num_prompt).integers(5, 4000, num_prompt).tolist()
    for name, arm in arms.items():
        arm.add(prompt[-PLAIN_READS:] if name == PLAIN else prompt, args.output_len)
    chunks: dict[str, list[float]] = {name: [] for name in arms}
    turn = 0
    for _ in range(0, num_prompt - PLAIN_READS, args.chunk):  # the others then end at once
        for name in arms.keys() - {PLAIN}:
            chunks[name].append(arms[name].step().total)
    while any(arm.reading for arm in arms.values()):
        for name in in_turn(list(arms), turn):
            if arms[name].reading:
                chunks[name].append(arms[name].step().total)
        turn += 1
    steps = generate(arms, args.output_len - 1)
    medians = {
        name: of_period([step.total for step in some], args.period) for name, some in steps.items()
    }
    return {"prompt": {n: ms[-4:] for n, ms in chunks.items()}, "steps": medians}


def of_period(steps: Sequence[float], period: int) -> list[float]:
    """Medians of the steps at each place of a period."""
    return [median(steps[phase::period]) for phase in range(min(period, len(steps)))]


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All lengths; engines end with the process."""
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    engines.quiet()
    native = engines.native_positions(args.model)
    arms = {name: Arm(settings(args, policy)) for name, policy in policies(args).items()}
    measure(arms, 256, args)  # warm-up
    points = []
    for store in args.stores:
        num = context(args, store)
        fits = num + args.output_len <= native
        some = {name: arm for name, arm in arms.items() if name != STOCK or fits}
        points.append({"store": store, **measure(some, num, args)})
        counters = arms[RECALL].engine.collective_rpc("kv_policy_counters")[0]
        points[-1]["counters"] = counters
        print(f"{store:,}: {counters}", flush=True)
    return points


def table(points: Sequence[dict[str, Any]], args: argparse.Namespace) -> Table:
    """A row a length of the store."""
    rows = []
    for point in points:
        ms = {name: mean(steps) for name, steps in point["steps"].items()}
        chunk = {name: median(some) for name, some in point["prompt"].items()}
        stock = number(ms[STOCK]) if STOCK in ms else "-"
        rows.append(
            (
                f"{point['store']:,}",
                stock,
                number(ms[PLAIN]),
                number(ms[RECALL]),
                f"{ms[RECALL] / ms[PLAIN]:.3f}x",
                f"{chunk[RECALL] / chunk[PLAIN]:.3f}x",
                f"{point['counters']['store_bytes'] / 2**20:,.1f}",
            )
        )
    columns = (
        "tokens in the store",
        "stock, ms a token",
        "no recall",
        "recall",
        "a token",
        "a prompt token",
        "store, MiB",
    )
    note = (
        f"{args.policy}, {args.attended} attended tokens, of which recall brings back "
        f"{args.recall} units of {args.unit}; a choice every {args.period} tokens; "
        f"{args.threads} thread, steps of all arms in turn. Prompt: the last four chunks of "
        f"{args.chunk:,} tokens at most."
    )
    return Table("What recall costs", columns, tuple(rows), note)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure in a process that ends with its engines."""
    from vllm_cascade.policies.registry import resolve

    args = parse_args(argv)
    args.model = args.model or str(real_model())
    args.dtype = engines.settle_dtype(args.dtype, args.model)
    args.period = resolve(policies(args)[RECALL]).recall_every
    (points,) = in_children(run, [args])
    results.finish(args, argv, [table(points, args)], {"points": points})


if __name__ == "__main__":
    main()
