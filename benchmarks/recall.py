# SPDX-License-Identifier: Apache-2.0
"""Does a bounded cache still know what it read? ``python -m benchmarks.recall QUESTION``.

``passkey``
    A number hidden at a depth of a long text, asked for at its end; digits of the answer that are
    right. Needs a model that follows such a request (``--model``); lengths to a million tokens.
``associative``
    The same for any model, at the level of tokens: a random key and a random value, a distance
    apart from the key's second occurrence. How many nats a token the value is easier to predict
    than where another value stood. A model that gains nothing even with all tokens in its cache
    cannot do it, and then the benchmark says so.
``rewind``
    The cascade paper's Figure 3: read a text, jump back, read a part again. Perplexity of what is
    read for the second time.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.inputs.texts import Stream, read
from benchmarks.perplexity import policies
from benchmarks.reporting import results, stats
from benchmarks.reporting.tables import Table, number
from benchmarks.running import scoring
from benchmarks.running.engines import (
    BOOK,
    MODEL,
    EngineSettings,
    in_children,
    load_tokenizer,
    native_positions,
    quiet,
)

BATCHED_TOKENS = 1024
WORTH = 0.05
"""Share of a value's loss that must be gained before a model counts as able to recall."""
PASSKEY_DIGITS = 5
NEEDLE = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recall",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("question", choices=("passkey", "associative", "rewind"))
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--data", default=str(BOOK), help="the text around it: a file, hf:...")
    parser.add_argument("--capacity", type=int, default=260, help="most tokens cached, with sinks")
    parser.add_argument("--num-sinks", type=int, default=4)
    parser.add_argument("--stride", type=int, default=64, help="prompt tokens between evictions")
    parser.add_argument("--policies", nargs="+", help="default: all, and the random control")
    parser.add_argument("--base", default="sink", help="policy that differences are to")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048], help="prompt tokens")
    parser.add_argument("--depths", type=float, nargs="+", default=[0.1, 0.5, 0.9])
    parser.add_argument("--samples", type=int, default=10, help="prompts a length and depth")
    parser.add_argument("--pair", type=int, default=8, help="associative: tokens of key and value")
    parser.add_argument("--burn-in", type=int, default=2048, help="rewind: tokens read first")
    parser.add_argument("--back", type=int, default=512, help="rewind: tokens jumped back")
    parser.add_argument("--again", type=int, default=256, help="rewind: tokens read again")
    parser.add_argument("--chat", action="store_true", help="passkey: use the chat template")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--engines", type=int, default=1, help="engines at a time")
    parser.add_argument("--seed", type=int, default=0)
    results.add_arguments(parser, "recall")
    args = parser.parse_args(argv)
    args.policy_config = {}
    if not all(0 <= depth <= 1 for depth in args.depths):
        parser.error("--depths are fractions, 0 to 1")
    if args.back > args.burn_in or args.again > args.back:
        parser.error("rewind needs --again <= --back <= --burn-in")
    return args


def engines(args: argparse.Namespace, longest: int) -> dict[str, EngineSettings]:
    """An engine an arm; stock attention too where the model's positions hold the prompts."""
    native = native_positions(args.model)
    engine = EngineSettings(
        model=args.model,
        dtype=args.dtype,
        max_model_len=longest,
        max_num_seqs=16,
        max_num_batched_tokens=max(BATCHED_TOKENS, args.stride),
        memory_bytes=256 << 20 if args.dtype == "float32" else None,
        arguments={"use_tqdm_on_load": False},
    )
    made = {n: replace(engine, policy=p) for n, p in policies(args, args.stride).items()}
    return {**made, "full": engine} if longest <= native else made


# --- a key and a value --------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """Two prompts that differ in one place: the value that stood after the key's first occurrence.

    Attributes:
        told: the value that is asked for stood there. ``untold``: another one did.
    """

    length: int
    depth: float
    told: Stream
    untold: Stream


def pairs(args: argparse.Namespace, text: Sequence[int], vocab: Sequence[int]) -> list[Pair]:
    """Every length and depth, ``samples`` times, each in another part of the text."""
    rng = np.random.default_rng(args.seed)
    made = []
    for length in args.lengths:
        for depth in args.depths:
            for _ in range(args.samples):
                made.append(_pair(args, rng, text, vocab, length, depth))
    return made


def _pair(
    args: argparse.Namespace,
    rng: np.random.Generator,
    text: Sequence[int],
    vocab: Sequence[int],
    length: int,
    depth: float,
) -> Pair:
    size = args.pair
    room = length - 4 * size
    if room < 1 or room > len(text):
        raise ValueError(f"length {length}: needs {4 * size} to {len(text)} tokens of text")
    begin = int(rng.integers(len(text) - room + 1))
    filler = list(text[begin : begin + room])
    key, value, other = rng.choice(vocab, (3, size), replace=False).tolist()
    place = int(depth * room)
    scored = np.zeros(length - 1, dtype=bool)
    scored[-size:] = True
    told, untold = (
        Stream("pair", [*filler[:place], *key, *first, *filler[place:], *key, *value], scored)
        for first in (value, other)
    )
    return Pair(length, depth, told, untold)


def associative(args: argparse.Namespace) -> tuple[list[Table], dict[str, Any]]:
    """Gain of a value that was told, by policy, length and depth."""
    tokenizer = load_tokenizer(args.model)
    text = tokenizer("\n\n".join(read(args.data).values()))["input_ids"]
    special = set(tokenizer.all_special_ids)
    vocab = [token for token in sorted(set(text)) if token not in special]
    made = pairs(args, text, vocab)
    arms = engines(args, max(args.lengths) + 1)
    both = tuple(stream for pair in made for stream in (pair.told, pair.untold))
    jobs = [scoring.Job(name, engine, both, batched=True) for name, engine in arms.items()]
    scored = scoring.run_all(jobs, args.engines)
    untold = float(np.mean([run.scored[1::2] for run in scored.values()]))
    gains = {
        name: np.asarray([values.mean() for values in run.scored[1::2]])
        - np.asarray([values.mean() for values in run.scored[::2]])
        for name, run in scored.items()
    }
    return [_associative_table(args, made, gains, untold)], {
        "nll_untold": untold,
        "gains": {name: values.tolist() for name, values in gains.items()},
        "length": [pair.length for pair in made],
        "depth": [pair.depth for pair in made],
    }


def _associative_table(
    args: argparse.Namespace, made: Sequence[Pair], gains: dict[str, np.ndarray], untold: float
) -> Table:
    cells = [(length, depth) for length in args.lengths for depth in args.depths]
    rows, able = [], False
    for name, values in gains.items():
        found = [_interval(values[[(p.length, p.depth) == cell for p in made]]) for cell in cells]
        able |= any(one.low > WORTH * untold for one in found)
        rows.append((name, *map(str, found)))
    verdict = (
        "The model recalls values, so the arms can be compared."
        if able
        else f"No arm gains even {WORTH:.0%} of that anywhere: this model cannot do the task, and "
        "the table says nothing about the policies."
    )
    columns = ("policy", *(f"{length:,} tokens, depth {depth:g}" for length, depth in cells))
    note = (
        f"Nats a token that the value is easier to predict, with 95 % intervals; {args.samples} "
        f"prompts a cell. A value that was not told costs {untold:.2f}. {verdict}"
    )
    return Table("Recall of a value by its key", columns, tuple(rows), note)


def _interval(values: np.ndarray) -> stats.Difference:
    return stats.paired_difference([values], [np.zeros_like(values)], block=1)


# --- rewind -------------------------------------------------------------------------------------


def rewound(text: Sequence[int], begin: int, burn_in: int, back: int, again: int) -> Stream:
    """Tokens ``begin .. begin + burn_in - 1``, then ``again`` of them from ``back`` before the end.

    Only those are scored, less the first, whose context is the seam.

    Raises:
        ValueError: a text that is too short.
    """
    if begin + burn_in > len(text):
        raise ValueError(f"the text has {len(text)} tokens, not {begin + burn_in}")
    first = list(text[begin : begin + burn_in])
    start = burn_in - back
    tokens = [*first, *first[start : start + again]]
    scored = np.zeros(len(tokens) - 1, dtype=bool)
    scored[burn_in:] = True
    return Stream("rewind", tokens, scored)


def rewind(args: argparse.Namespace) -> tuple[list[Table], dict[str, Any]]:
    """Perplexity of a text read for the second time, by policy."""
    tokenizer = load_tokenizer(args.model)
    text = tokenizer("\n\n".join(read(args.data).values()))["input_ids"]
    starts = np.linspace(0, len(text) - args.burn_in, args.samples).astype(int).tolist()
    streams = [rewound(text, s, args.burn_in, args.back, args.again) for s in starts]
    once = [_first_reading(stream, args) for stream in streams]
    arms = engines(args, len(streams[0].token_ids) + 1)
    jobs = [scoring.Job(n, e, (*streams, *once), batched=True) for n, e in arms.items()]
    scored = scoring.run_all(jobs, args.engines)
    rows = []
    zero = scored[args.base].scored[: len(streams)]
    for name, run in scored.items():
        second, first = run.scored[: len(streams)], run.scored[len(streams) :]
        gain = stats.paired_difference(second, zero, block=64)
        share = np.exp(gain.mean) - 1
        rows.append(
            (
                name,
                number(stats.perplexity(first)),
                number(stats.perplexity(second)),
                "-" if name == args.base else f"{share:+.1%}",
                "-" if name == args.base else str(gain),
            )
        )
    columns = (
        "policy",
        "first reading",
        "second reading",
        f"against {args.base}",
        "nats a token (95 % interval)",
    )
    note = (
        f"Perplexity of {args.again - 1:,} tokens read again after a jump back of {args.back:,}, "
        f"{args.burn_in:,} tokens into a text; {len(streams)} places. Capacity {args.capacity:,}. "
        "The paper (Llama2-7B, window 1,024, back 2,048) reports 33.1 % less for the cascade."
    )
    data = {
        name: {"texts": [float(values.mean()) for values in run.scored]}
        for name, run in scored.items()
    }
    return [Table("Rewind (cascade paper, Figure 3)", columns, tuple(rows), note)], data


def _first_reading(stream: Stream, args: argparse.Namespace) -> Stream:
    """The same tokens where they stand for the first time."""
    start = args.burn_in - args.back
    tokens = stream.token_ids[: start + args.again]
    scored = np.zeros(len(tokens) - 1, dtype=bool)
    scored[start:] = True
    return Stream("first", tokens, scored)


# --- pass keys ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hidden:
    """A prompt, and the number that is hidden in it."""

    length: int
    depth: float
    key: str
    prompt: str | list[dict[str, str]]


@dataclass(frozen=True)
class Asking:
    """All prompts for one engine."""

    label: str
    engine: EngineSettings
    prompts: tuple[Hidden, ...]
    chat: bool


def hidden(args: argparse.Namespace, tokenizer: Any, text: str) -> list[Hidden]:
    """A number at every length and depth. The filler is the same for all prompts of a length."""
    rng = np.random.default_rng(args.seed)
    tokens = tokenizer(text)["input_ids"]
    made = []
    for length in args.lengths:
        room = length - 64  # for the needle and the question
        repeated = (tokens * (room // len(tokens) + 1))[:room]
        for depth in args.depths:
            place = int(depth * room)
            head, tail = (tokenizer.decode(part) for part in (repeated[:place], repeated[place:]))
            for _ in range(args.samples):
                key = "".join(str(digit) for digit in rng.integers(0, 10, PASSKEY_DIGITS))
                body = head + NEEDLE.format(key=key) + tail + QUESTION
                prompt = [{"role": "user", "content": body}] if args.chat else body
                made.append(Hidden(length, depth, key, prompt))
    return made


def digits_right(answer: str, key: str) -> float:
    """Share of the key's digits that stand at their place among the first ones of the answer."""
    found = [char for char in answer if char.isdigit()][: len(key)]
    return sum(a == b for a, b in zip(found, key, strict=False)) / len(key)


def ask(asking: Asking) -> list[str]:
    """The answers of one engine, in this (child) process."""
    llm = asking.engine.start()
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=24)
    send = llm.chat if asking.chat else llm.generate
    outputs = send([hidden.prompt for hidden in asking.prompts], params)
    return [output.outputs[0].text for output in outputs]


def passkey(args: argparse.Namespace) -> tuple[list[Table], dict[str, Any]]:
    """Digits recalled, by policy, length and depth."""
    tokenizer = load_tokenizer(args.model)
    prompts = tuple(hidden(args, tokenizer, "\n\n".join(read(args.data).values())))
    arms = engines(args, max(args.lengths) + 128)
    jobs = [Asking(name, engine, prompts, args.chat) for name, engine in arms.items()]
    answers = dict(zip(arms, in_children(ask, jobs, args.engines), strict=True))
    cells = [(length, depth) for length in args.lengths for depth in args.depths]
    rows = []
    for name, given in answers.items():
        right = [digits_right(a, p.key) for a, p in zip(given, prompts, strict=True)]
        row = [
            np.mean([r for r, p in zip(right, prompts, strict=True) if (p.length, p.depth) == cell])
            for cell in cells
        ]
        rows.append((name, *(f"{share:.0%}" for share in row)))
    columns = ("policy", *(f"{length:,} tokens, depth {depth:g}" for length, depth in cells))
    note = (
        f"Digits of a {PASSKEY_DIGITS}-digit number that are right; {args.samples} prompts a cell; "
        "guessing gives 10 %."
    )
    data = {"answers": answers, "keys": [prompt.key for prompt in prompts]}
    return [Table("Pass key", columns, tuple(rows), note)], data


def main(argv: Sequence[str] | None = None) -> None:
    """Answer one question."""
    args = parse_args(argv)
    quiet()
    ask_for = {"passkey": passkey, "associative": associative, "rewind": rewind}
    tables, data = ask_for[args.question](args)
    results.save(args.out, tables, data, vars(args), argv)


if __name__ == "__main__":
    main()
