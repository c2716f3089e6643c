# SPDX-License-Identifier: Apache-2.0
"""Streaming perplexity of every policy at equal size: ``python -m benchmarks.perplexity``.

By default the shipped model reads the shipped book. ``--data pg19``, ``wikitext2``, ``wikitext103``
and ``bookcorpus`` are the papers' protocols; any file, folder or Hub dataset works with
``--protocol`` (see ``benchmarks/inputs/texts.py``). Beside the policies runs stock attention
recomputed over a sliding window of ``--capacity`` tokens: what the last tokens alone predict. It is
no upper bound: policies attend to up to ``--capacity`` plus ``--stride`` tokens. Differences are to
``--base``, with paired bootstrap intervals.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.inputs import texts
from benchmarks.reporting import results, stats
from benchmarks.reporting.tables import Table, number
from benchmarks.running import scoring
from benchmarks.running.engines import (
    BOOK,
    MODEL,
    EngineSettings,
    load_tokenizer,
    native_positions,
    settle,
)
from benchmarks.running.scoring import REFERENCE, Job, Scored, cached

BATCHED_TOKENS = 1024
FULL = "full"
"""An arm: stock vLLM."""
COMMON = "perplexity, common tokens"
_FULL_ENDS = f" (`{FULL}` ends where the model's positions do)"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = results.parser_of("perplexity", __doc__, engines=True)
    add_policy_arguments(parser, capacity=516, stride=256)
    add = parser.add_argument
    add("--data", nargs="+", default=[str(BOOK)], help="names, files, folders, hf:...")
    add("--protocol", choices=texts.PROTOCOLS, help="default: the data's own, or books")
    add("--documents", type=int, help="stop after so many documents (or Hub rows)")
    add("--length-ranks", help="of books, by length: 19:44 is the cascade paper's")
    add("--tokens", type=int, help="cut every stream here")
    add("--no-full", action="store_true", help="leave stock attention out")
    add("--reference-stride", type=int, help="tokens predicted a recomputed window (default: an "
        "eighth of it; 0: no reference)")  # fmt: skip
    add("--chunk", type=int, default=BATCHED_TOKENS, help="tokens a step")
    add("--streams", type=int, default=1, help="texts at a time in an engine")
    args = parser.parse_args(argv)
    if args.reference_stride is None:
        args.reference_stride = max(args.capacity // 8, 1)
    return args


# --- arms of equal size -------------------------------------------------------------------------


def add_policy_arguments(
    parser: argparse.ArgumentParser, capacity: int | None, stride: int | None
) -> None:
    """The options that ``policies`` reads; None: the command finds the default itself."""
    add = parser.add_argument
    add("--model", default=str(MODEL))
    add("--capacity", type=int, default=capacity, help="most tokens cached, sinks included")
    add("--num-sinks", type=int, default=4)
    add("--stride", type=int, default=stride, help="prompt tokens between evictions")
    add("--policies", nargs="+", help="default: all of them")
    add("--policy-config", type=json.loads, default={} if capacity else None,
        help='settings by policy name, JSON: {"cascade": {"head_reduction": "max"}}')  # fmt: skip
    add("--arms", type=arms_of, help="a JSON file of arms, each a label and settings, instead of "
        '--policies: {"two sub-caches": {"name": "cascade", "num_subcaches": 2}}; an arm may have '
        'its own "capacity" and "kv_cache_dtype"; `benchmarks/inputs/studies` '
        "has some")  # fmt: skip
    add("--base", default="sink", help="policy that differences are to")
    add("--kv-cache-dtype", default="auto", help="vLLM's, of the policies' caches: fp8, ...")


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


def policies(args: argparse.Namespace, stride: int) -> dict[str, dict[str, Any]]:
    """Settings of every arm, all of the same capacity, by policy name or label."""
    from benchmarks.running import controls
    from vllm_cascade.policies.registry import POLICIES

    controls.register()
    shared = {"num_sinks": args.num_sinks, "prefill_stride": stride}
    if args.arms is not None:
        arms = {args.base: {"name": args.base}} | args.arms
    else:
        names = args.policies or [n for n in POLICIES if n not in controls.CONTROLS]
        names = dict.fromkeys([*names, args.base])
        arms = {name: {"name": name, **args.policy_config.get(name, {})} for name in names}
    return {
        label: scoring.equal_policy(
            **{"capacity": args.capacity, **shared}
            | {key: value for key, value in settings.items() if key != "kv_cache_dtype"}
        )
        for label, settings in arms.items()
    }


def cache_dtype(args: argparse.Namespace, label: str) -> str:
    """What an arm's keys and values are stored in."""
    arm = (args.arms or {}).get(label, {})
    return arm.get("kv_cache_dtype", args.kv_cache_dtype)


def with_policy(
    args: argparse.Namespace, engine: EngineSettings, label: str, policy: dict[str, Any]
) -> EngineSettings:
    """The same engine with an arm's policy and type of cache."""
    stored = cache_dtype(args, label)
    arguments = {} if stored == "auto" else {"kv_cache_dtype": stored}
    return replace(engine, policy=policy, arguments={**engine.arguments, **arguments})


def engines(
    args: argparse.Namespace, longest: int, full: bool = True, **sizes: int
) -> dict[str, EngineSettings]:
    """An engine an arm, for texts of ``longest`` tokens.

    Args:
        full: also stock attention, for as many tokens as the model has positions.
        sizes: of every engine.
    """
    batched = {"max_num_batched_tokens": max(BATCHED_TOKENS, args.stride), **sizes}
    engine = EngineSettings(model=args.model, dtype=args.dtype, max_model_len=longest, **batched)
    made = {}
    for name, policy in policies(args, args.stride).items():
        made[name] = with_policy(args, engine, name, policy)
    if full:
        held = min(longest, native_positions(args.model))
        made[FULL] = replace(engine, max_model_len=held)
    return made


def request_sizes(args: argparse.Namespace, plan: Sequence[Job]) -> dict[str, dict[str, Any]]:
    """The most that a request of every arm holds; empty if all arms have the model's type."""
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
    sizes = {"max_num_seqs": args.streams, "max_num_batched_tokens": max(args.chunk, args.stride)}
    plan = [
        Job(name, engine, tuple(streams), group=args.streams)
        for name, engine in engines(args, longest + 2, not args.no_full, **sizes).items()
    ]
    if not args.no_full:
        plan[-1] = replace(plan[-1], streams=tuple(stream.cut(native - 2) for stream in streams))
    if args.reference_stride:
        window = min(args.capacity, native - 1)
        held = min(window + 1, native)
        stock = replace(plan[0].engine, policy=None, max_model_len=held, max_num_seqs=8)
        stock = replace(stock, arguments={})
        plan.append(Job(REFERENCE, stock, tuple(streams), window, args.reference_stride))
    return plan


# --- tables -------------------------------------------------------------------------------------


def overall(
    scored: Mapping[str, Scored],
    arms: Mapping[str, Any],
    base: str,
    capacity: int,
    failed: Mapping[str, str],
) -> Table:
    """A row an arm: perplexity, its difference to ``base``, and what the cache held.

    Args:
        arms: the resolved policies.
        failed: arms without a result, and why; a row each.
    """
    rows, shared = [], common(scored)
    num_shared = sum(len(values) for values in next(iter(shared.values()), []))
    alike = all(run.num_tokens == num_shared for run in scored.values())
    for label, run in scored.items():
        other, held = scored.get(base), "-"
        if label in arms:
            longest = max(len(values) for values in run.nll) + 1
            held = "{:,} / {:,.0f} / {:,}".format(*cached(arms[label], longest))
        evicted = f"{run.counters['evicted_tokens']:,}" if run.counters else "-"
        rows.append(
            {
                "policy": label,
                "tokens": f"{run.num_tokens:,}",
                "perplexity": number(stats.perplexity(run.scored)),
                **({} if alike else {COMMON: _perplexity(shared[label])}),
                "mean of texts": number(stats.perplexity_per_document(run.scored)),
                f"nats a token more than {base} (95 % interval)": "-"
                if other is None or other is run
                else str(_difference(run, other)),
                "cached: min / mean / max": held,
                "evicted": evicted,
                "tokens/s": f"{run.tokens_per_second:,.0f}",
            }
        )
    texts_each = next((len(run.nll) for run in scored.values()), 0)
    many = texts_each >= stats.FEW_DOCUMENTS
    notes = [
        f"At most {capacity:,} tokens cached between strides, sinks included. `perplexity` weighs "
        "texts by tokens.",
        "" if alike else f"`{COMMON}`: of the {num_shared:,} tokens that all arms have scored.",
        "Intervals: paired bootstrap over "
        f"{'texts' if many else f'blocks of {stats.BLOCK} tokens'}"
        ", over the tokens that both have scored"
        f"{_FULL_ENDS if FULL in scored else ''}.",
        f"`{REFERENCE}` predicts from a fresh pass over a window of that length; policies attend "
        "to up to a stride more."
        if REFERENCE in scored
        else "",
        "`tokens/s`: tokens of the texts that an engine read in a second.",
    ]
    note = " ".join(filter(None, notes))
    return Table.of("Streaming perplexity at equal size", rows, note, failed)


def common(scored: Mapping[str, Scored]) -> dict[str, list[np.ndarray]]:
    """By arm, text by text: nats of the tokens that all arms have scored."""
    found: dict[str, list[np.ndarray]] = {label: [] for label in scored}
    for of_text in zip(*(run.nll for run in scored.values()), strict=True):
        length = min(map(len, of_text))
        cut = np.stack([values[:length] for values in of_text])
        cut = cut[:, ~np.isnan(cut).any(axis=0)]
        for label, values in zip(scored, cut, strict=True):
            found[label].append(values)
    return found


def _perplexity(nll: Sequence[np.ndarray]) -> str:
    return number(stats.perplexity(nll) if sum(map(len, nll)) else None)


def _difference(run: Scored, base: Scored) -> stats.Difference:
    """Over the tokens that both have scored: one of them may have read less of the texts."""
    both = common({"ours": run, "base": base})
    return stats.paired_difference(both["ours"], both["base"])


def positions(scored: Mapping[str, Scored], base: str) -> Table:
    """Perplexity by position: of ``base``, and every other arm relative to it.

    An arm is compared over the tokens of a bin that it and ``base`` have scored, at least half.
    """
    longest = max(len(values) + 1 for run in scored.values() for values in run.nll)
    rows = []
    for begin, end in stats.position_bins(longest):
        part = slice(max(begin - 1, 0), end - 1)
        here = {
            label: replace(run, nll=[values[part] for values in run.nll])
            for label, run in scored.items()
        }
        if not here[base].num_tokens:
            continue
        row = {"tokens": f"{begin:,} - {end:,}"}
        for label, run in here.items():
            both = common({"ours": run, "base": here[base]})
            ours, theirs = (np.concatenate(values) for values in both.values())
            if label == base:
                row[label] = _perplexity(run.scored)
            elif 2 * len(ours) >= here[base].num_tokens:
                row[label] = f"{np.expm1(ours.mean() - theirs.mean()):+.2%}"
            else:
                row[label] = "-"
        rows.append(row)
    note = (
        f"`{base}`: perplexity; the others: relative to it, over the tokens that both have scored "
        "(-: less than half)."
    )
    return Table.of("Perplexity by position in the text", rows, note)


def sizes(held: Mapping[str, Mapping[str, Any]]) -> Table:
    """What a request holds, by arm: ``kv_cache_dtype``, ``pages``, ``bytes``."""
    rows = [
        {
            "policy": label,
            "--kv-cache-dtype": size["kv_cache_dtype"],
            "pages": f"{size['pages']:,}",
            "KiB": f"{size['bytes'] / 1024:,.0f}",
        }
        for label, size in held.items()
    ]
    note = "At most, over all layers, with all that a page holds beside keys and values."
    return Table.of("What a request holds", rows, note)


def numbers(scored: Mapping[str, Scored], arms: Mapping[str, Any]) -> dict[str, Any]:
    """For the JSON: settings and counters of every arm."""
    return {
        label: {
            "policy": {"name": arms[label].name, **arms[label].model_dump()}
            if label in arms
            else None,
            "tokens": run.num_tokens,
            "perplexity": stats.perplexity(run.scored),
            "seconds": run.seconds,
            "counters": run.counters,
            "pages_peak": run.pages_peak,
        }
        for label, run in scored.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    args = parse_args(argv)
    settle(args)
    from vllm_cascade.policies.registry import resolve

    streams = texts.load(
        args.data,
        load_tokenizer(args.model),
        args.protocol,
        documents=args.documents,
        num_tokens=args.tokens,
        ranks=args.length_ranks,
    )
    plan = jobs(args, streams)
    found = results.run_arms(scoring.run, plan, args)
    scored, failed = found.done, found.failed
    arms = {job.label: resolve(job.engine.policy) for job in plan if job.engine.policy}
    tables = [overall(scored, arms, args.base, args.capacity, failed)]
    if args.base in scored:
        tables.append(positions(scored, args.base))
    data = numbers(scored, arms)
    if held := request_sizes(args, plan):
        tables.append(sizes(held))
        for label, size in held.items():
            data.setdefault(label, {})["request"] = size
    results.finish(args, argv, tables, data, failed)


if __name__ == "__main__":
    main()
