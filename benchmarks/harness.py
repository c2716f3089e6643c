# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness under every policy: ``python -m benchmarks.harness``.

Its ``vllm`` model takes ``additional_config`` like any other argument of ``vllm.LLM``, so nothing
of the harness is changed. ``--suite`` names the papers' settings; ``--tasks`` any tasks. The suite
``book`` is local and needs no network. See ``benchmarks/inputs/lm_eval.md``.
"""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.perplexity import policies
from benchmarks.reporting import results
from benchmarks.reporting.tables import Table, number
from benchmarks.running.engines import MODEL, EngineSettings, in_children, native_positions, quiet
from benchmarks.running.environment import ROOT

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


@dataclass(frozen=True)
class Evaluation:
    """One engine's share: what a child process needs to know."""

    label: str
    engine: EngineSettings
    tasks: tuple[str, ...]
    num_fewshot: int | None
    limit: int | None
    chat: bool
    metadata: dict[str, Any] = field(default_factory=dict)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options; a suite's values are defaults that any flag replaces."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.harness",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--suite", choices=SUITES, default="book")
    parser.add_argument("--tasks", nargs="+", help="of the harness, instead of a suite")
    parser.add_argument("--num-fewshot", type=int)
    parser.add_argument("--limit", type=int, help="documents a task")
    parser.add_argument("--capacity", type=int, help="most tokens cached, sinks included")
    parser.add_argument("--num-sinks", type=int, default=4)
    parser.add_argument("--stride", type=int, help="prompt tokens between evictions (default: 256)")
    parser.add_argument("--policies", nargs="+", help="default: all, and the random control")
    parser.add_argument("--policy-config", type=json.loads, help="settings by policy name, JSON")
    parser.add_argument("--base", default="sink")
    parser.add_argument("--max-model-len", type=int, help="default: 8 times the model's positions")
    parser.add_argument("--no-full", action="store_true", help="leave stock attention out")
    parser.add_argument("--chat", action="store_true", help="use the model's chat template")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--engines", type=int, default=1, help="engines at a time")
    results.add_arguments(parser, "harness")
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
        "memory_bytes": 256 << 20 if args.dtype == "float32" else None,
    }
    arms: dict[str, EngineSettings] = {
        name: EngineSettings(policy=policy, max_model_len=longest, **shared)
        for name, policy in policies(args, args.stride).items()
    }
    if not args.no_full:
        arms["full"] = EngineSettings(max_model_len=min(longest, native), **shared)
    return [
        Evaluation(
            label, engine, tuple(args.tasks), args.num_fewshot, args.limit, args.chat, args.metadata
        )
        for label, engine in arms.items()
    ]


def evaluate(job: Evaluation) -> dict[str, dict[str, Any]]:
    """The harness's own results of one engine, by task, in this (child) process."""
    quiet()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from benchmarks.running import controls

    controls.register()
    arguments = job.engine.llm_arguments()
    arguments["pretrained"] = arguments.pop("model")
    found = simple_evaluate(
        model="vllm",
        model_args={**arguments, "batch_size": "auto"},
        tasks=list(job.tasks),
        num_fewshot=job.num_fewshot,
        limit=job.limit,
        task_manager=TaskManager(include_path=str(TASKS), metadata=job.metadata or None),
        apply_chat_template=job.chat,
        bootstrap_iters=1000,
        log_samples=False,
        metadata={"pretrained": arguments["pretrained"], **job.metadata},
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


def table(results_by_arm: dict[str, dict[str, dict[str, Any]]], capacity: int) -> Table:
    """A row an arm, a column a task's metric."""
    columns = [
        (task, name)
        for task, found in next(iter(results_by_arm.values())).items()
        for name in metrics(found)
    ]
    rows = []
    for arm, by_task in results_by_arm.items():
        cells = []
        for task, name in columns:
            value, error = metrics(by_task[task])[name]
            cells.append(number(value, 4) + (f" ± {error:.4f}" if error else ""))
        rows.append((arm, *cells))
    return Table(
        "lm-evaluation-harness",
        ("policy", *(f"{task} {name}" for task, name in columns)),
        tuple(rows),
        f"At most {capacity:,} tokens cached, sinks included; ± is the harness's standard error. "
        "`full` is stock vLLM, whose texts end where the model's positions do.",
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate."""
    args = parse_args(argv)
    quiet()
    jobs = evaluations(args)
    found = in_children(evaluate, jobs, args.engines)
    by_arm = {job.label: result for job, result in zip(jobs, found, strict=True)}
    results.save(args.out, [table(by_arm, args.capacity)], {"results": by_arm}, vars(args), argv)


if __name__ == "__main__":
    main()
