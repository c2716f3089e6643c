# SPDX-License-Identifier: Apache-2.0
"""A whole book through a bounded KV cache, once per policy: ``python -m benchmarks.demo``.

Prints one table and a generated continuation, and writes two pictures and all numbers as JSON.
Every policy gets an engine in a process of its own, one on each of two cores at a time: an engine
that shares its caller's process starts in seconds, and nothing of one policy (vLLM's registered
backend, its metrics) is left when the next one starts. ``--help=all`` lists the options.
"""

import argparse
import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.running.engines import (
    BOOK,
    MODEL,
    EngineSettings,
    in_children,
    load_tokenizer,
    native_positions,
    quiet,
)
from benchmarks.running.environment import ROOT, fingerprint

if TYPE_CHECKING:
    from benchmarks.running.stream import StreamResult

CONTINUATION_TOKENS = 80
FULL_NEW_TOKENS = 2
TEMPERATURE = 0.8
BATCHED_TOKENS = 1024
BLOCK_SIZE = 32


@dataclass(frozen=True)
class Job:
    """One policy's run: what a child process needs to know."""

    label: str
    policy: dict[str, Any] | None
    model: str
    token_ids: list[int]
    max_model_len: int
    new_tokens: int
    memory_bytes: int
    bar_line: int = 0


def run(job: Job) -> "StreamResult":
    """Stream a job's tokens through an engine in this (child) process."""
    quiet()  # before vLLM is imported
    from benchmarks.running.stream import stream

    llm = EngineSettings(
        model=job.model,
        policy=job.policy,
        max_model_len=job.max_model_len,
        max_num_batched_tokens=BATCHED_TOKENS,
        block_size=BLOCK_SIZE,
        memory_bytes=job.memory_bytes,
        arguments={"use_tqdm_on_load": False},
    ).start()
    return stream(
        llm,
        job.token_ids,
        label=job.label,
        max_new_tokens=job.new_tokens,
        temperature=TEMPERATURE,
        bar_line=job.bar_line,
    )


def jobs(args: argparse.Namespace, token_ids: list[int], native_len: int) -> list[Job]:
    """The demo's runs, a row each; ``full`` stops where the model's positions do."""
    shared = {"budget": args.budget, "prefill_stride": args.stride, "trace": True}
    policies = {
        "window": {"name": "window", **shared},
        "sink": {"name": "sink", **shared},
        "cascade": {"name": "cascade", **shared},
        "cascade per KV head": {"name": "cascade", "head_policy": "per_kv_head", **shared},
        "beehive": {"name": "beehive", **shared},
        "lazy": {"name": "lazy", **shared},
        "dgc": {"name": "dgc", **shared},
        "h2o": {"name": "h2o", **shared},
    }
    bounded = [
        Job(
            label=label,
            policy=policy,
            model=args.model,
            token_ids=token_ids,
            max_model_len=len(token_ids) + CONTINUATION_TOKENS,
            new_tokens=CONTINUATION_TOKENS,
            memory_bytes=32 << 20,
        )
        for label, policy in policies.items()
    ]
    # Its positions must also hold what it generates.
    head = token_ids[: native_len - FULL_NEW_TOKENS]
    full = Job("full", None, args.model, head, native_len, FULL_NEW_TOKENS, 32 << 20)
    return [*bounded, full]


def check(plan: list[Job], native_len: int) -> None:
    """Fail before any engine starts.

    Raises:
        KVPolicyError: a budget or stride that cannot work.
    """
    from vllm_cascade.policies import resolve

    for job in plan:
        if job.policy:
            resolve(job.policy, max_position=native_len, max_num_batched_tokens=BATCHED_TOKENS)


def run_all(plan: list[Job], engines: int = 1) -> dict[str, "StreamResult"]:
    """Run the jobs, ``engines`` at a time, each in a fresh process."""
    plan = [replace(job, bar_line=index % engines) for index, job in enumerate(plan)]
    results = in_children(run, plan, engines)
    return {job.label: result for job, result in zip(plan, results, strict=True)}


def parse_args(argv: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """vLLM's own parser, so that options may be spelled as vLLM's are."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument("--book", default=str(BOOK), help="text file to stream")
    parser.add_argument("--model", default=str(MODEL), help="model, by path or name")
    parser.add_argument("--budget", type=int, default=512, help="cached tokens besides the sinks")
    parser.add_argument("--stride", type=int, default=256, help="prompt tokens between evictions")
    parser.add_argument("--tokens", type=int, help="stop after this many tokens of the book")
    parser.add_argument(
        "--engines",
        type=int,
        default=min(2, os.cpu_count() or 1),
        help="engines at a time; each uses one core",
    )
    parser.add_argument("--out", default=str(ROOT / "results/demo"), help="folder for the output")
    args = parser.parse_args(argv)
    if args.engines < 1:
        parser.error("--engines must be at least 1")
    if args.tokens is not None and args.tokens < 2:
        parser.error("--tokens must be at least 2")
    return parser, args


def load(args: argparse.Namespace) -> tuple[list[int], int]:
    """The book's tokens and the number of positions the model has."""
    text = Path(args.book).read_text(encoding="utf-8")
    token_ids = load_tokenizer(args.model)(text)["input_ids"][: args.tokens]
    return token_ids, native_positions(args.model)


def main(argv: list[str] | None = None) -> None:
    """Run the demo."""
    started = time.perf_counter()
    quiet()
    parser, args = parse_args(argv)
    token_ids, native_len = load(args)
    plan = jobs(args, token_ids, native_len)

    from vllm_cascade import KVPolicyError

    try:
        check(plan, native_len)
    except KVPolicyError as error:
        parser.error(str(error))

    from benchmarks.reporting import demo_pictures, demo_report

    demo_report.introduce(args, len(token_ids), native_len)
    results = run_all(plan, args.engines)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    demo_pictures.perplexity(results, native_len, out / "perplexity.png")
    demo_pictures.kept_tokens(results, out / "kept_tokens.png")
    seconds = time.perf_counter() - started
    head = plan[-1].token_ids
    numbers = demo_report.numbers(results, len(head), native_len)
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    (out / "demo.json").write_text(
        json.dumps(
            {
                "settings": settings,
                "seconds": round(seconds, 1),
                "environment": fingerprint(),
                "policies": numbers,
            },
            indent=1,
        )
        + "\n"
    )
    demo_report.show(results, len(head), native_len, out, seconds)


if __name__ == "__main__":
    main()
