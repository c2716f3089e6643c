# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness under every policy: ``python -m benchmarks.harness``.

Its ``vllm`` model takes ``additional_config`` like any other argument of ``vllm.LLM``, so nothing
of the harness is changed. ``--suite`` names the papers' settings; ``--tasks`` any tasks. The suite
``book`` is local and needs no network. See ``benchmarks/inputs/lm_eval.md``.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from benchmarks.perplexity import add_policy_arguments, policies
from benchmarks.reporting import results
from benchmarks.reporting.tables import Table, failure_rows, number
from benchmarks.running import arms
from benchmarks.running.engines import EngineSettings, native_positions, quiet, settle_dtype
from benchmarks.running.environment import ROOT
from benchmarks.running.parts import Arm

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
    "ruler": {"tasks": ["ruler"], "capacity": 2052, "metadata": {"max_seq_lengths": [4096, 16384]}},
    "gsm8k": {"tasks": ["gsm8k"], "num_fewshot": 5, "capacity": 516},
}
"""Tasks and sizes. LongBench and MMLU STEM: as in the cascade paper, |C| and four sinks."""

Results = dict[str, dict[str, Any]]
"""The harness's own, by task; a group of tasks has its parts beside it."""


@dataclass(frozen=True)
class Evaluation:
    """One engine's share: what a child process needs to know.

    Attributes:
        arm: where a task's results are kept; None: nowhere.
    """

    label: str
    engine: EngineSettings
    tasks: tuple[str, ...]
    num_fewshot: int | None
    limit: int | None
    chat: bool
    metadata: dict[str, Any] = field(default_factory=dict)
    arm: Arm | None = None

    @property
    def keys(self) -> list[str]:
        """A task is finished as a whole."""
        return list(self.tasks)

    def determines(self) -> dict[str, Any]:
        asked = {key: getattr(self, key) for key in ("num_fewshot", "limit", "chat", "metadata")}
        longest = {"max_model_len": self.engine.max_model_len}  # where texts are cut
        return {**self.engine.determines(), **asked, **longest, "lm_eval": version("lm_eval")}

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
    args = parser.parse_args(argv)
    suite = {"num_fewshot": None, "stride": 256, "policy_config": {}, "metadata": {}}
    for key, value in {**suite, **SUITES[args.suite]}.items():
        if getattr(args, key, None) is None:
            setattr(args, key, value)
    return args


def evaluations(args: argparse.Namespace) -> list[Evaluation]:
    """One a policy, and stock vLLM with as many tokens as the model has positions."""
    native = native_positions(args.model)
    longest = args.max_model_len or 8 * native
    shared = {
        "model": args.model,
        "dtype": args.dtype,
        "max_num_seqs": 16,
        "max_num_batched_tokens": max(2048, args.stride),
    }
    engines: dict[str, EngineSettings] = {
        name: EngineSettings(policy=policy, max_model_len=longest, **shared)
        for name, policy in policies(args, args.stride).items()
    }
    if not args.no_full:
        engines["full"] = EngineSettings(max_model_len=min(longest, native), **shared)
    return [
        Evaluation(
            label, engine, tuple(args.tasks), args.num_fewshot, args.limit, args.chat, args.metadata
        )
        for label, engine in engines.items()
    ]


def evaluate(job: Evaluation) -> Results:
    """One engine's results by task, in this (child) process."""
    quiet()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
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
    return {
        key.split(",")[0]: (float(value), _error(found, key))
        for key, value in found.items()
        if isinstance(value, int | float) and "_stderr" not in key and "," in key
    }


def _error(found: dict[str, Any], key: str) -> float | None:
    name, _, suffix = key.partition(",")
    value = found.get(f"{name}_stderr,{suffix}")
    return float(value) if isinstance(value, int | float) else None


def table(
    results_by_arm: Mapping[str, Results], capacity: int, failed: Mapping[str, str] | None = None
) -> Table:
    """A row an arm, a column a task's metric; arms that failed say why."""
    columns = [
        (task, name)
        for task, found in next(iter(results_by_arm.values()), {}).items()
        for name in metrics(found)
    ]
    rows = []
    for arm, by_task in results_by_arm.items():
        cells = []
        for task, name in columns:
            value, error = metrics(by_task[task])[name]
            cells.append(number(value, 4) + (f" ± {error:.4f}" if error else ""))
        rows.append((arm, *cells))
    heads = ("policy", *(f"{task} {name}" for task, name in columns))
    heads = heads if len(heads) > 1 else ("policy", "result")
    return Table(
        "lm-evaluation-harness",
        heads,
        (*rows, *failure_rows(failed or {}, len(heads))),
        f"At most {capacity:,} tokens cached, sinks included; ± is the harness's standard error. "
        "`full` is stock vLLM, whose texts end where the model's positions do.",
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate."""
    args = parse_args(argv)
    quiet()
    args.dtype = settle_dtype(args.dtype, args.model)
    found = arms.run_all(evaluate, evaluations(args), args.engines, results.parts_of(args))
    data = {"results": found.done, **results.failures(found.failed)}
    tables = [table(found.done, args.capacity, found.failed)]
    results.save(args.out, tables, data, vars(args), argv)
    results.end(found.failed)


if __name__ == "__main__":
    main()
