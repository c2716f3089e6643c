# SPDX-License-Identifier: Apache-2.0
"""A chat that outlives its server: ``python -m benchmarks.sessions``.

For each policy a server with ``--kv-sessions-dir`` leads one long chat. Then it answers the next
turn from host memory, is killed (SIGKILL) and started again on the same folder, and answers the
next turn from disk. The table has the time to the first token of that turn, beside a fresh
session's turn with as many new tokens, and beside reading the whole chat again. In a fresh session
they are read into an empty cache. So there is also a turn that reads them into a full one without
any session: its prompt begins with one of twice the budget, of which a snapshot is in the pool.
Stock vLLM answers within its positions, from its prefix cache and without.

Turns of a table take turns: a fresh one before every other one. New tokens are never those of
another trial. ``read`` is counted by the server: prompt tokens less those it had cached.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.models import best_model
from benchmarks.reporting import results
from benchmarks.reporting.tables import Table, number, spread
from benchmarks.running.client import TIMEOUT, stream
from benchmarks.running.engines import (
    BOOK,
    load_tokenizer,
    native_positions,
    quiet,
    settle_dtype,
)
from benchmarks.running.serving import Server

POLICIES = {
    "sink + recall": ["--kv-policy", "sink", "--kv-recall", "8"],
    "cascade": ["--kv-policy", "cascade", "--kv-recall", "0"],
}
STOCK = "stock vLLM"
FRESH, FULL, MEMORY = "fresh session", "full cache, no session", "from memory"
DISK, AGAIN = "from disk", "everything again"
MEMORY_GOAL, DISK_GOAL = 1.2, 1.5
"""Most times a fresh turn's time to the first token."""
SHOWN = (
    "Seconds to the first token of a turn with {new:,} new tokens: median and range. A turn from "
    "disk is the first use of its session after SIGKILL and a new start. One token more than the "
    "new ones is read: the last one sampled, which was never attended."
)


@dataclass(frozen=True)
class Answer:
    """When an answer began.

    Attributes:
        prompt: tokens of the prompt.
        read: those of them that the server did not have.
        first: seconds to the first token.
    """

    prompt: int
    read: int
    first: float


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = results.parser_of("sessions", __doc__)
    add = parser.add_argument
    add("--model", help="path or name; default: the real model of the benchmarks")
    add("--book", type=Path, default=BOOK, help="text file")
    add("--dtype", default="auto")
    add("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    add("--budget", type=int, default=1024)
    add("--tokens", type=int, default=100_000, help="of the chat")
    add("--turn", type=int, default=1000, help="tokens that the user says each turn")
    add("--answer", type=int, default=32, help="tokens of each answer")
    add("--new", type=int, nargs="+", default=[500, 2000], help="new tokens of measured turns")
    add("--trials", type=int, default=5, help="measured turns from memory")
    add("--restarts", type=int, default=3, help="times that the server is killed, for each --new")
    add("--pool-mib", type=int, default=512, help="KV pool of every server")
    add("--block-size", type=int, default=32)
    args = parser.parse_args(argv)
    if min(args.trials, args.restarts, *args.new, args.turn, args.answer) < 1:
        parser.error("--trials, --restarts, --new, --turn and --answer must be at least 1")
    return args


class Text:
    """Tokens of a book, in pieces that differ: each time it ends, it begins one token later."""

    def __init__(self, model: str, book: Path) -> None:
        self._tokens = load_tokenizer(model)(book.read_text(encoding="utf-8"))["input_ids"]
        self._rounds: Iterator[int] = count()
        self._rest: list[int] = []

    def take(self, num: int) -> list[int]:
        while len(self._rest) < num:
            self._rest += self._tokens[next(self._rounds) :]
        taken, self._rest = self._rest[:num], self._rest[num:]
        return taken


def ask(server: Server, prompt: list[int], max_tokens: int, salt: str | None = None) -> Answer:
    """Stream a greedy answer. With a salt of its own nothing cached is found."""
    body: dict[str, Any] = {"ignore_eos": True} | ({} if salt is None else {"cache_salt": salt})
    found = stream(server, prompt=prompt, max_tokens=max_tokens, extra_body=body)
    return Answer(len(prompt), len(prompt) - found.cached, found.first)


def chat(server: Server, text: Text, args: argparse.Namespace, most: int) -> list[int]:
    """Lead a chat of at least ``most`` tokens; returns them."""
    history: list[int] = []
    while len(history) < most:
        history += text.take(args.turn)
        body = {"ignore_eos": True, "return_token_ids": True}
        history += stream(server, prompt=history, max_tokens=args.answer, extra_body=body).tokens
    return history


def wait_for_file(folder: Path, num_tokens: int) -> None:
    """Until the state after so many tokens is in the folder.

    Raises:
        TimeoutError: it did not come.
    """
    from vllm_cascade.sessions.folder import Folder

    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        entries, _ = Folder(folder).entries()
        if any(int(entry.header["num_tokens"]) == num_tokens for entry in entries):
            return
        time.sleep(0.2)
    raise TimeoutError(f"no session of {num_tokens} tokens in {folder}")


def flags(args: argparse.Namespace, *own: str) -> list[str]:
    shared = ["--dtype", args.dtype, "--enforce-eager", "--block-size", str(args.block_size)]
    shared += ["--max-num-seqs", "1", "--kv-cache-memory-bytes", str(args.pool_mib << 20)]
    return [*own, *shared, "--enable-prompt-tokens-details"]


Turns = dict[str, list[Answer]]
"""Turns of as many new tokens, by what they start from."""


def measure(args: argparse.Namespace, policy: str, text: Text) -> dict[int, Turns]:
    """All turns under one policy, by their new tokens."""
    found = {new: Turns({kind: [] for kind in (FRESH, FULL, MEMORY, DISK, AGAIN)})
             for new in args.new}  # fmt: skip

    def full(server: Server, new: int) -> None:
        """New tokens behind a prompt that a snapshot knows."""
        known = text.take(2 * args.budget)
        ask(server, known, 1)
        turn(server, new, FULL, known)

    def turn(server: Server, new: int, label: str, history: Sequence[int] = ()) -> None:
        prompt = [*history, *text.take(new)]
        salt = "again" if label == AGAIN else None
        found[new][label].append(ask(server, prompt, args.answer, salt))

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "sessions"
        own = [*POLICIES[policy], "--kv-budget", str(args.budget), "--kv-sessions"]
        # Trials are forks of the chat, which the bounds count one by one.
        own += ["--kv-sessions-dir", str(folder), "--kv-sessions-disk", "1000"]
        own += ["--max-model-len", str(2 * args.tokens + 10 * (args.turn + max(args.new)))]
        with Server(args.model, flags(args, *own)) as server:
            history = chat(server, text, args, args.tokens)
            for new in args.trials * args.new:
                turn(server, new, FRESH)
                full(server, new)
                turn(server, new, MEMORY, history)
            turn(server, args.new[0], AGAIN, history)
            wait_for_file(folder, len(history) - 1)
            server.kill()
        for new in args.restarts * args.new:
            with Server(args.model, flags(args, *own)) as server:
                ask(server, text.take(new), args.answer)  # the first one is slower
                turn(server, new, FRESH)
                full(server, new)
                turn(server, new, DISK, history)
                turn(server, new, FRESH)
                full(server, new)
                hits = server.samples("vllm:kv_session_hits_total", "tier")
                assert hits["disk"] == 1, hits
                server.kill()
    return found


def stock(args: argparse.Namespace, text: Text, positions: int) -> dict[int, Turns]:
    """Stock vLLM's turns at the end of its positions."""
    found: dict[int, Turns] = {new: {FRESH: [], MEMORY: [], AGAIN: []} for new in args.new}
    room = max(args.new) + args.answer
    with Server(args.model, flags(args)) as server:
        history = chat(server, text, args, positions - 2 * room - args.turn)
        for number, new in enumerate(args.trials * args.new):
            kinds = found[new]
            kinds[FRESH].append(ask(server, text.take(new), args.answer))
            added = text.take(new)
            kinds[MEMORY].append(ask(server, [*history, *added], args.answer))
            salt = f"again {number}"
            kinds[AGAIN].append(ask(server, [*history, *added], args.answer, salt))
    return found


def table(args: argparse.Namespace, new: int, measured: dict[str, Turns]) -> Table:
    """Turns of ``new`` tokens, of all policies."""
    rows = []
    for name, kinds in measured.items():
        fresh = median(answer.first for answer in kinds[FRESH])
        full = median(answer.first for answer in kinds.get(FULL, ())) if FULL in kinds else None
        for label, answers in kinds.items():
            if not answers:  # the chat is read again once
                continue
            first = [answer.first for answer in answers]
            goal = {MEMORY: MEMORY_GOAL, DISK: DISK_GOAL}.get(label) if name != STOCK else None
            rows.append(
                (
                    f"{name}: {label}",
                    f"{answers[0].prompt:,}",
                    f"{max(answer.read for answer in answers):,}",
                    spread(first, 3),
                    number(median(first) / fresh),
                    number(None if full is None else median(first) / full),
                    number(goal, 1),
                )
            )
    columns = (
        "turn",
        "prompt tokens",
        "read",
        "first token (s)",
        "to a fresh one",
        "to a full one",
        "at most",
    )
    model = results.name_of(args.model)
    title = f"A chat of {args.tokens:,} tokens with {model}, turns of {new:,}"
    return Table(title, columns, tuple(rows), SHOWN.format(new=new))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    # Servers run one at a time, so each has all cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    quiet()
    args = parse_args(argv)
    args.model = args.model or str(best_model().path)
    args.dtype = settle_dtype(args.dtype, args.model)
    positions = native_positions(args.model)
    longest = max(args.new)
    if args.turn + 2 * (longest + args.answer) >= positions:
        raise SystemExit(
            f"--turn {args.turn} and --new {longest} do not fit the model's {positions:,} "
            "positions, in which stock vLLM answers: lower them"
        )
    text, measured = Text(args.model, args.book), {}
    for policy in args.policies:
        measured[policy] = measure(args, policy, text)
    measured[STOCK] = stock(args, text, positions)
    of = {new: {name: turns[new] for name, turns in measured.items()} for new in args.new}
    data = {
        str(new): {
            name: {label: [*map(asdict, answers)] for label, answers in kinds.items()}
            for name, kinds in named.items()
        }
        for new, named in of.items()
    }
    results.finish(args, argv, [table(args, new, named) for new, named in of.items()], data)


if __name__ == "__main__":
    main()
