# SPDX-License-Identifier: Apache-2.0
"""A paper's table with a column of ours: ``python -m benchmarks.ablations TABLE``.

``--list`` shows the tables. Without ``--data`` and ``--budgets`` the shipped model reads the
shipped book at sizes that suit it, which fills the column in minutes and proves every row's
setting; ``--paper-sizes`` takes the paper's own text and cache sizes, for a real ``--model``.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from benchmarks import caching, generation, harness
from benchmarks.inputs import texts
from benchmarks.reporting import results, stats
from benchmarks.reporting.papers import NOT_OURS, RECOMPUTED, TABLES, PaperTable, Row
from benchmarks.reporting.tables import Table, mean_std, number
from benchmarks.running import pacing, scoring
from benchmarks.running.arms import run_all as run_arms
from benchmarks.running.engines import (
    BOOK,
    MODEL,
    EngineSettings,
    load_tokenizer,
    native_positions,
    quiet,
    settle_dtype,
)

SMALL_BUDGETS = {"perplexity": [256], "harness": [256], "timing": [256], "caching": [1024]}
SMALL_ROUGE = {"buzz-a": [200]}
NOT_HERE = "-"
FAILED = "failed"
Filled = tuple[Table, dict[str, Any], dict[str, str]]
"""A table with our column, everything for the JSON, and why arms have no result."""
TIMES = (
    ("TTFT ms", "ttft_ms", 1),
    ("TPOT ms", "tpot_ms", 2),
    ("tok/s", "tokens_per_second", 1),
    ("run s", "seconds", 2),
)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ablations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("table", nargs="*", help=", ".join(TABLES))
    parser.add_argument("--list", action="store_true", help="show the tables and end")
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--data", nargs="+", help="as in benchmarks.perplexity (or .generation)")
    parser.add_argument("--budgets", type=int, nargs="+", help="columns of ours")
    parser.add_argument("--paper-sizes", action="store_true", help="the paper's text and budgets")
    parser.add_argument("--tokens", type=int, default=6000, help="cut texts here; 0: not at all")
    parser.add_argument("--stride", type=int, default=64, help="prompt tokens between evictions")
    parser.add_argument("--reference-stride", type=int, default=32, help="of recomputed windows")
    parser.add_argument("--samples", type=int, default=8, help="ROUGE: documents")
    parser.add_argument("--limit", type=int, help="harness: documents a task")
    parser.add_argument(
        "--trials", type=int, default=3, help="timed streams: trials after a warm-up"
    )
    parser.add_argument("--prompt", type=int, default=1024, help="timed: prompt tokens")
    parser.add_argument(
        "--new-tokens", type=int, default=64, help="timed streams: tokens generated"
    )
    results.add_engine_arguments(parser)
    results.add_arguments(parser, "ablations")
    args = parser.parse_args(argv)
    wrong = [key for key in args.table if key not in TABLES]
    if wrong or not (args.table or args.list):
        parser.error(f"choose from {', '.join(TABLES)}" + (f", not {wrong[0]}" if wrong else ""))
    return args


# --- settings -----------------------------------------------------------------------------------


def settings_at(policy: Mapping[str, Any], budget: int, stride: int) -> dict[str, Any] | None:
    """A row's settings at a budget; None where the policy has no budget that small.

    Three keys follow from the budget: ``ema_gamma`` >= 1 is the base of the paper's formula,
    ``ratio`` is BUZZ's T / w, and ``share`` is DGC's global part.

    Raises:
        KVPolicyError: a policy that this version does not have.
    """
    from vllm_cascade.policies.registry import policy_class

    chosen = {**policy, "prefill_stride": stride}
    step = policy_class(chosen["name"]).budget_step(chosen)
    budget = budget // step * step
    if budget < 1:
        return None
    chosen["budget"] = budget
    base = chosen.get("ema_gamma")
    if base is not None and base >= 1:
        window = budget // chosen.get("num_subcaches", 4)
        chosen["ema_gamma"] = math.exp(-math.log(base) / window)
    if (ratio := chosen.pop("ratio", None)) is not None:
        chosen["window"] = max(int(budget / (1 + ratio)), 1)
        chosen["threshold"] = budget - chosen["window"]
    if (share := chosen.pop("share", None)) is not None:
        chosen["global_size"] = max(round(share * budget), 1)
    return chosen


def arms(
    table: PaperTable, budgets: Sequence[int], stride: int
) -> dict[tuple[int, int], dict[str, Any] | None]:
    """(row, budget) -> settings (None: recomputed), for the cells that can be run."""
    from vllm_cascade.policies.registry import POLICIES

    made: dict[tuple[int, int], dict[str, Any] | None] = {}
    for index, row in enumerate(table.rows):
        if row.policy == NOT_OURS:
            continue
        for column, budget in enumerate(budgets):
            if row.policy == RECOMPUTED:
                made[index, column] = None
            elif row.policy["name"] in POLICIES:
                chosen = settings_at(row.policy, budget, stride)
                if chosen is not None:
                    made[index, column] = chosen
    return made


def budgets_of(table: PaperTable, args: argparse.Namespace) -> list[int]:
    """Columns of ours."""
    if args.budgets:
        return args.budgets
    if args.paper_sizes:
        return list(table.budgets)
    if table.measure == "rouge":
        return SMALL_ROUGE.get(table.key, [40, 10] if table.key == "buzz-2" else [40])
    return SMALL_BUDGETS[table.measure]


def with_ours(
    table: PaperTable,
    ours: Sequence[str],
    cells: Mapping[tuple[int, int], str],
    extra: str = "",
) -> Table:
    """The paper's rows and columns, and then our columns."""
    rows = tuple(
        (
            row.name,
            *row.paper,
            *(cells.get((index, column), NOT_HERE) for column in range(len(ours))),
        )
        for index, row in enumerate(table.rows)
    )
    note = " ".join(filter(None, [table.note, extra]))
    return Table(table.title, ("", *(f"paper: {c}" for c in table.columns), *ours), rows, note)


# --- measures -----------------------------------------------------------------------------------


def streams_of(table: PaperTable, args: argparse.Namespace) -> list[texts.Stream]:
    """The text of a perplexity or timed table."""
    sources = args.data or ([table.data] if args.paper_sizes else [str(BOOK)])
    documents: dict[str, str] = {}
    protocol = "books"
    for source in sources:
        source, protocol = texts.DATASETS.get(source, (source, "books"))
        documents |= texts.read(source)
    ranks = slice(19, 44) if "pg19" in sources else None
    tokenizer = load_tokenizer(args.model)
    return texts.streams(
        documents,
        lambda text: tokenizer(text)["input_ids"],
        protocol,
        num_tokens=args.tokens or None,
        ranks=ranks,
    )


def engine_of(args: argparse.Namespace, longest: int) -> EngineSettings:
    """What all engines of a table share."""
    return EngineSettings(
        model=args.model,
        dtype=args.dtype,
        max_model_len=longest,
        max_num_batched_tokens=max(1024, args.stride),
        arguments={"use_tqdm_on_load": False},
    )


def engine_for(
    engine: EngineSettings, policy: dict[str, Any] | None, window: int, native: int
) -> EngineSettings:
    """A policy's engine, or the one that recomputes windows."""
    if policy is not None:
        return replace(engine, policy=policy)
    # A window that a trial has read before must be read again, too.
    uncached = {**engine.arguments, "enable_prefix_caching": False}
    longest = min(window + 1, native)
    return replace(engine, max_model_len=longest, max_num_seqs=8, arguments=uncached)


def perplexity(table: PaperTable, args: argparse.Namespace) -> Filled:
    """Streaming perplexity of every row at every budget."""
    streams = streams_of(table, args)
    budgets = budgets_of(table, args)
    native = native_positions(args.model)
    engine = engine_of(args, max(len(stream.token_ids) for stream in streams) + 2)
    plan = arms(table, budgets, args.stride)
    jobs: dict[str, scoring.Job] = {}
    label_of = {}
    for cell, policy in plan.items():
        window = None if policy else min(budgets[cell[1]] + 4, native - 1)
        label = label_of[cell] = str(policy or window)  # rows with equal settings share a run
        own = engine_for(engine, policy, window or 0, native)
        jobs[label] = scoring.Job(label, own, tuple(streams), window, args.reference_stride)
    outcome = scoring.run_all(list(jobs.values()), args.engines, results.parts_of(args))
    found = {label: stats.perplexity(run.scored) for label, run in outcome.done.items()}
    cells = {
        cell: number(found[label], 3) if label in found else FAILED
        for cell, label in label_of.items()
    }
    tokens = sum(int(stream.scored.sum()) for stream in streams)
    ours = [f"ours: {results.name_of(args.model)}, {budget:,}" for budget in budgets]
    extra = f"Ours: {tokens:,} tokens, prefill stride {args.stride}."
    return with_ours(table, ours, cells, extra), {"perplexity": found}, outcome.failed


def rouge(table: PaperTable, args: argparse.Namespace) -> Filled:
    """ROUGE of every row; budgets are percent of the median prompt, except in Table A."""
    data = args.data[0] if args.data else (table.data if args.paper_sizes else None)
    examples = generation.to_summarise(data, args.samples)
    tokenizer = load_tokenizer(args.model)
    median = int(np.median([len(tokenizer(e.prompt)["input_ids"]) for e in examples]))
    given = budgets_of(table, args)
    in_tokens = table.key == "buzz-a"
    budgets = given if in_tokens else [max(share * median // 100, 1) for share in given]
    plan = {cell: policy for cell, policy in arms(table, budgets, args.stride).items() if policy}
    args.max_tokens, args.chat = 64, False
    by_label = {str(policy): policy for policy in plan.values()}
    outcome = generation.answers_of(by_label, examples, args)
    score = {label: generation.rouge(found, examples) for label, found in outcome.done.items()}
    label_of = {cell: str(policy) for cell, policy in plan.items()}
    kind = "rouge1" if in_tokens else "mean"
    cells = {c: number(score[lb][kind]) if lb in score else FAILED for c, lb in label_of.items()}
    if table.key == "buzz-8":
        zero = score.get(label_of[0, 0], {}).get("mean")
        cells = {
            c: f"{score[lb]['mean'] / zero - 1:+.0%}" if zero and lb in score else FAILED
            for c, lb in label_of.items()
        }
    size = "tokens" if in_tokens else "%"
    ours = [f"ours: {results.name_of(args.model)}, {budget} {size}" for budget in given]
    extra = f"Ours: {len(examples)} documents, median prompt {median:,} tokens."
    if not in_tokens:
        extra += " No common pair of words at all (ROUGE-2 of 0) makes the geometric mean 0."
    return with_ours(table, ours, cells, extra), {"rouge": score}, outcome.failed


def harness_scores(table: PaperTable, args: argparse.Namespace) -> Filled:
    """A task's accuracy, from lm-evaluation-harness."""
    suite = table.data if args.paper_sizes else "book"
    options = ["--suite", suite, "--model", args.model, "--dtype", args.dtype]
    if args.limit:
        options += ["--limit", str(args.limit)]
    own = harness.parse_args(options)
    task = "book_cloze" if suite == "book" else own.tasks[0]
    own.tasks, own.policies = [task], ["sink"]
    (template, *_) = harness.evaluations(own)
    budgets = budgets_of(table, args)
    plan = {cell: policy for cell, policy in arms(table, budgets, args.stride).items() if policy}
    jobs = [
        replace(template, label=str(cell), engine=replace(template.engine, policy=policy))
        for cell, policy in plan.items()
    ]
    outcome = run_arms(harness.evaluate, jobs, args.engines, results.parts_of(args))
    cells = dict.fromkeys(plan, FAILED)
    for cell in plan:
        if str(cell) in outcome.done:
            value, error = harness.metrics(outcome.done[str(cell)][task])["acc"]
            cells[cell] = number(100 * value) + (f" ± {100 * error:.2f}" if error else "")
    ours = [f"ours: {results.name_of(args.model)}, {task}, {budget:,}" for budget in budgets]
    return with_ours(table, ours, cells), {"results": outcome.done}, outcome.failed


def operation(table: PaperTable, args: argparse.Namespace) -> Filled:
    """The caching operation at the paper's sizes."""
    sizes = caching.Sizes(budget=budgets_of(table, args)[0])
    taken = {row.name: caching.measure(caching.ROWS[row.name], sizes) for row in table.rows}
    cells = {
        (index, column): mean_std(taken[row.name][column])
        for index, row in enumerate(table.rows)
        for column in range(2)
    }
    ours = ["ours: operation", "ours: a whole layer's step"]
    extra = f"Ours: {sizes.steps} steps, mean ± standard deviation; see benchmarks/caching.py."
    return with_ours(table, ours, cells, extra), {"milliseconds": taken}, {}


def timing(table: PaperTable, args: argparse.Namespace) -> Filled:
    """A timed stream a row: mean and standard deviation over the trials."""
    (stream, *_) = streams_of(table, args)
    (budget, *_) = budgets_of(table, args)
    native = native_positions(args.model)
    engine = engine_of(args, len(stream.token_ids) + args.new_tokens + 2)
    plan = arms(table, [budget], args.stride)
    jobs = []
    for (index, _), policy in plan.items():
        window = None if policy else min(budget + 4, native - 1)
        jobs.append(
            pacing.Pace(
                table.rows[index].name,
                engine_for(engine, policy, window or 0, native),
                stream,
                args.prompt,
                args.new_tokens,
                args.trials,
                window,
                args.reference_stride,
            )
        )
    # One at a time: these are timings.
    outcome = run_arms(pacing.run, jobs, 1, results.parts_of(args))
    cells = {}
    for index, _ in plan:
        paced = outcome.done.get(table.rows[index].name)
        if paced is None:
            cells[index, 0] = FAILED
            continue
        row = [mean_std(getattr(paced, key), digits) for _, key, digits in TIMES]
        row += [number(paced.peak_memory_mib, 0), number(math.exp(paced.nll), 3)]
        cells |= {(index, column): cell for column, cell in enumerate(row)}
    ours = [f"ours: {name}" for name, _, _ in TIMES] + ["ours: peak MiB", "ours: perplexity"]
    extra = (
        f"Ours: {results.name_of(args.model)}, budget {budget:,}, prompt {args.prompt:,}, "
        f"{args.new_tokens} tokens generated, {args.trials} trials after a warm-up: mean ± "
        "standard deviation. Same budget, not same peak: lazy rows cache up to R - 1 tokens more."
    )
    data = {label: asdict(paced) for label, paced in outcome.done.items()}
    return with_ours(table, ours, cells, extra), data, outcome.failed


MEASURES = {
    "perplexity": perplexity,
    "rouge": rouge,
    "harness": harness_scores,
    "caching": operation,
    "timing": timing,
}


def row_names(row: Row) -> str:
    """A row's settings, for ``--list``."""
    return row.policy if isinstance(row.policy, str) else str(dict(row.policy))


def main(argv: Sequence[str] | None = None) -> None:
    """Fill some tables."""
    args = parse_args(argv)
    if args.list:
        for table in TABLES.values():
            print(f"{table.key}: {table.title} [{table.measure}]")
            for row in table.rows:
                print(f"    {row.name}: {row_names(row)}")
        return
    quiet()
    args.dtype = settle_dtype(args.dtype, args.model)
    from benchmarks.running import controls

    controls.register()
    made, data, failed = [], {}, {}
    for key in args.table:
        table, data[key], broken = MEASURES[TABLES[key].measure](TABLES[key], args)
        made.append(table)
        data[key] |= results.failures(broken)
        failed |= {f"{key}, {label}": reason for label, reason in broken.items()}
    results.save(args.out, made, data, vars(args), argv)
    results.end(failed)


if __name__ == "__main__":
    main()
