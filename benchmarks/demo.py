# SPDX-License-Identifier: Apache-2.0
"""What the bounded cache is for, on a real model: ``python -m benchmarks.demo`` or ``make demo``.

A novel goes past the model's positions (stock vLLM stops there, a plain window gets much worse,
sink and cascade go on), and what a note at its beginning said is asked for at its end, which only
recall can answer. Then a chat goes past them, with a server of stock vLLM beside one of ours.
Prints two tables, the answers and a dialogue, writes the numbers as JSON and a picture, and ends
with five lines on what was shown.
``--help`` lists the options.
"""

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.inputs.texts import after_sentence, passages
from benchmarks.models import Model, best_model
from benchmarks.reporting import demo_pictures, demo_report, results
from benchmarks.reporting.demo_report import CASCADE, RECALL, STOCK
from benchmarks.reporting.tables import say, show
from benchmarks.running import engines, novel, pools
from benchmarks.running.client import Refused
from benchmarks.running.conversation import Conversation
from benchmarks.running.engines import BOOK, EngineSettings, load_tokenizer
from benchmarks.running.serving import Server

BLOCK_SIZE = 32
BATCHED_TOKENS = 1024
NEW_TOKENS = 32
"""Generated after the novel, to time a token; the first of them are an answer."""
NAME = "Eleanor Whitcombe"
NOTE = f"\n\nThe reader's name is {NAME}. Remember it. {NAME} is the reader's name.\n\n"
"""Put into the novel's beginning."""
ASKED = "\n\nWhat is the reader's name? The reader's name is"
"""After what is read of the novel."""
ANSWER_TOKENS = 24
ENDLESS = 1_000_000
"""``--max-model-len`` of our server."""
QUESTION = (
    "I am reading a novel. Part {number}:\n\n{passage}\n\n"
    "What is this part about? Answer in one short sentence, in your own words."
)
PLAIN_CHAT = "{% for message in messages %}{{ message['content'] }}\n\n{% endfor %}"
"""For a model without a chat template."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options; sizes that are not given follow from the model's positions (``settle``)."""
    parser = results.parser_of("demo", __doc__)
    add = parser.add_argument
    add("--model", help="path or name; default: the real model of the benchmarks")
    add("--book", type=Path, default=BOOK, help="text file")
    add("--dtype", default="auto")
    add("--budget", type=int, help="default: an eighth of the positions")
    add("--stride", type=int, default=256, help="prompt tokens between evictions")
    add("--tokens", type=int, help="of the novel; default: 9/8 of the positions")
    add("--chat-tokens", type=int, help="the chat's length; default: 65/64 of the positions")
    add("--passage", type=int, help="tokens a turn; default: a fifth of the positions")
    cores = min(2, os.cpu_count() or 1)
    add("--engines", type=int, default=cores, help="engines and servers at a time, a core each")
    args = parser.parse_args(argv)
    if args.engines < 1:
        parser.error("--engines must be at least 1")
    return args


def settle(args: argparse.Namespace) -> tuple[Model, int]:
    """The model and its positions; sizes that were not given are filled in.

    Raises:
        SystemExit: a size that cannot show anything, or cannot work; it is named.
    """
    from vllm_cascade import KVPolicyError
    from vllm_cascade.policies.registry import resolve

    path = args.model
    model = Model(Path(path), Path(path).name, real=True) if path else best_model()
    positions = engines.native_positions(str(model.path))
    defaults = {"tokens": positions * 9 // 8, "budget": positions // 8}
    defaults["chat_tokens"] = positions * 65 // 64
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.passage = args.passage or positions // 5
    args.dtype = engines.settle_dtype(args.dtype, str(model.path))
    for name in ("tokens", "chat_tokens"):
        if getattr(args, name) <= positions:
            option = "--" + name.replace("_", "-")
            raise SystemExit(
                f"{option} {getattr(args, name)} does not go past the model's {positions:,} "
                "positions, which is what the demo shows: take more"
            )
    try:
        for policy in policies(args).values():
            resolve(policy, max_position=positions, max_num_batched_tokens=BATCHED_TOKENS)
    except KVPolicyError as error:
        raise SystemExit(str(error)) from error
    return model, positions


def policies(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The arms beside stock vLLM; what is recalled is taken from the budget."""
    from vllm_cascade.policies.settings import RECALL_UNIT

    shared = {"budget": args.budget, "prefill_stride": args.stride}
    arms = {name: {"name": name, **shared} for name in ("window", "sink", CASCADE)}
    units = max(args.budget // (8 * RECALL_UNIT), 1)
    budget = args.budget // RECALL_UNIT * RECALL_UNIT - units * RECALL_UNIT
    return {**arms, RECALL: {**arms["sink"], "budget": budget, "recall": units}}


def engine(args: argparse.Namespace, model: Model, **settings: Any) -> EngineSettings:
    """What every arm has in common."""
    return EngineSettings(
        model=str(model.path),
        dtype=args.dtype,
        max_num_batched_tokens=BATCHED_TOKENS,
        block_size=BLOCK_SIZE,
        **settings,
    )


def arms(
    args: argparse.Namespace,
    model: Model,
    positions: int,
    token_ids: list[int],
    question: list[int],
) -> list[novel.Arm]:
    """The engines that read the novel."""
    longest = len(token_ids) + len(question) + NEW_TOKENS
    stock = engine(args, model, max_model_len=positions)
    bounded = {
        label: engine(args, model, max_model_len=longest, policy=policy)
        for label, policy in policies(args).items()
    }
    return [
        novel.Arm(label, settings, token_ids, question, NEW_TOKENS)
        for label, settings in {STOCK: stock, **bounded}.items()
    ]


def read_novel(args: argparse.Namespace, model: Model, positions: int) -> dict[str, Any]:
    """The novel under every arm, as what is kept of it."""
    from vllm_cascade.policies.registry import resolve

    tokenizer = load_tokenizer(str(model.path))
    token_ids, ago = with_note(args, tokenizer, positions)
    question = tokenizer(ASKED, add_special_tokens=False)["input_ids"]
    recall = resolve(policies(args)[RECALL])
    kept = {
        "model": model.name,
        "book": args.book.name,
        "positions": positions,
        "tokens": len(token_ids),
        "head": positions - NEW_TOKENS,
        "new_tokens": NEW_TOKENS,
        "budget": args.budget,
        "sinks": resolve(policies(args)[CASCADE]).num_sinks,
        "recall": {
            "sinks": recall.num_sinks,
            "budget": recall.budget,
            "units": recall.recall,
            "unit": recall.unit,
        },
        "note": {"said": NOTE.strip(), "ago": ago, "asked": ASKED.strip()},
        "engines": args.engines,
        "arms": {},
    }
    say(demo_report.NOVEL.format(**kept))
    reading = arms(args, model, positions, token_ids, question)
    for label, read in novel.run_all(reading, args.engines):
        numbers = demo_report.numbers(read, kept["head"])
        if read.asked:
            numbers["answer"] = first_line(tokenizer.decode(read.result.written))
            numbers["right"] = NAME in numbers["answer"]
        kept["arms"][label] = numbers
    return kept


def with_note(args: argparse.Namespace, tokenizer: Any, positions: int) -> tuple[list[int], int]:
    """The novel's first tokens with the note among them, and how long ago it is at their end.

    Raises:
        SystemExit: there are not enough.
    """
    token_ids = tokenizer(args.book.read_text(encoding="utf-8"))["input_ids"]
    if len(token_ids) <= positions:
        raise SystemExit(
            f"{args.book} has {len(token_ids):,} tokens: too few to pass {positions:,}"
        )
    note = tokenizer(NOTE, add_special_tokens=False)["input_ids"]
    place = after_sentence(token_ids, tokenizer, args.budget // 2)
    token_ids = [*token_ids[:place], *note, *token_ids[place:]][: args.tokens]
    return token_ids, len(token_ids) - place - len(note)


def first_line(text: str) -> str:
    """The first line that says something."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """What makes each server of the chat what it is: the flags after ``vllm serve MODEL``."""
    ours = ["--kv-policy", CASCADE, "--kv-budget", str(args.budget)]
    if args.stride != 256:
        ours += ["--kv-policy-config", f'{{"prefill_stride": {args.stride}}}']
    return {STOCK: [], CASCADE: [*ours, "--max-model-len", str(ENDLESS)]}


def servers(args: argparse.Namespace, model: Model, positions: int) -> dict[str, Server]:
    """Stock vLLM's and ours, not started; each has the pool that stock vLLM needs."""
    pool = pools.pool_bytes(engine(args, model, max_model_len=positions))
    shared = [*engine(args, model, memory_bytes=pool).flags(), "--enable-prompt-tokens-details"]
    shared += ["--distributed-executor-backend", "uni"]  # one process less, and faster up
    if load_tokenizer(str(model.path)).chat_template is None:
        shared += ["--chat-template", PLAIN_CHAT]
    cores = sorted(os.sched_getaffinity(0))
    of = [cores[i % args.engines % len(cores)] for i in range(2)]
    return {
        label: Server(str(model.path), [*flags, *shared], cores=[core])
        for core, (label, flags) in zip(of, commands(args).items(), strict=True)
    }


def talk(args: argparse.Namespace, model: Model, positions: int) -> dict[str, Any]:
    """The chat with both servers, as what is kept of it."""
    flags = {label: " ".join(words) for label, words in commands(args).items()}
    command = {label: f"vllm serve {model.name} {words}".strip() for label, words in flags.items()}
    kept = {
        "model": model.name,
        "positions": positions,
        "block_size": BLOCK_SIZE,
        "engines": args.engines,
        "arms": {},
    }
    both = {"stock": command[STOCK], "ours": command[CASCADE]}
    say(demo_report.CHAT.format(**both, block=BLOCK_SIZE, engines=args.engines))
    with ExitStack() as stack:
        up = servers(args, model, positions)
        for label, server in up.items():
            stack.callback(server.stop)
            server.start()
            page = pools.page_bytes(engine(args, model, policy=policies(args).get(label)))
            arm = {"command": command[label], "page_bytes": page, "turns": [], "refused": None}
            kept["arms"][label] = arm
        for server in up.values():
            server.wait()
        tokenizer = load_tokenizer(str(model.path))
        parts = passages(args.book.read_text(encoding="utf-8"), tokenizer, args.passage)
        converse(up, kept["arms"], parts, args.chat_tokens, args.engines)
    return kept


def converse(
    up: dict[str, Server],
    kept: dict[str, Any],
    parts: Iterator[str],
    chat_tokens: int,
    together: int,
) -> None:
    """Ask about part after part, ``together`` servers at a time, until ours has ``chat_tokens``.

    Stock vLLM drops out when it refuses; a refusal of ours is an error.
    """
    chats = {label: Conversation(server, ANSWER_TOKENS) for label, server in up.items()}
    with ThreadPoolExecutor(together) as pool:
        for number, passage in enumerate(parts, 1):
            question = QUESTION.format(number=number, passage=passage)
            asked = {
                label: pool.submit(chat.ask, question)
                for label, chat in chats.items()
                if not kept[label]["refused"]
            }
            for label, answer in asked.items():
                try:
                    kept[label]["turns"].append(demo_report.turn_numbers(answer.result()))
                except Refused as refused:
                    if label != STOCK:
                        raise
                    kept[label]["refused"] = vars(refused)
            print(demo_report.live_row(kept, number - 1), flush=True)
            if kept[CASCADE]["turns"][-1]["context"] >= chat_tokens:
                return
    raise SystemExit("the book is too short for such a long chat: lower --chat-tokens")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the demo."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # engines and servers end with it
    engines.quiet()
    sys.stdout.reconfigure(line_buffering=True)  # also where it goes through a pipe
    args = parse_args(argv)
    model, positions = settle(args)
    if not model.real:
        say(model.why_not)
    read = read_novel(args, model, positions)
    tables = [demo_report.novel_table(read)]
    show(tables)
    demo_report.show_answers(read)
    chat = talk(args, model, positions)
    tables.append(demo_report.chat_table(chat))
    say(f"\n{demo_report.stopped(chat)}\n\n{demo_report.EVICTS}\n")
    picture = args.out.with_suffix(".png")
    picture.parent.mkdir(parents=True, exist_ok=True)
    demo_pictures.draw(read, picture)
    results.finish(args, argv, tables, {"novel": read, "chat": chat}, printed=True)
    print(f"The picture of the novel's perplexity is {picture}.")
    say("\n".join(demo_report.shown(read, chat)))


if __name__ == "__main__":
    main()
