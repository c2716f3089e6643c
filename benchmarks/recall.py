# SPDX-License-Identifier: Apache-2.0
"""Does a bounded cache still know what it read? ``python -m benchmarks.recall QUESTION``.

``passkey``
    A number hidden at a depth of a long text, asked for at its end; digits of the answer that are
    right, and answers that are. With ``--chat`` the question is the user's turn, which instruct
    models answer; without, the text ends where the answer begins. Lengths to a million tokens.
``associative``
    The same for any model, at the level of tokens: a random key and a random value, a distance
    apart from the key's second occurrence. How many nats a token the value is easier to predict
    than where another value stood.
``rewind``
    The cascade paper's Figure 3: read a text, jump back, read a part again. Perplexity of what is
    read for the second time.

Where full attention cannot do what is asked, the table says so: such a cell compares nothing.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.inputs import pass_keys
from benchmarks.inputs.pass_keys import DIGITS, Hidden, digits_right, is_exact
from benchmarks.inputs.texts import Stream, beginning, read, whole_text
from benchmarks.perplexity import FULL, add_policy_arguments, engines
from benchmarks.reporting import results, stats
from benchmarks.reporting.tables import Table, number
from benchmarks.running import scoring
from benchmarks.running.answers import Asking, Prompt, as_tokens, ask
from benchmarks.running.engines import BOOK, load_tokenizer, settle

TOGETHER = 16
"""Prompts at a time in an engine."""
ANSWER_TOKENS = 24
Cell = tuple[int, float]
Cells = dict[Cell, np.ndarray]

ABLE = 0.5
"""Share of a pass key's digits that full attention must find in a cell, on average."""
WORTH = 0.05
"""Share of a value's loss that must be gained before a model counts as able to recall it."""
UNABLE, UNJUDGED = "†", "‡"
Answer = tuple[list[Table], dict[str, Any], dict[str, str]]
"""Tables, everything for the JSON, and why arms have no result."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = results.parser_of("recall", __doc__, engines=True)
    add_policy_arguments(parser, capacity=260, stride=64)
    add = parser.add_argument
    add("question", choices=("passkey", "associative", "rewind"))
    add("--data", default=str(BOOK), help="the text around it: a file, hf:...")
    add("--lengths", type=int, nargs="+", default=[512, 2048], help="prompt tokens")
    add("--depths", type=float, nargs="+", default=[0.1, 0.5, 0.9])
    add("--samples", type=int, default=10, help="prompts a length and depth")
    add("--pair", type=int, default=8, help="associative: tokens of key and value")
    add("--burn-in", type=int, default=2048, help="rewind: tokens read first")
    add("--back", type=int, default=512, help="rewind: tokens jumped back")
    add("--again", type=int, default=256, help="rewind: tokens read again")
    add("--chat", action="store_true", help="passkey: ask in the user's turn")
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if not all(0 <= depth <= 1 for depth in args.depths):
        parser.error("--depths are fractions, 0 to 1")
    if args.back > args.burn_in or args.again > args.back:
        parser.error("rewind needs --again <= --back <= --burn-in")
    return args


def judged(
    title: str,
    shown: Mapping[str, Mapping[Cell, str]],
    able: Mapping[Cell, bool | None],
    note: str,
    needs: str,
    failed: Mapping[str, str],
) -> Table:
    """A row an arm, a column a cell; those that full attention cannot do compare nothing.

    Args:
        shown: by arm and cell.
        able: whether full attention can do a cell; None: it has no result there.
        needs: what full attention does where it is not able.
    """
    marks = {True: "", False: f" {UNABLE}", None: f" {UNJUDGED}"}
    names = {cell: f"{cell[0]:,} tokens, depth {cell[1]:g}{marks[able[cell]]}" for cell in able}
    rows = [
        {"policy": arm} | {name: by_cell.get(cell, "-") for cell, name in names.items()}
        for arm, by_cell in shown.items()
    ]
    said = []
    if False in able.values():
        if True not in able.values():
            said.append("This model cannot do the task: the table says nothing about the policies.")
        said.append(f"{UNABLE}: full attention itself {needs}, so the cell compares nothing.")
    if None in able.values():
        said.append(f"{UNJUDGED}: not judged, full attention has no result there.")
    verdict = " ".join(said) or "Full attention can do every cell, so the arms can be compared."
    return Table.of(title, rows, f"{note} {verdict}", failed)


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


def pairs(
    args: argparse.Namespace, text: Sequence[int], vocab: Sequence[int], head: Sequence[int] = ()
) -> list[Pair]:
    """Every length and depth, ``samples`` times, each in another part of the text.

    Args:
        head: what the tokenizer puts before any text; it replaces a part's first tokens.

    Raises:
        ValueError: a length with no room for a text, or with more than there is.
    """
    rng, size, made = np.random.default_rng(args.seed), args.pair, []
    for length, depth in cells(args):
        room = length - 4 * size
        if room < 1 or room > len(text):
            raise ValueError(f"length {length}: needs {4 * size} to {len(text)} tokens of text")
        for _ in range(args.samples):
            begin = int(rng.integers(len(text) - room + 1))
            filler = [*head, *text[begin + len(head) : begin + room]]
            key, value, other = rng.choice(vocab, (3, size), replace=False).tolist()
            place = max(int(depth * room), len(head))
            both = (
                [*filler[:place], *key, *first, *filler[place:], *key, *value]
                for first in (value, other)
            )
            made.append(Pair(length, depth, *(_stream("pair", ids, size) for ids in both)))
    return made


def _stream(name: str, tokens: list[int], last: int) -> Stream:
    """A stream of which only the last tokens are scored."""
    return Stream(name, tokens, np.arange(1, len(tokens)) >= len(tokens) - last)


def associative(args: argparse.Namespace) -> Answer:
    """Gain of a value that was told, by policy, length and depth."""
    tokenizer = load_tokenizer(args.model)
    text = whole_text(tokenizer, "\n\n".join(read(args.data).values()))
    special = set(tokenizer.all_special_ids)
    vocab = [token for token in sorted(set(text)) if token not in special]
    made = pairs(args, text, vocab, beginning(tokenizer))
    jobs, of = [], {}
    for name, engine in engines(args, max(args.lengths) + 1, max_num_seqs=TOGETHER).items():
        of[name] = [pair for pair in made if pair.length < (engine.max_model_len or 0)]
        both = tuple(stream for pair in of[name] for stream in (pair.told, pair.untold))
        if both:
            jobs.append(scoring.Job(name, engine, both, group=2 * TOGETHER))
    found = results.run_arms(scoring.run, jobs, args)
    gains, losses = {}, []
    for name, run in found.done.items():
        told, untold = run.scored[::2], run.scored[1::2]
        losses += [values.mean() for values in untold]
        gains[name] = [u.mean() - t.mean() for t, u in zip(told, untold, strict=True)]
    mean = float(np.mean(losses)) if losses else float("nan")
    by_cell = {name: in_cells(of[name], values) for name, values in gains.items()}
    table = associative_table(by_cell, cells(args), mean, args.samples, found.failed)
    return [table], {"nll_untold": mean}, found.failed


def associative_table(
    gains: Mapping[str, Cells],
    cells: Sequence[Cell],
    untold: float,
    samples: int,
    failed: Mapping[str, str],
) -> Table:
    """Nats that a value is easier to predict where it was told.

    Args:
        gains: by arm and cell, a number a prompt.
        untold: nats a token of a value that was not told.
    """
    found = {
        arm: {
            cell: stats.paired_difference([values], [np.zeros_like(values)], block=1)
            for cell, values in by_cell.items()
        }
        for arm, by_cell in gains.items()
    }
    full = found.get(FULL, {})
    able = {cell: full[cell].low > WORTH * untold if cell in full else None for cell in cells}
    shown = {arm: {cell: str(one) for cell, one in of.items()} for arm, of in found.items()}
    note = (
        f"Nats a token that the value is easier to predict, with 95 % intervals; {samples} "
        f"prompts a cell. A value that was not told costs {untold:.2f}."
    )
    needs = f"gains less than {WORTH:.0%} of that"
    return judged("Recall of a value by its key", shown, able, note, needs, failed)


def in_cells(asked: Sequence[Pair] | Sequence[Hidden], values: Sequence[Any]) -> Cells:
    """An array a cell, of what each prompt gave."""
    found: dict[Cell, list[Any]] = {}
    for one, value in zip(asked, values, strict=True):
        found.setdefault((one.length, one.depth), []).append(value)
    return {cell: np.asarray(some) for cell, some in found.items()}


def cells(args: argparse.Namespace) -> list[Cell]:
    """Columns of a table."""
    return [(length, depth) for length in args.lengths for depth in args.depths]


# --- rewind -------------------------------------------------------------------------------------


def rewound(
    text: Sequence[int], begin: int, burn_in: int, back: int, again: int, head: Sequence[int] = ()
) -> Stream:
    """Tokens ``begin .. begin + burn_in - 1``, then ``again`` of them from ``back`` before the end.

    Only those are scored, less the first, whose context is the seam.

    Args:
        head: what the tokenizer puts before any text; it replaces the first tokens.

    Raises:
        ValueError: a text that is too short.
    """
    if begin + burn_in > len(text):
        raise ValueError(f"the text has {len(text)} tokens, not {begin + burn_in}")
    first = [*head, *text[begin + len(head) : begin + burn_in]]
    start = burn_in - back
    return _stream("rewind", [*first, *first[start : start + again]], again - 1)


def rewind(args: argparse.Namespace) -> Answer:
    """Perplexity of a text read for the second time, by policy."""
    tokenizer = load_tokenizer(args.model)
    text, first = whole_text(tokenizer, "\n\n".join(read(args.data).values())), beginning(tokenizer)
    starts = np.linspace(0, len(text) - args.burn_in, args.samples).astype(int).tolist()
    streams = [rewound(text, s, args.burn_in, args.back, args.again, first) for s in starts]
    once = [_first_reading(stream, args) for stream in streams]
    longest = len(streams[0].token_ids) + 2
    jobs = [
        scoring.Job(name, engine, (*streams, *once), group=TOGETHER)
        for name, engine in engines(args, longest, max_num_seqs=TOGETHER).items()
        if engine.max_model_len == longest
    ]
    found = results.run_arms(scoring.run, jobs, args)
    base = found.done.get(args.base)
    rows = []
    for name, run in found.done.items():
        second, first = run.scored[: len(streams)], run.scored[len(streams) :]
        more = ("-", "-")
        if base is not None and name != args.base:
            places = second, base.scored[: len(streams)]
            gain = stats.paired_difference(*places, block=args.again)  # a place as a whole
            more = f"{np.expm1(gain.mean):+.1%}", str(gain)
        rows.append(
            {
                "policy": name,
                "first reading": number(stats.perplexity(first)),
                "second reading": number(stats.perplexity(second)),
                f"against {args.base}": more[0],
                "nats a token (95 % interval)": more[1],
            }
        )
    note = (
        f"Perplexity of {args.again - 1:,} tokens read again after a jump back of {args.back:,}, "
        f"{args.burn_in:,} tokens into a text; {len(streams)} places. Capacity {args.capacity:,}. "
        "Intervals: paired bootstrap over whole places. "
        "The paper (Llama2-7B, window 1,024, back 2,048) reports 33.1 % less for the cascade."
    )
    table = Table.of("Rewind (cascade paper, Figure 3)", rows, note, found.failed)
    return [table], {}, found.failed


def _first_reading(stream: Stream, args: argparse.Namespace) -> Stream:
    """The same tokens where they stand for the first time."""
    end = args.burn_in - args.back + args.again
    return _stream("first", stream.token_ids[:end], args.again - 1)


# --- pass keys ----------------------------------------------------------------------------------


def hidden(args: argparse.Namespace, tokenizer: Any, text: str) -> list[pass_keys.Hidden]:
    """A number at every length and depth."""
    return pass_keys.hide(
        tokenizer,
        text,
        lambda prompt: as_tokens(tokenizer, prompt, args.chat),
        pass_keys.ASKED if args.chat else pass_keys.COMPLETED,
        lengths=args.lengths,
        depths=args.depths,
        samples=args.samples,
        seed=args.seed,
    )


def passkey(args: argparse.Namespace) -> Answer:
    """Digits and answers that are right, by policy, length and depth."""
    made = hidden(args, load_tokenizer(args.model), "\n\n".join(read(args.data).values()))
    jobs, prompts = [], {}
    longest = max(args.lengths) + ANSWER_TOKENS
    for name, engine in engines(args, longest, max_num_seqs=TOGETHER).items():
        most = (engine.max_model_len or 0) - ANSWER_TOKENS
        prompts[name] = [one for one in made if len(one.prompt) <= most]
        if asked := tuple(Prompt(one.prompt, ANSWER_TOKENS) for one in prompts[name]):
            jobs.append(Asking(name, engine, asked))
    found = results.run_arms(ask, jobs, args)
    marks = shares(found.done, prompts)
    table = pass_key_table(marks, cells(args), args.samples, found.failed)
    return [table], {}, found.failed


def shares(
    answers: Mapping[str, Sequence[str]], prompts: Mapping[str, Sequence[Hidden]]
) -> dict[str, dict[Cell, tuple[float, float]]]:
    """By arm and cell: share of digits that are right, and of answers that are."""
    found = {}
    for arm, given in answers.items():
        pairs = zip(given, [one.key for one in prompts[arm]], strict=True)
        marks = [(digits_right(answer, key), is_exact(answer, key)) for answer, key in pairs]
        by_cell = in_cells(prompts[arm], marks)
        found[arm] = {cell: tuple(some.mean(axis=0)) for cell, some in by_cell.items()}
    return found


def pass_key_table(
    found: Mapping[str, Mapping[Cell, tuple[float, float]]],
    cells: Sequence[Cell],
    samples: int,
    failed: Mapping[str, str],
) -> Table:
    """Digits and exact answers, by arm and cell."""
    full = found.get(FULL, {})
    able = {cell: full[cell][0] >= ABLE if cell in full else None for cell in cells}
    shown = {
        arm: {cell: "{:.0%} / {:.0%}".format(*share) for cell, share in of.items()}
        for arm, of in found.items()
    }
    note = (
        f"Digits of a {DIGITS}-digit number that are right / answers that are right as a whole; "
        f"{samples} prompts a cell; guessing gives 10 % of the digits."
    )
    needs = f"finds less than {ABLE:.0%} of the digits"
    return judged("Pass key", shown, able, note, needs, failed)


def main(argv: Sequence[str] | None = None) -> None:
    """Answer one question."""
    args = parse_args(argv)
    settle(args)
    ask_for = {"passkey": passkey, "associative": associative, "rewind": rewind}
    tables, data, failed = ask_for[args.question](args)
    results.finish(args, argv, tables, data, failed)


if __name__ == "__main__":
    main()
