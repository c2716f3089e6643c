# SPDX-License-Identifier: Apache-2.0
"""What a right answer costs, by policy: ``python -m benchmarks.needles``.

RULER's prompts with needles (``benchmarks/inputs/ruler.py``) are read, and the right answer is
dictated, a token a step, as if the model had written it. A policy that has lost the needle, or does
not bring it back in time, expects other tokens. Nats a token tell policies apart with fewer prompts
than answers that are right or wrong, and long answers show what happens while one is written.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from benchmarks.inputs import ruler
from benchmarks.perplexity import FULL, add_policy_arguments, engines
from benchmarks.reporting import results, stats
from benchmarks.reporting.tables import Table, number
from benchmarks.running import arms, parts
from benchmarks.running.answers import as_tokens
from benchmarks.running.engines import BOOK, load_tokenizer, settle

TOGETHER = 4
"""Prompts at a time in an engine."""


@dataclass(frozen=True)
class Dictation:
    """A prompt's tokens, and those of the right answer."""

    task: str
    prompt: tuple[int, ...] = field(repr=False)
    answer: tuple[int, ...] = field(repr=False)


class Dictated(AdapterLogitsProcessor):
    """Leaves one token possible at each step: the request's argument ``dictated`` has them all."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        answer = (params.extra_args or {}).get("dictated")
        if answer is None:
            return None

        def only(written: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
            token = answer[len(written)]
            value = logits[token].item()
            logits.fill_(-torch.inf)
            logits[token] = value
            return logits

        return only


@dataclass(frozen=True)
class Telling(arms.EngineJob):
    """All dictations for one engine."""

    dictations: tuple[Dictation, ...] = field(repr=False)

    @property
    def keys(self) -> list[str]:
        return [parts.digest_of_tokens((*one.prompt, *one.answer)) for one in self.dictations]


def tell(job: Telling) -> list[list[float]]:
    """Nats of each answer's tokens before they were dictated, in this (child) process."""

    def work(places: list[int]) -> Iterator[dict[int, list[float]]]:
        engine = job.engine.start().llm_engine
        for place in places:
            one = job.dictations[place]
            params = SamplingParams(
                max_tokens=len(one.answer),
                temperature=0,
                ignore_eos=True,
                logprobs=0,  # of the token itself, before the processor
                extra_args={"dictated": list(one.answer)},
            )
            engine.add_request(str(place), {"prompt_token_ids": list(one.prompt)}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    place, told = int(output.request_id), output.outputs[0]
                    assert tuple(told.token_ids) == job.dictations[place].answer
                    each = zip(told.token_ids, told.logprobs, strict=True)
                    yield {place: [-found[token].logprob for token, found in each]}

    return arms.fill(job, work)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = results.parser_of("needles", __doc__, engines=True)
    add_policy_arguments(parser, capacity=512, stride=256)
    add = parser.add_argument
    add("--length", type=int, default=4096, help="tokens of a prompt, with room for an answer")
    add("--tasks", nargs="+", default=list(ruler.NEEDLES), choices=ruler.NEEDLES)
    add("--limit", type=int, default=10, help="prompts a task")
    add("--chat", action="store_true", help="use the model's chat template")
    add("--haystack", type=Path, default=BOOK, help="a novel as a text file")
    return parser.parse_args(argv)


def dictations(args: argparse.Namespace, tokenizer: Any) -> list[Dictation]:
    """Prompts of all tasks, which end where the answer begins."""
    novel, made = args.haystack.read_text("utf-8"), []
    for task in args.tasks:
        for one in ruler.documents(
            task,
            args.length,
            args.limit,
            tokenizer,
            lambda text, answer: as_tokens(tokenizer, text, args.chat, answer),
            novel,
        ):
            answer = f" {', '.join(one.answers)}."
            tokens = tokenizer(answer, add_special_tokens=False)["input_ids"]
            made.append(Dictation(task, one.prompt, tuple(tokens)))
    return made


def table(
    told: Mapping[str, Sequence[Sequence[float]]],
    tasks: Sequence[str],
    args: argparse.Namespace,
    failed: Mapping[str, str],
) -> Table:
    """A row an arm, a column a task.

    Args:
        told: by arm, each prompt's nats.
        tasks: of the prompts.
    """
    means = {arm: np.asarray([np.mean(nats) for nats in of]) for arm, of in told.items()}
    rows = []
    for arm, values in means.items():
        by_task = {t: values[[task == t for task in tasks]].mean() for t in dict.fromkeys(tasks)}
        row = {"policy": arm} | {task: number(value, 3) for task, value in by_task.items()}
        row["all"], more = number(float(values.mean()), 3), "-"
        if args.base in means and arm != args.base:
            pairs = ([[value] for value in of] for of in (values, means[args.base]))
            more = str(stats.paired_difference(*pairs, block=1))
        rows.append(row | {f"more than {args.base} (95 % interval)": more})
    note = (
        f"Nats a token of the right answer, dictated; mean of {args.limit} prompts a task of "
        f"{args.length:,} tokens. At most {args.capacity:,} tokens attended; {FULL}: all. "
        "Intervals: bootstrap over prompts, in pairs."
    )
    return Table.of("Right answers", rows, note, failed)


def main(argv: Sequence[str] | None = None) -> None:
    """Dictate to every arm."""
    args = parse_args(argv)
    settle(args)
    made = tuple(dictations(args, load_tokenizer(args.model)))
    dictating = {"logits_processors": ["benchmarks.needles:Dictated"]}
    jobs = []
    for name, engine in engines(args, args.length + 1, max_num_seqs=TOGETHER).items():
        arguments = {**engine.arguments, **dictating, "enable_prefix_caching": False}
        jobs.append(Telling(name, replace(engine, arguments=arguments), made))
    found = results.run_arms(tell, jobs, args)
    tasks = [one.task for one in made]
    data = {
        arm: [[task, *(round(x, 4) for x in nats)] for task, nats in zip(tasks, of, strict=True)]
        for arm, of in found.done.items()
    }
    results.finish(args, argv, [table(found.done, tasks, args, found.failed)], data, found.failed)


if __name__ == "__main__":
    main()
