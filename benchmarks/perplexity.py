# SPDX-License-Identifier: Apache-2.0
"""Streaming perplexity of every policy at equal size: ``python -m benchmarks.perplexity``.

By default the shipped model reads the shipped book. ``--data pg19``, ``wikitext2``,
``wikitext103`` and ``bookcorpus`` are the papers' protocols; any file, folder or Hub dataset works
with ``--protocol`` (see ``benchmarks/inputs/texts.py``). Beside the policies run ``random``
eviction as a control, and stock attention recomputed over a sliding window of the same length:
what a cache of that size could at best equal. Differences are to ``--base``, with paired bootstrap
intervals.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.inputs import texts
from benchmarks.reporting import quality_report, results
from benchmarks.running import scoring
from benchmarks.running.engines import (
    BOOK,
    MODEL,
    EngineSettings,
    load_tokenizer,
    native_positions,
    quiet,
    settle_dtype,
)
from benchmarks.running.scoring import REFERENCE, Job, eviction_batches

BATCHED_TOKENS = 1024


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.perplexity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument(
        "--data", nargs="+", default=[str(BOOK)], help="names, files, folders, hf:..."
    )
    parser.add_argument(
        "--protocol", choices=texts.PROTOCOLS, help="default: the data's own, or books"
    )
    parser.add_argument("--documents", type=int, help="stop after so many documents (or Hub rows)")
    parser.add_argument("--length-ranks", help="of books, by length: 19:44 is the cascade paper's")
    parser.add_argument("--tokens", type=int, help="cut every stream here")
    parser.add_argument(
        "--capacity", type=int, default=516, help="most tokens cached, sinks included"
    )
    parser.add_argument("--num-sinks", type=int, default=4)
    parser.add_argument("--stride", type=int, default=256, help="prompt tokens between evictions")
    parser.add_argument("--policies", nargs="+", help="default: all, and the random control")
    parser.add_argument(
        "--policy-config",
        type=json.loads,
        default={},
        help='settings by policy name, JSON: {"cascade": {"head_reduction": "max"}}',
    )
    parser.add_argument(
        "--arms",
        type=arms_of,
        help="a JSON file of arms, each a label and settings, instead of --policies: "
        '{"two sub-caches": {"name": "cascade", "num_subcaches": 2}}; "capacity" and '
        '"kv_cache_dtype" are an arm\'s own instead of --capacity and --kv-cache-dtype; '
        "`benchmarks/inputs/studies` has some",
    )
    parser.add_argument(
        "--kv-cache-dtype", default="auto", help="vLLM's, of the policies' caches: fp8, ..."
    )
    parser.add_argument("--no-full", action="store_true", help="leave stock attention out")
    parser.add_argument("--base", default="sink", help="policy that differences are to")
    parser.add_argument(
        "--reference-stride",
        type=int,
        help="tokens predicted a recomputed window (default: an eighth of it; 0: no reference)",
    )
    parser.add_argument(
        "--spike-tokens",
        type=int,
        default=0,
        help="also stream so many tokens one by one, and look at the tokens after each eviction",
    )
    parser.add_argument("--chunk", type=int, default=BATCHED_TOKENS, help="tokens a step")
    results.add_engine_arguments(parser)
    parser.add_argument("--streams", type=int, default=1, help="texts at a time in an engine")
    results.add_arguments(parser, "perplexity")
    args = parser.parse_args(argv)
    if args.reference_stride is None:
        args.reference_stride = max(args.capacity // 8, 1)
    return args


def arms_of(path: str) -> dict[str, dict[str, Any]]:
    """The arms in a file.

    Raises:
        ArgumentTypeError: no such file, or no object of objects that have a name.
    """
    try:
        arms = json.loads(Path(path).read_text("utf-8"))
        named = all("name" in settings for settings in arms.values())
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from None
    if not named:
        raise argparse.ArgumentTypeError(f'{path}: every arm needs a "name", that of its policy')
    return arms


def load(args: argparse.Namespace) -> list[texts.Stream]:
    """The streams of all data sets, under one protocol."""
    documents: dict[str, str] = {}
    protocol = args.protocol
    for source in args.data:
        source, own = texts.DATASETS.get(source, (source, "books"))
        protocol = protocol or own
        documents |= texts.read(source, args.documents)
    ranks = None
    if args.length_ranks:
        begin, end = (int(part) if part else None for part in args.length_ranks.split(":"))
        ranks = slice(begin, end)
    tokenizer = load_tokenizer(args.model)
    return texts.streams(
        documents,
        lambda text: tokenizer(text)["input_ids"],
        protocol,
        num_tokens=args.tokens,
        ranks=ranks,
    )


def policies(args: argparse.Namespace, stride: int) -> dict[str, dict[str, Any]]:
    """Settings of every arm, all of the same capacity, by policy name."""
    from benchmarks.running import controls
    from vllm_cascade.policies.registry import POLICIES

    controls.register()
    shared = {"num_sinks": args.num_sinks, "prefill_stride": stride}
    if getattr(args, "arms", None) is not None:  # other commands have policies by name only
        arms = {label: {**shared, **settings} for label, settings in args.arms.items()}
        arms = {args.base: {**shared, "name": args.base}} | arms
        return {
            label: scoring.equal_policy(**{"capacity": args.capacity, **_of_policy(settings)})
            for label, settings in arms.items()
        }
    names = args.policies or [name for name in POLICIES if name not in controls.CONTROLS] + [
        "random"
    ]
    names = list(dict.fromkeys([*names, args.base]))
    return {
        name: scoring.equal_policy(
            name, args.capacity, **shared, **args.policy_config.get(name, {})
        )
        for name in names
    }


def _of_policy(arm: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in arm.items() if key != "kv_cache_dtype"}


def cache_dtype(args: argparse.Namespace, label: str) -> str:
    """What an arm's keys and values are stored in."""
    arm = (args.arms or {}).get(label, {})
    return arm.get("kv_cache_dtype", args.kv_cache_dtype)


def sizes(args: argparse.Namespace, plan: Sequence[Job]) -> dict[str, dict[str, Any]]:
    """What a request of every arm holds at most, where arms store keys and values differently."""
    from benchmarks.running import pools

    arms = [job for job in plan if job.engine.policy]
    if all(cache_dtype(args, job.label) == "auto" for job in arms):
        return {}
    return {
        job.label: {
            "kv_cache_dtype": cache_dtype(args, job.label),
            "pages": pools.pages_of_request(job.engine),
            "bytes": pools.pages_of_request(job.engine) * pools.page_bytes(job.engine),
        }
        for job in arms
    }


def jobs(args: argparse.Namespace, streams: Sequence[texts.Stream]) -> list[Job]:
    """An engine an arm; stock attention reads as much of each text as the model has positions."""
    longest = max(len(stream.token_ids) for stream in streams)
    native = native_positions(args.model)
    engine = EngineSettings(
        model=args.model,
        dtype=args.dtype,
        max_model_len=longest + 2,
        max_num_seqs=args.streams,
        max_num_batched_tokens=max(args.chunk, args.stride),
        arguments={"use_tqdm_on_load": False},
    )
    plan = []
    for name, settings in policies(args, args.stride).items():
        own = replace(engine, policy=settings)
        if (stored := cache_dtype(args, name)) != "auto":
            own = replace(own, arguments={**engine.arguments, "kv_cache_dtype": stored})
        plan.append(Job(name, own, tuple(streams), group=args.streams))
    held = min(native, longest + 2)
    heads = tuple(stream.cut(native - 2) for stream in streams)
    if not args.no_full:
        plan.append(Job("full", replace(engine, max_model_len=held), heads, group=args.streams))
    if args.reference_stride:
        window = min(args.capacity, native - 1)
        stock = replace(engine, max_model_len=min(window + 1, native), max_num_seqs=8)
        plan.append(Job(REFERENCE, stock, tuple(streams), window, args.reference_stride))
    return plan


def spike_jobs(args: argparse.Namespace, streams: Sequence[texts.Stream]) -> list[Job]:
    """One stream, token by token, under the base and every policy that evicts in batches."""
    from vllm_cascade.policies.registry import resolve

    head = streams[0].cut(args.spike_tokens)
    arms = {
        name: settings
        for name, settings in policies(args, 1).items()
        if name == args.base or len(eviction_batches(resolve(settings), len(head.token_ids)))
    }
    engine = EngineSettings(
        model=args.model,
        dtype=args.dtype,
        max_model_len=len(head.token_ids) + 2,
        max_num_batched_tokens=BATCHED_TOKENS,
        arguments={"use_tqdm_on_load": False},
    )
    return [Job(name, replace(engine, policy=arm), (head,)) for name, arm in arms.items()]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    args = parse_args(argv)
    quiet()
    args.dtype = settle_dtype(args.dtype, args.model)
    from vllm_cascade.policies.registry import resolve

    streams = load(args)
    plan, kept_in = jobs(args, streams), results.parts_of(args)
    found = scoring.run_all(plan, args.engines, kept_in)
    scored, failed = found.done, found.failed
    arms = {job.label: resolve(job.engine.policy) for job in plan if job.engine.policy}
    tables = [quality_report.overall(scored, arms, args.base, args.capacity, failed)]
    if args.base in scored:
        tables.append(quality_report.positions(scored, args.base))
    if held := sizes(args, plan):
        tables.append(quality_report.sizes(held))
    data = {**quality_report.numbers(scored, arms), **results.failures(failed)}
    for label, size in held.items():
        data[label]["request"] = size
    if args.spike_tokens:
        close = scoring.run_all(spike_jobs(args, streams), args.engines, kept_in)
        if args.base in close.done:
            tables.append(quality_report.spikes(close.done, policies(args, 1), args.base))
        failed |= {f"{label}, token by token": why for label, why in close.failed.items()}
    results.save(args.out, tables, data, vars(args), argv)
    if args.base in scored:
        quality_report.picture(scored, args.base, args.out.with_suffix(".png"))
    results.end(failed)


if __name__ == "__main__":
    main()
