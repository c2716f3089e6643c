# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness under every policy: ``python -m benchmarks.harness``.

Its ``vllm`` model takes ``additional_config`` like any other argument of ``vllm.LLM``, so nothing
of the harness is changed. ``--suite`` names the papers' settings; ``--tasks`` any tasks. The suite
``book`` is local and needs no network. See ``benchmarks/inputs/lm_eval.md``.

``--suite ruler`` asks ``vllm serve`` instead: full attention, and policies that attend to a part of
each length, without and with recall. It needs no network either (``benchmarks/inputs/ruler.py``).
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.inputs import ruler
from benchmarks.perplexity import FULL, add_policy_arguments, engines, with_policy
from benchmarks.reporting import results, stats
from benchmarks.reporting.tables import Table, number
from benchmarks.running import arms
from benchmarks.running.answers import Asking, Prompt, as_tokens, ask
from benchmarks.running.engines import (
    BOOK,
    EngineSettings,
    load_tokenizer,
    native_positions,
    settle,
)
from benchmarks.running.environment import ROOT
from benchmarks.running.scoring import equal_policy

TASKS = ROOT / "benchmarks/inputs/tasks"
SUITES: dict[str, dict[str, Any]] = {
    "book": {"tasks": ["book_cloze", "book_stream"], "capacity": 260, "stride": 64},
    "longbench": {"tasks": ["longbench"], "capacity": 2052},
    "mmlu-stem": {
        "tasks": ["mmlu_stem"],
        "num_fewshot": 20,
        "capacity": 1028,
        "policy_config": {"cascade": {"num_subcaches": 2}},
    },
    "ruler": {"tasks": list(ruler.ANSWER_TOKENS), "limit": 20},
    "gsm8k": {"tasks": ["gsm8k"], "num_fewshot": 5, "capacity": 516},
}
"""Tasks and sizes. LongBench and MMLU STEM: as in the cascade paper, |C| and four sinks."""

Results = dict[str, dict[str, Any]]
"""The harness's own, by task; a group of tasks has its parts beside it."""


@dataclass(frozen=True)
class Evaluation(arms.EngineJob):
    """One engine's share: what a child process needs to know."""

    tasks: tuple[str, ...]
    num_fewshot: int | None
    limit: int | None
    chat: bool
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        """A task is finished as a whole."""
        return list(self.tasks)

    def determines(self) -> dict[str, Any]:
        asked = {key: getattr(self, key) for key in ("num_fewshot", "limit", "chat", "metadata")}
        longest = {"max_model_len": self.engine.max_model_len}  # where texts are cut
        return {**super().determines(), **asked, **longest, "lm_eval": version("lm_eval")}

    def result(self, values: list[Results]) -> Results:
        return {name: metrics for found in values for name, metrics in found.items()}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options; a suite's values are defaults that any flag replaces."""
    parser = results.parser_of("harness", __doc__, engines=True)
    add_policy_arguments(parser, capacity=None, stride=None)
    add = parser.add_argument
    add("--suite", choices=SUITES, default="book")
    add("--tasks", nargs="+", help="of the harness, instead of a suite")
    add("--num-fewshot", type=int)
    add("--limit", type=int, help="documents a task")
    add("--max-model-len", type=int, help="default: 8 times the model's positions")
    add("--no-full", action="store_true", help="leave stock attention out")
    add("--chat", action="store_true", help="use the model's chat template")
    only = parser.add_argument_group("only for --suite ruler").add_argument
    only("--lengths", type=int, nargs="+", help="tokens of a prompt with its answer (default: "
         "4096, 8192, and twice the model's positions)")  # fmt: skip
    only("--attended", type=int, nargs="+", default=[4, 8, 16], help="parts of a length that a "
         "policy attends to: 4 is a quarter")  # fmt: skip
    only(
        "--recall", type=int, nargs="*", default=[4, 8, 16, 32], help="recalled units, an arm each"
    )
    only("--haystack", type=Path, default=BOOK, help="a novel as a text file")
    only("--seed", type=int, default=ruler.SEED, help="of the documents")
    args = parser.parse_args(argv)
    suite = {"num_fewshot": None, "stride": 256, "policy_config": {}, "metadata": {}}
    for key, value in {**suite, **SUITES[args.suite]}.items():
        if getattr(args, key, None) is None:
            setattr(args, key, value)
    return args


def evaluations(args: argparse.Namespace) -> list[Evaluation]:
    """One a policy, and stock vLLM with as many tokens as the model has positions."""
    longest = args.max_model_len or 8 * native_positions(args.model)
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": max(2048, args.stride)}
    return [
        Evaluation(
            label, engine, tuple(args.tasks), args.num_fewshot, args.limit, args.chat, args.metadata
        )
        for label, engine in engines(args, longest, not args.no_full, **sizes).items()
    ]


def evaluate(job: Evaluation) -> Results:
    """One engine's results by task, in this (child) process."""
    from lm_eval.models.vllm_causallms import VLLM

    arguments = job.engine.llm_arguments()
    arguments["pretrained"] = arguments.pop("model")
    model = VLLM(**arguments, batch_size="auto")
    return arms.fill(
        job, lambda places: ({place: _task(model, job, job.tasks[place])} for place in places)
    )


def _task(model: Any, job: Evaluation, task: str) -> Results:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    found = simple_evaluate(
        model=model,
        tasks=[task],
        num_fewshot=job.num_fewshot,
        limit=job.limit,
        task_manager=TaskManager(include_path=str(TASKS), metadata=job.metadata or None),
        apply_chat_template=job.chat,
        bootstrap_iters=1000,
        log_samples=False,
        metadata={"pretrained": job.engine.model, **job.metadata},
    )
    return {task: dict(metrics) for task, metrics in found["results"].items()}


def metrics(found: dict[str, Any]) -> dict[str, tuple[float, float | None]]:
    """Value and standard error by metric, out of the harness's flat mapping."""
    numbers = {key: float(x) for key, x in found.items() if isinstance(x, int | float)}
    names = [key.split(",") for key in numbers if "," in key and "_stderr" not in key]
    return {
        name: (numbers[f"{name},{filter_}"], numbers.get(f"{name}_stderr,{filter_}"))
        for name, filter_ in names
    }


def table(
    results_by_arm: Mapping[str, Results], capacity: int, failed: Mapping[str, str] | None = None
) -> Table:
    """A row an arm, a column a task's metric; arms that failed say why."""
    rows = []
    for arm, by_task in results_by_arm.items():
        row = {"policy": arm}
        for task, found in by_task.items():
            for name, (value, error) in metrics(found).items():
                row[f"{task} {name}"] = number(value, 4) + (f" ± {error:.4f}" if error else "")
        rows.append(row)
    note = (
        f"At most {capacity:,} tokens cached, sinks included; ± is the harness's standard error. "
        "`full` is stock vLLM, whose texts end where the model's positions do."
    )
    return Table.of("lm-evaluation-harness", rows, note, failed)


# --- RULER --------------------------------------------------------------------------------------

RULER_POLICIES = ("sink", "cascade")
RECALLED = {"name": "sink", "unit": 16, "num_sinks": 16}
"""The policy of the arms with recall."""


@dataclass(frozen=True)
class Share:
    """An arm at a length: what it is in the table, and what it is asked.

    Attributes:
        attended: tokens.
        job: for the server; its prompts are those of ``documents``, in their order.
    """

    policy: str
    length: int
    attended: int
    documents: tuple[ruler.Document, ...] = field(repr=False)
    job: Asking = field(repr=False)

    def scores(self, answers: Sequence[str]) -> dict[str, np.ndarray]:
        """Scores in percent by task, a number a document."""
        found: dict[str, list[float]] = {}
        for one, answer in zip(self.documents, answers, strict=True):
            found.setdefault(one.task, []).append(100 * ruler.score(answer, one.answers))
        return {task: np.asarray(values) for task, values in found.items()}

    def prompt_tokens(self) -> dict[str, float]:
        """Mean tokens of a prompt by task."""
        found: dict[str, list[int]] = {}
        for one in self.documents:
            found.setdefault(one.task, []).append(len(one.prompt))
        return {task: round(float(np.mean(sizes)), 1) for task, sizes in found.items()}


AMPLE = 1 << 18
"""Attended tokens that are enough for any arm: one that fails with so many is wrong in itself."""


def ruler_settings(args: argparse.Namespace, capacity: int) -> dict[str, dict[str, Any]]:
    """Settings by arm, of those that fit ``capacity`` attended tokens.

    Raises:
        KVPolicyError: no such policy, or a setting that is wrong at any capacity.
    """
    from vllm_cascade import KVPolicyError

    named = args.arms
    if named is None:
        named = {
            name: {"name": name, "recall": 0, "num_sinks": args.num_sinks}
            | args.policy_config.get(name, {})
            for name in args.policies or RULER_POLICIES
        }
        named |= {f"sink, recall {units}": {**RECALLED, "recall": units} for units in args.recall}
    found = {}
    for label, settings in named.items():
        settings = {key: value for key, value in settings.items() if key != "kv_cache_dtype"}
        settings = {"capacity": capacity, "prefill_stride": args.stride, **settings}
        try:
            found[label] = equal_policy(**settings)
        except KVPolicyError as error:
            if settings["capacity"] != capacity:  # the arm's own
                raise
            equal_policy(**{**settings, "capacity": AMPLE})
            print(f"{label} with {capacity:,} attended tokens is left out: {error}", flush=True)
    return found


def shares(args: argparse.Namespace) -> list[Share]:
    """Every arm at every length; full attention as far as the model has positions."""
    tokenizer, native = load_tokenizer(args.model), native_positions(args.model)
    novel = args.haystack.read_text("utf-8")
    made = []
    for length in args.lengths or sorted({4096, 8192, 2 * native}):
        asked = tuple(
            one
            for task in args.tasks
            for one in ruler.documents(
                task,
                length,
                args.limit,
                tokenizer,
                lambda text, answer: as_tokens(tokenizer, text, args.chat, answer),
                novel,
                args.seed,
            )
        )
        prompts = tuple(Prompt(one.prompt, one.max_tokens) for one in asked)
        engine = EngineSettings(
            model=args.model,
            dtype=args.dtype,
            max_model_len=length,
            max_num_seqs=8,
            max_num_batched_tokens=max(2048, args.stride),
            arguments={"enable_prefix_caching": False},  # no document begins like another
        )
        some: dict[tuple[str, int], EngineSettings] = {}
        if length <= native and not args.no_full:
            some[FULL, length] = engine
        for part in args.attended:
            for label, policy in ruler_settings(args, length // part).items():
                attended = (args.arms or {}).get(label, {}).get("capacity", length // part)
                some[label, attended] = with_policy(args, engine, label, policy)
        for (label, attended), one in some.items():
            name = f"{label}, {attended:,} of {length:,}"
            job = Asking(name, one, prompts, served=True)
            made.append(Share(label, length, attended, asked, job))
    return made


def ruler_table(
    found: Sequence[tuple[Share, dict[str, np.ndarray]]], failed: Mapping[str, str]
) -> tuple[Table, dict[str, Any]]:
    """A row an arm and length, and the same numbers for the JSON.

    Args:
        found: scores in percent by task.
    """
    full = {share.length: scores for share, scores in found if share.policy == FULL}
    rows, data = [], {}
    for share, scores in found:
        mean, of_full = stats.mean_of_groups(list(scores.values())), None
        if share.length in full and share.policy != FULL:
            base = list(full[share.length].values())
            of_full = stats.mean_of_groups(list(scores.values()), base)
        by_task = {task: float(values.mean()) for task, values in scores.items()}
        rows.append(
            {
                "policy": share.policy,
                "tokens": f"{share.length:,}",
                "attended": f"{share.attended:,}",
                **{task: number(score, 0) for task, score in by_task.items()},
                "mean (95 % interval)": _with_interval(mean),
                "of full's mean": "-" if of_full is None else _with_interval(of_full, 100, " %"),
            }
        )
        data[share.job.label] = {
            "policy": share.job.engine.policy,
            "length": share.length,
            "attended": share.attended,
            "documents": {task: len(values) for task, values in scores.items()},
            "prompt_tokens": share.prompt_tokens(),
            "scores": by_task,
            "mean": _plain(mean),
            "share_of_full": None if of_full is None else _plain(of_full),
        }
    documents = len(next(iter(found[0][1].values()))) if found else 0
    note = (
        "Percent of the expected strings that an answer contains, by RULER's rule; "
        f"{documents} documents a task and length. "
        "Intervals: bootstrap of the documents of each task; against full attention in pairs."
    )
    return Table.of("RULER", rows, note, failed), data


def _with_interval(found: tuple[float, float, float], times: float = 1, unit: str = "") -> str:
    value, low, high = (times * one for one in found)
    if not isfinite(value):
        return "-"
    return f"{value:.1f}{unit}" + (f" ({low:.1f} to {high:.1f})" if isfinite(low) else "")


def _plain(found: tuple[float, float, float]) -> list[float | None]:
    return [round(value, 4) if isfinite(value) else None for value in found]


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate; RULER's documents go through servers."""
    args = parse_args(argv)
    settle(args)
    if args.suite != "ruler":
        found = results.run_arms(evaluate, evaluations(args), args)
        made, data = table(found.done, args.capacity, found.failed), {"results": found.done}
    else:
        plan = shares(args)
        found = results.run_arms(ask, [share.job for share in plan], args)
        labelled = ((share, found.done.get(share.job.label)) for share in plan)
        done = [(share, share.scores(answers)) for share, answers in labelled if answers]
        made, data = ruler_table(done, found.failed)
    results.finish(args, argv, [made], data, found.failed)


if __name__ == "__main__":
    main()
