# SPDX-License-Identifier: Apache-2.0
"""A paper's table with a column of ours: ``python -m benchmarks.papers TABLE``.

Every table is a JSON file in ``benchmarks/inputs/papers``: rows with the paper's values and our arm
for each, the text, the cache sizes, and how a cell is measured. ``--list`` shows them. Without
``--data`` and ``--budgets`` the shipped model reads the shipped book at small sizes, which proves
every row in minutes. ``--paper-sizes`` takes the paper's text and sizes, for a real ``--model``.
"""

import argparse
import json
import math
import re
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.inputs import texts
from benchmarks.reporting import results, stats
from benchmarks.reporting.tables import Table, mean_std, number
from benchmarks.running import arms, engines, parts, scoring
from benchmarks.running.answers import Asking, Prompt, as_tokens, ask
from benchmarks.running.engines import BOOK, MODEL, EngineSettings
from benchmarks.running.environment import ROOT

RECOMPUTED = "recomputed window"
"""An arm: stock attention recomputed over a sliding window. The papers say vanilla or full."""
FAILED = "failed"
ROUGE = ("rouge1", "rouge2", "rougeL")
SUMMARISE = "{document}\n\nSummary:"
SUMMARY_TOKENS = 64
TIMES = {"TTFT ms": 1, "TPOT ms": 2, "tok/s": 1, "run s": 2}
"""Columns of a timed stream, and their digits."""
Cell = tuple[int, int]
"""A row, and a column of ours."""
Filled = tuple[Table, dict[str, Any], dict[str, str]]
"""A table with our column, the data for the JSON, and why arms have no result."""


@dataclass(frozen=True)
class Row:
    """A row of a paper's table.

    Attributes:
        paper: the values it prints, one a column; ``-`` for none.
        arm: a policy without its budget, ``RECOMPUTED``, or None for a method that is not ours.
    """

    name: str
    paper: tuple[str, ...]
    arm: dict[str, Any] | str | None


@dataclass(frozen=True)
class PaperTable:
    """A paper's table.

    Attributes:
        measure: a key of ``MEASURES``.
        text: the paper's text, a name for ``--data``.
        budgets, small_budgets: the paper's cache sizes, and those for the shipped model.
        columns: the paper's columns.
        cell: of ROUGE: ``rouge1``, ``mean`` (geometric) or ``against the first row``.
        budgets_in: of ROUGE: ``tokens``, or ``%`` of the median prompt.
    """

    key: str
    title: str
    measure: str
    text: str
    budgets: list[int]
    small_budgets: list[int]
    columns: list[str]
    rows: tuple[Row, ...]
    note: str = ""
    cell: str = "mean"
    budgets_in: str = "tokens"

    @classmethod
    def read(cls, path: Path) -> "PaperTable":
        content = json.loads(path.read_text("utf-8"))
        rows = tuple(Row(row["name"], tuple(row["paper"]), row["arm"]) for row in content["rows"])
        return cls(path.stem, **{**content, "rows": rows})


TABLES = {
    path.stem: PaperTable.read(path)
    for path in sorted((ROOT / "benchmarks/inputs/papers").glob("*.json"))
}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = results.parser_of("papers", __doc__, engines=True)
    add = parser.add_argument
    add("table", nargs="*", help=", ".join(TABLES))
    add("--list", action="store_true", help="show the tables and end")
    add("--model", default=str(MODEL))
    add("--data", nargs="+", help="as in benchmarks.perplexity; ROUGE: xsum or a .jsonl file")
    add("--budgets", type=int, nargs="+", help="columns of ours")
    add("--paper-sizes", action="store_true", help="the paper's text and budgets")
    add("--tokens", type=int, default=6000, help="cut texts here; 0: not at all")
    add("--stride", type=int, default=64, help="prompt tokens between evictions")
    add("--reference-stride", type=int, default=32, help="of recomputed windows")
    add("--samples", type=int, default=8, help="ROUGE: documents")
    add("--limit", type=int, help="harness: documents a task")
    add("--trials", type=int, default=3, help="timed streams: trials after a warm-up")
    add("--prompt", type=int, default=1024, help="timed streams: prompt tokens")
    add("--new-tokens", type=int, default=64, help="timed streams: tokens generated")
    args = parser.parse_args(argv)
    wrong = [key for key in args.table if key not in TABLES]
    if wrong or not (args.table or args.list):
        parser.error(f"choose from {', '.join(TABLES)}" + (f", not {wrong[0]}" if wrong else ""))
    return args


# --- arms ---------------------------------------------------------------------------------------


def settings_at(arm: Mapping[str, Any], budget: int, stride: int) -> dict[str, Any] | None:
    """A policy's settings at a budget; None if the policy has no budget that small.

    Three keys follow from the budget: ``ema_gamma`` >= 1 is the base of the paper's formula,
    ``ratio`` is BUZZ's T / w, and ``share`` is DGC's global part.

    Raises:
        KVPolicyError: an unknown policy.
    """
    from vllm_cascade.policies.registry import policy_class

    chosen = {**arm, "prefill_stride": stride}
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
        chosen["global_size"] = max(round(Fraction(share) * budget), 1)
    return chosen


def plan_of(
    table: PaperTable, budgets: Sequence[int], stride: int
) -> dict[Cell, dict[str, Any] | None]:
    """Settings of the cells that can be run; None: a recomputed window."""
    made: dict[Cell, dict[str, Any] | None] = {}
    for (index, row), (column, budget) in product(enumerate(table.rows), enumerate(budgets)):
        if row.arm == RECOMPUTED:
            made[index, column] = None
        elif isinstance(row.arm, dict) and (chosen := settings_at(row.arm, budget, stride)):
            made[index, column] = chosen
    return made


def policies_of(
    table: PaperTable, budgets: Sequence[int], stride: int
) -> dict[Cell, dict[str, Any]]:
    """The same without recomputed windows."""
    return {cell: policy for cell, policy in plan_of(table, budgets, stride).items() if policy}


def budgets_of(table: PaperTable, args: argparse.Namespace) -> list[int]:
    """Columns of ours."""
    return args.budgets or (table.budgets if args.paper_sizes else table.small_budgets)


def with_ours(
    table: PaperTable, ours: Sequence[str], cells: Mapping[Cell, str], extra: str = ""
) -> Table:
    """The paper's rows and columns, and then our columns."""
    rows = tuple(
        (row.name, *row.paper, *(cells.get((index, column), "-") for column in range(len(ours))))
        for index, row in enumerate(table.rows)
    )
    heads = ("", *(f"paper: {name}" for name in table.columns), *(f"ours: {name}" for name in ours))
    return Table(table.title, heads, rows, " ".join(filter(None, [table.note, extra])))


# --- perplexity ---------------------------------------------------------------------------------


def streams_of(table: PaperTable, args: argparse.Namespace) -> list[texts.Stream]:
    """The text of a perplexity table or of timed streams."""
    sources = args.data or ([table.text] if args.paper_sizes else [str(BOOK)])
    ranks = "19:44" if "pg19" in sources else None
    tokenizer = engines.load_tokenizer(args.model)
    return texts.load(sources, tokenizer, num_tokens=args.tokens or None, ranks=ranks)


def engine_for(
    args: argparse.Namespace, longest: int, policy: dict[str, Any] | None, budget: int = 0
) -> tuple[EngineSettings, int | None]:
    """A policy's engine; or one that recomputes windows of a budget and sinks, and their size."""
    engine = EngineSettings(
        model=args.model,
        policy=policy,
        dtype=args.dtype,
        max_model_len=longest,
        max_num_batched_tokens=max(1024, args.stride),
        # Else a trial would start from what an earlier one has read of the same prompt.
        arguments={"enable_prefix_caching": False},
    )
    if policy is not None:
        return engine, None
    native = engines.native_positions(args.model)
    window = min(budget + 4, native - 1)
    return replace(engine, max_model_len=min(window + 1, native), max_num_seqs=8), window


def perplexity(table: PaperTable, args: argparse.Namespace) -> Filled:
    """Streaming perplexity of every row at every budget; rows with equal settings share a run."""
    streams, budgets = streams_of(table, args), budgets_of(table, args)
    longest = max(len(stream.token_ids) for stream in streams) + 2
    jobs: dict[str, scoring.Job] = {}
    label_of = {}
    for cell, policy in plan_of(table, budgets, args.stride).items():
        engine, window = engine_for(args, longest, policy, budgets[cell[1]])
        label = label_of[cell] = str(policy or window)
        jobs[label] = scoring.Job(label, engine, tuple(streams), window, args.reference_stride)
    outcome = results.run_arms(scoring.run, list(jobs.values()), args)
    found = {label: stats.perplexity(run.scored) for label, run in outcome.done.items()}
    cells = {c: number(found[lb], 3) if lb in found else FAILED for c, lb in label_of.items()}
    tokens = sum(int(stream.scored.sum()) for stream in streams)
    ours = [f"{results.name_of(args.model)}, {budget:,}" for budget in budgets]
    extra = f"Ours: {tokens:,} tokens, prefill stride {args.stride}."
    return with_ours(table, ours, cells, extra), {"perplexity": found}, outcome.failed


# --- ROUGE --------------------------------------------------------------------------------------


Example = tuple[str, str]
"""A prompt, and the summary that its answer is compared with."""


def examples_of(data: str | None, samples: int) -> list[Example]:
    """Documents and their summaries: a data set's, a ``.jsonl`` file's or the book's passages.

    A passage's next 250 characters stand in for a summary, which proves the path, not a model.

    Raises:
        FileNotFoundError: no such file.
    """
    if data is None:
        text, size = re.sub(r"\s+", " ", next(iter(texts.read(str(BOOK)).values()))), 2800
        starts = np.linspace(0, len(text) - size - 400, samples).astype(int).tolist()
        pairs = [(text[s : s + size], text[s + size : s + size + 250]) for s in starts]
    else:
        if data == "xsum":
            rows = texts.load_dataset("EdinburghNLP/xsum", None, "validation", samples)
        else:
            rows = [json.loads(line) for line in Path(data).read_text("utf-8").splitlines() if line]
        pairs = [(row["document"], row["summary"]) for row in rows[:samples]]
    return [(SUMMARISE.format(document=document), summary) for document, summary in pairs]


def rouge_scores(answers: Sequence[str], examples: Sequence[Example]) -> dict[str, float]:
    """Mean F measures, in percent, and the geometric mean of the three (BUZZ's "mean ROUGE")."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(ROUGE, use_stemmer=True)
    pairs = zip(answers, examples, strict=True)
    scores = [scorer.score(summary, answer) for answer, (_, summary) in pairs]
    means = {kind: 100 * float(np.mean([s[kind].fmeasure for s in scores])) for kind in ROUGE}
    return {**means, "mean": float(np.prod(list(means.values())) ** (1 / len(means)))}


def rouge(table: PaperTable, args: argparse.Namespace) -> Filled:
    """ROUGE of summaries under every row."""
    data = args.data[0] if args.data else (table.text if args.paper_sizes else None)
    examples, tokenizer = examples_of(data, args.samples), engines.load_tokenizer(args.model)
    tokens = [as_tokens(tokenizer, prompt, chat=False) for prompt, _ in examples]
    prompts = tuple(Prompt(one, SUMMARY_TOKENS) for one in tokens)
    median = int(np.median([len(one) for one in tokens]))
    given, budgets = budgets_of(table, args), budgets_of(table, args)
    if table.budgets_in == "%":
        budgets = [max(share * median // 100, 1) for share in given]
    plan = policies_of(table, budgets, args.stride)
    longest = max(map(len, tokens)) + SUMMARY_TOKENS
    of = {
        str(policy): replace(engine_for(args, longest, policy)[0], max_num_seqs=16)
        for policy in plan.values()
    }
    jobs = [Asking(label, engine, prompts) for label, engine in of.items()]
    outcome = results.run_arms(ask, jobs, args)
    score = {label: rouge_scores(found, examples) for label, found in outcome.done.items()}
    first = score.get(str(plan.get((0, 0))), {}).get("mean")

    def shown(label: str) -> str:
        if label not in score or (table.cell not in score[label] and not first):
            return FAILED
        if table.cell in score[label]:
            return number(score[label][table.cell])
        return f"{score[label]['mean'] / first - 1:+.0%}"

    cells = {cell: shown(str(policy)) for cell, policy in plan.items()}
    ours = [f"{results.name_of(args.model)}, {budget} {table.budgets_in}" for budget in given]
    extra = f"Ours: {len(examples)} documents, median prompt {median:,} tokens."
    if table.cell != "rouge1":
        extra += " No common pair of words at all (ROUGE-2 of 0) makes the geometric mean 0."
    return with_ours(table, ours, cells, extra), {"rouge": score}, outcome.failed


# --- the harness --------------------------------------------------------------------------------


def accuracy(table: PaperTable, args: argparse.Namespace) -> Filled:
    """A task's accuracy, from lm-evaluation-harness."""
    suite = table.text if args.paper_sizes else "book"
    options = ["--suite", suite, "--model", args.model, "--dtype", args.dtype]
    own = harness.parse_args(options + (["--limit", str(args.limit)] if args.limit else []))
    task = "book_cloze" if suite == "book" else own.tasks[0]
    own.tasks, own.policies = [task], ["sink"]
    (template, *_) = harness.evaluations(own)
    budgets = budgets_of(table, args)
    plan = policies_of(table, budgets, args.stride)
    jobs = [
        replace(template, label=str(cell), engine=replace(template.engine, policy=policy))
        for cell, policy in plan.items()
    ]
    outcome = results.run_arms(harness.evaluate, jobs, args)
    cells = dict.fromkeys(plan, FAILED)
    for cell in plan:
        if str(cell) in outcome.done:
            value, error = harness.metrics(outcome.done[str(cell)][task])["acc"]
            cells[cell] = number(100 * value) + (f" ± {100 * error:.2f}" if error else "")
    ours = [f"{results.name_of(args.model)}, {task}, {budget:,}" for budget in budgets]
    return with_ours(table, ours, cells), {"results": outcome.done}, outcome.failed


# --- timed streams ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pace(arms.EngineJob):
    """A timed stream, in the lazy-pruning paper's protocol: a warm-up pass, then trials.

    Attributes:
        text: scored once; its first ``prompt`` tokens are each trial's prompt.
        window: not None: no cache, this many tokens are read again for every new one.
        stride: of the recomputed window, for perplexity.
    """

    text: texts.Stream = field(repr=False)
    prompt: int
    new_tokens: int
    trials: int
    window: int | None
    stride: int

    @property
    def keys(self) -> list[str]:
        return [parts.digest_of_tokens(self.text.token_ids)]

    def determines(self) -> dict[str, Any]:
        asked = {key: getattr(self, key) for key in ("prompt", "new_tokens", "trials", "window")}
        return {**super().determines(), **asked, "window_stride": self.stride}

    def result(self, values: list[dict[str, Any]]) -> dict[str, Any]:
        return values[0]


def run_paced(job: Pace) -> dict[str, Any]:
    """A timed stream, in this (child) process: a list a time, with an entry a trial."""
    return arms.fill(job, lambda places: ({place: _pace(job)} for place in places))


def _pace(job: Pace) -> dict[str, Any]:
    import torch

    llm = job.engine.start()
    scored = scoring.run_on(
        llm, scoring.Job(job.label, job.engine, (job.text,), job.window, job.stride)
    )
    trials = [np.asarray(_token_seconds(llm, job)) for _ in range(1 + job.trials)][1:]
    values = [
        [float(of(times)) for times in trials]
        for of in (
            lambda times: 1e3 * times[0],
            lambda times: 1e3 * times[1:].mean(),
            lambda times: len(times) / times.sum(),
            np.sum,
        )
    ]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**20
    nll = float(scored.scored[0].mean())
    return {**dict(zip(TIMES, values, strict=True)), "peak MiB": peak, "nll": nll}


def _token_seconds(llm: Any, job: Pace) -> list[float]:
    """Seconds to each token from the one before; with a window, each from a fresh pass over it."""
    from benchmarks.running.stream import read_together

    tokens, read = job.text.token_ids[: job.prompt], partial(read_together, llm, label=job.label)
    if job.window is None:
        found = read([tokens], max_new_tokens=job.new_tokens, scored=False)
        return [found.seconds, *found.token_seconds]
    times = []
    for _ in range(job.new_tokens):
        found = read([tokens[-job.window :]], scored=False)
        times.append(found.seconds)
        tokens = tokens + found.written
    return times


def timing(table: PaperTable, args: argparse.Namespace) -> Filled:
    """A timed stream for every row, one after the other."""
    (stream, *_), (budget, *_) = streams_of(table, args), budgets_of(table, args)
    longest = len(stream.token_ids) + args.new_tokens + 2
    plan, jobs = plan_of(table, [budget], args.stride), []
    for (index, _), policy in plan.items():
        engine, window = engine_for(args, longest, policy, budget)
        sizes = (args.prompt, args.new_tokens, args.trials, window, args.reference_stride)
        jobs.append(Pace(table.rows[index].name, engine, stream, *sizes))
    outcome = results.run_arms(run_paced, jobs, args, at_a_time=1)
    cells = {}
    for index, _ in plan:
        paced = outcome.done.get(table.rows[index].name)
        row = [FAILED]
        if paced is not None:
            row = [mean_std(paced[name], digits) for name, digits in TIMES.items()]
            row += [number(paced["peak MiB"], 0), number(math.exp(paced["nll"]), 3)]
        cells |= {(index, column): cell for column, cell in enumerate(row)}
    extra = (
        f"Ours: {results.name_of(args.model)}, budget {budget:,}, prompt {args.prompt:,}, "
        f"{args.new_tokens} tokens generated, {args.trials} trials after a warm-up: mean ± "
        "standard deviation. Same budget, not same peak: lazy rows cache up to R - 1 tokens more."
    )
    return with_ours(table, [*TIMES, "peak MiB", "perplexity"], cells, extra), {}, outcome.failed


MEASURES = {
    "perplexity": perplexity,
    "rouge": rouge,
    "harness": accuracy,
    "timing": timing,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Fill some tables."""
    args = parse_args(argv)
    if args.list:
        for table in TABLES.values():
            print(f"{table.key}: {table.title} [{table.measure}]")
            print("\n".join(f"    {row.name}: {row.arm or 'not ours'}" for row in table.rows))
        return
    engines.settle(args)
    from benchmarks.running import controls

    controls.register()
    made, data, failed = [], {}, {}
    for key in args.table:
        table, data[key], broken = MEASURES[TABLES[key].measure](TABLES[key], args)
        made.append(table)
        failed |= {f"{key}, {label}": reason for label, reason in broken.items()}
    results.finish(args, argv, made, data, failed)


if __name__ == "__main__":
    main()
