# SPDX-License-Identifier: Apache-2.0
"""Tokens/s with and without n-gram drafts, beside stock: ``python -m benchmarks.speculation``.

Four engines, each in a process of its own, answer the same requests, one at a time: stock vLLM and
a policy, without drafts and with vLLM's ``ngram``. They take their steps in turn, so that whatever
else the machine does hits all of them alike. Greedy answers to edits and quotes repeat their
prompt. Other answers are sampled, since small models repeat themselves in greedy ones. Before every
request stand ``--before`` tokens of a novel, so that the policy evicts. Timed are the steps after
an answer's first token; prompts are not.

A gain in tokens/s has two causes, which a table of its own shows apart: how long a step takes, and
how many tokens it gives. The second depends on what was written, and sampled answers differ between
arms.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf, isfinite
from multiprocessing.connection import Connection
from platform import python_version
from typing import Any

from benchmarks.inputs import asked
from benchmarks.models import best_model
from benchmarks.reporting import results, stats
from benchmarks.reporting.tables import Table, number, table_of_goals, times
from benchmarks.running import engines
from benchmarks.running.answers import as_tokens
from benchmarks.running.children import end_with_parent

STOCK, POLICY, DRAFTS = "stock", "policy", " + ngram"
ARMS = (STOCK, STOCK + DRAFTS, POLICY, POLICY + DRAFTS)
FASTER, NOT_SLOWER = 1.5, 0.97
WARM, SEED = 0.8, 7
"""Temperature of answers that should not repeat, and the seed of all answers."""
REPEATING, OTHER = "text that repeats", "other text"


@dataclass(frozen=True)
class Answer:
    """An answer.

    Attributes:
        seconds: of its engine's steps after its first token.
        steps: the number of these steps.
    """

    tokens: list[int]
    seconds: float
    steps: int


Answers = dict[str, list[tuple[str, Answer]]]
"""By arm: the requests' kinds and answers, in the same order."""


class Arm:
    """An engine in a process of its own, which works only while it is asked.

    Raises:
        EOFError: in any method: the engine's process has ended; it has printed why.
    """

    def __init__(self, settings: engines.EngineSettings) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(settings, theirs))
        self._process.start()
        theirs.close()

    def begin(self, prompt: Sequence[int], most: int, warmth: float) -> None:
        """Read a prompt, to the first token of an answer of at most ``most`` at a temperature."""
        self._pipe.send((list(prompt), most, warmth))
        self._pipe.recv()

    def step(self) -> Answer | None:
        """One step; the answer if it has come to its end."""
        self._pipe.send(None)
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(30)
        self._process.kill()


def serve(settings: engines.EngineSettings, messages: Connection) -> None:
    """In an arm's process: one answer after the other, until the pipe is closed."""
    end_with_parent()
    engine = settings.start().llm_engine
    with suppress(EOFError):
        while True:
            for answer in steps(engine, *messages.recv()):
                messages.send(answer)
                if answer is None:
                    assert messages.recv() is None, "a request is not at its end"


def steps(engine: Any, prompt: list[int], most: int, warmth: float) -> Iterator[Answer | None]:
    """None for the prompt and after every step but the last; then the answer."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=most, temperature=warmth, seed=SEED, detokenize=False)
    engine.add_request("0", {"prompt_token_ids": prompt}, params)
    tokens: list[int] = []
    while not tokens:
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
    yield None
    seconds, num = 0.0, 0
    while engine.has_unfinished_requests():
        begin = time.perf_counter()
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
        seconds, num = seconds + time.perf_counter() - begin, num + 1
        if engine.has_unfinished_requests():
            yield None
    yield Answer(tokens, seconds, num)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = results.parser_of("speculation", __doc__)
    add = parser.add_argument
    add("--model", help="an instruct model (default: SmolLM2-135M-Instruct, where it can be had)")
    add("--policy", default="sink")
    add("--policy-config", type=json.loads, default={}, help="its settings, JSON")
    add("--budget", type=int, default=1024)
    add("--drafts", type=int, default=5, help="num_speculative_tokens")
    add("--match", type=int, default=3, help="prompt_lookup_max, and min")
    add("--before", type=int, default=1500, help="tokens of the novel before a request")
    add("--requests", type=int, default=5, help="of each of the three kinds")
    add("--output-len", type=int, default=128, help="most tokens of an answer")
    add("--dtype", default="auto", help="as of the other commands")
    add("--threads", type=int, default=1)
    add("--compile", action="store_true", help="vLLM's default; else eager")
    args = parser.parse_args(argv)
    if min(args.requests, args.drafts, args.match) < 1 or args.output_len < 2:
        parser.error("--requests, --drafts and --match must be at least 1, --output-len 2")
    return args


def settings(args: argparse.Namespace, model: str, arm: str, longest: int) -> Any:
    """An arm's engine."""
    arguments: dict[str, Any] = {"enforce_eager": not args.compile}
    if arm.endswith(DRAFTS):
        arguments["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": args.drafts,
            "prompt_lookup_max": args.match,
        }
    policy = {"name": args.policy, "budget": args.budget, **args.policy_config}
    return engines.EngineSettings(
        model=model,
        policy=policy if arm.startswith(POLICY) else None,
        dtype=engines.settle_dtype(args.dtype, model),
        max_model_len=longest,
        memory_bytes=1 << 29,
        arguments=arguments,
    )


def prompts(args: argparse.Namespace, model: str) -> list[tuple[str, tuple[int, ...]]]:
    """Kinds of requests and their prompts, kinds in turn."""
    tokenizer = engines.load_tokenizer(model)
    tokens = tokenizer(engines.BOOK.read_text(encoding="utf-8"))["input_ids"]
    before, rest = tokenizer.decode(tokens[: args.before]), tokenizer.decode(tokens[args.before :])
    chat = bool(tokenizer.chat_template)
    by_kind = [asked.requests(kind, args.requests, rest, tokenizer) for kind in asked.KINDS]
    return [
        (one.kind, as_tokens(tokenizer, f"{before}\n\n{one.text}", chat, one.answer))
        for turn in zip(*by_kind, strict=True)
        for one in turn
    ]


def ask(arms: dict[str, Arm], prompt: Sequence[int], most: int, warmth: float) -> dict[str, Answer]:
    """Every arm's answer, all arms step by step."""
    for arm in arms.values():
        arm.begin(prompt, most, warmth)
    found: dict[str, Answer] = {}
    turn = 0
    while len(found) < len(arms):
        for name in [name for name in arms if name not in found][:: 1 if turn % 2 else -1]:
            answer = arms[name].step()
            if answer is not None:
                found[name] = answer
        turn += 1
    return found


def run(args: argparse.Namespace) -> Answers:
    """All answers of all arms."""
    # numba, which finds the n-grams, sets the number of OpenMP's threads for the whole process.
    os.environ["OMP_NUM_THREADS"] = os.environ["NUMBA_NUM_THREADS"] = str(args.threads)
    engines.quiet()
    model = args.model or str(best_model().path)
    todo = prompts(args, model)
    longest = max(len(prompt) for _, prompt in todo) + args.output_len
    arms = {name: Arm(settings(args, model, name, longest)) for name in ARMS}
    try:
        ask(arms, todo[0][1], 16, 0.0)  # warm-up
        found: Answers = {name: [] for name in ARMS}
        for turn, (kind, prompt) in enumerate(todo):
            warmth = 0.0 if kind in asked.REPEATS else WARM
            answers = ask(arms, prompt, args.output_len, warmth)
            for name in ARMS:
                found[name].append((kind, answers[name]))
            last = ", ".join(f"{name} {rate([answers[name]]):.1f}" for name in ARMS)
            print(f"{turn + 1} of {len(todo)}, {kind}: tokens/s {last}", flush=True)
    finally:
        for arm in arms.values():
            arm.close()
    return found


def of_kinds(found: Answers, arm: str, kinds: Sequence[str]) -> list[Answer]:
    return [one for kind, one in found[arm] if kind in kinds]


def rate(answers: Sequence[Answer]) -> float:
    """Tokens a second after the first ones."""
    return sum(len(a.tokens) - 1 for a in answers) / max(sum(a.seconds for a in answers), 1e-9)


def per_step(answers: Sequence[Answer]) -> float:
    return sum(len(a.tokens) - 1 for a in answers) / max(sum(a.steps for a in answers), 1)


def step_ms(answers: Sequence[Answer]) -> tuple[float, float, float]:
    """Milliseconds of a step, with an interval; answers are resampled."""
    some = [one for one in answers if one.steps]
    return stats.ratio([1e3 * one.seconds for one in some], [one.steps for one in some])


def step_tokens(answers: Sequence[Answer]) -> tuple[float, float, float]:
    """Tokens of a step, in the same way."""
    some = [one for one in answers if one.steps]
    return stats.ratio([len(one.tokens) - 1 for one in some], [one.steps for one in some])


def gain(found: Answers, arm: str, kinds: Sequence[str]) -> float:
    """Tokens a second with drafts over those without."""
    return rate(of_kinds(found, arm + DRAFTS, kinds)) / rate(of_kinds(found, arm, kinds))


def same(found: Answers, arm: str) -> int:
    """Greedy answers with drafts that are those without."""
    greedy = (of_kinds(found, name, asked.REPEATS) for name in (arm, arm + DRAFTS))
    return sum(a.tokens == b.tokens for a, b in zip(*greedy, strict=True))


GROUPS: dict[str, Sequence[str]] = {
    "edits of code": ("edit",),
    "quotes": ("quote",),
    REPEATING: asked.REPEATS,
    OTHER: ("other",),
}


def speed_table(found: Answers, args: argparse.Namespace) -> Table:
    """Tokens a second of every arm."""
    rows = []
    for group, kinds in GROUPS.items():
        cells = [group]
        for arm in (STOCK, POLICY):
            plain, drafted = (of_kinds(found, name, kinds) for name in (arm, arm + DRAFTS))
            cells += [number(rate(plain), 1), number(rate(drafted), 1)]
            cells += [times(gain(found, arm, kinds)), number(per_step(drafted))]
        rows.append(tuple(cells))
    with_drafts = ("with ngram", "gain", "tokens a step")
    num = len(of_kinds(found, STOCK, asked.REPEATS))
    return Table(
        f"Tokens/s, {args.drafts} drafts from n-grams of {args.match}",
        ("answers", "stock", *with_drafts, f"{args.policy} {args.budget:,}", *with_drafts),
        tuple(rows),
        f"{args.requests} answers of a kind, of at most {args.output_len} tokens, to prompts with "
        f"{args.before:,} tokens of a novel. Answers that repeat are greedy: with "
        f"drafts, stock gave the same one to {same(found, STOCK)} of {num} prompts, {args.policy} "
        f"to {same(found, POLICY)} (products of several rows round otherwise than those of one). "
        f"Code to edit is from the library of Python {python_version()}; other versions have other "
        "code.",
    )


def step_table(found: Answers, args: argparse.Namespace) -> Table:
    """What a step takes and gives, by group and arm."""
    rows = [
        {
            "answers": f"{group}, {name}",
            "ms a step": _with_interval(step_ms(of_kinds(found, arm, kinds)), 1),
            "ms a step with ngram": _with_interval(
                step_ms(of_kinds(found, arm + DRAFTS, kinds)), 1
            ),
            "tokens a step with ngram": _with_interval(
                step_tokens(of_kinds(found, arm + DRAFTS, kinds)), 2
            ),
        }
        for group, kinds in GROUPS.items()
        for arm, name in ((STOCK, STOCK), (POLICY, args.policy))
    ]
    note = (
        "With 95 % intervals: bootstrap over answers. Without drafts a step gives one token. Other "
        "text is sampled: how many tokens its steps give depends on what an arm has written."
    )
    return Table.of("What a step takes and gives", rows, note)


def _with_interval(found: tuple[float, float, float], digits: int) -> str:
    value, low, high = found
    interval = f" ({low:.{digits}f} to {high:.{digits}f})" if isfinite(low) else ""
    return f"{value:.{digits}f}{interval}"


def goal_table(found: Answers) -> Table:
    """The project's goals."""
    repeats, other = (gain(found, POLICY, GROUPS[group]) for group in (REPEATING, OTHER))
    stock = gain(found, STOCK, GROUPS[REPEATING])
    goals = (
        (f"{REPEATING}: at least {FASTER}x", repeats, FASTER),
        (f"{REPEATING}: at least stock's gain, {stock:.2f}x", repeats, stock),
        (f"{OTHER}: at least {NOT_SLOWER}x", other, NOT_SLOWER),
    )
    return table_of_goals([(goal, x, (least, inf), "{:.2f}x") for goal, x, least in goals])


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    found = run(args)
    data = {
        arm: {kind: {"rate": rate(a), "steps": sum(x.steps for x in a),
                     "tokens": sum(len(x.tokens) - 1 for x in a)}
              for kind in asked.KINDS if (a := of_kinds(found, arm, [kind]))}
        for arm in ARMS
    }  # fmt: skip
    tables = [speed_table(found, args), step_table(found, args), goal_table(found)]
    results.finish(args, argv, tables, data)


if __name__ == "__main__":
    main()
