# SPDX-License-Identifier: Apache-2.0
"""A chat of many turns with and without prefix caching: ``python -m benchmarks.chat``.

Every turn's prompt is the whole chat so far and something new. Without caching it is read again
from its beginning; with it, reading starts from the snapshot that the last turn left. Prints the
time to the first token of every turn and writes all numbers as JSON; the two engines' answers must
have the same log-probabilities, byte for byte.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.reporting import results
from benchmarks.reporting.tables import Table
from benchmarks.running import pools
from benchmarks.running.engines import BOOK, MODEL, EngineSettings, quiet

BLOCK_SIZE = 32
SNAPSHOTS = 32
"""Snapshots of a request's whole cache that the pool has room for."""


@dataclass
class Turn:
    """One request.

    Attributes:
        prompt: tokens of the chat so far.
        cached: those of them that were not computed again.
        seconds: from the request's arrival to its first token.
        tokens, logprobs: of the answer.
    """

    prompt: int
    cached: int = 0
    seconds: float = 0.0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def engine(args: argparse.Namespace, caching: bool) -> Any:
    """An engine for one chat at a time, with room for the snapshots of many turns."""
    policy = {"name": args.policy, "budget": args.budget, "prefill_stride": args.stride}
    settings = EngineSettings(
        model=args.model,
        policy=policy,
        max_model_len=1 << 17,
        max_num_batched_tokens=args.step_tokens,
        block_size=BLOCK_SIZE,
        arguments={"enable_prefix_caching": caching, "use_tqdm_on_load": False},
    )
    room = pools.pool_bytes(replace(settings, max_num_seqs=SNAPSHOTS))
    return replace(settings, memory_bytes=room).start()


def ask(llm: Any, name: str, prompt: list[int], max_tokens: int) -> Turn:
    """Send one prompt, with nothing else running."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=0, ignore_eos=True)
    turn, outputs = Turn(len(prompt)), []
    start = time.perf_counter()
    llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
        if outputs and not turn.seconds:
            turn.seconds = time.perf_counter() - start
    answer = outputs[-1].outputs[0]
    turn.cached = outputs[-1].num_cached_tokens
    turn.tokens = list(answer.token_ids)
    turn.logprobs = [next(iter(entry.values())).logprob for entry in answer.logprobs]
    return turn


def chat(llm: Any, name: str, questions: Iterator[list[int]], args: Any) -> list[Turn]:
    """One chat: each turn's prompt is all questions and answers so far."""
    history: list[int] = []
    turns = []
    for index in range(args.turns):
        history += next(questions)
        turns.append(ask(llm, f"{name}-{index}", history, args.answer_tokens))
        history += turns[-1].tokens
    return turns


def questions(token_ids: list[int], size: int) -> Iterator[list[int]]:
    """Parts of a book, one after the other."""
    for start in range(0, len(token_ids) - size, size):
        yield token_ids[start : start + size]


def measure(args: argparse.Namespace, token_ids: list[int], caching: bool) -> list[list[Turn]]:
    """``repeats`` chats about different parts of the book; one before them is not measured."""
    llm = engine(args, caching)
    parts = questions(token_ids, args.question_tokens)
    chat(llm, "warm-up", parts, args)
    chats = [chat(llm, f"chat-{i}", parts, args) for i in range(args.repeats)]
    llm.llm_engine.engine_core.shutdown()
    return chats


def numbers(cold: list[list[Turn]], warm: list[list[Turn]]) -> list[dict[str, Any]]:
    """Medians over the chats, by turn."""
    rows = []
    by_turn = zip(zip(*cold, strict=True), zip(*warm, strict=True), strict=True)
    for turn, (without, with_caching) in enumerate(by_turn):
        pairs = list(zip(without, with_caching, strict=True))
        rows.append(
            {
                "turn": turn + 1,
                "prompt_tokens": without[0].prompt,
                "cached_tokens": with_caching[0].cached,
                "ttft_ms_without": 1e3 * statistics.median(t.seconds for t in without),
                "ttft_ms_with": 1e3 * statistics.median(t.seconds for t in with_caching),
                "same_tokens": all(a.tokens == b.tokens for a, b in pairs),
                "same_logprobs": all(a.logprobs == b.logprobs for a, b in pairs),
            }
        )
    return rows


def table(rows: list[dict[str, Any]], args: argparse.Namespace) -> Table:
    """The turns as people read them."""
    return Table(
        f"A chat under {args.policy}, budget {args.budget}, stride {args.stride}",
        (
            *("turn", "prompt tokens", "of them cached", "TTFT without", "TTFT with"),
            *("speed-up", "log-probabilities"),
        ),
        tuple(
            (
                str(row["turn"]),
                f"{row['prompt_tokens']:,}",
                f"{row['cached_tokens']:,}",
                f"{row['ttft_ms_without']:.0f} ms",
                f"{row['ttft_ms_with']:.0f} ms",
                f"{row['ttft_ms_without'] / row['ttft_ms_with']:.1f}x",
                "byte-equal" if row["same_logprobs"] else "DIFFERENT",
            )
            for row in rows
        ),
        f"{args.question_tokens} new and {args.answer_tokens} generated tokens a turn; median of "
        f"{args.repeats} chats.",
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--policy", default="cascade")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--stride", type=int, default=256)
    parser.add_argument("--step-tokens", type=int, default=1024, help="most tokens of one step")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--question-tokens", type=int, default=500)
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    results.add_arguments(parser, "chat")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    quiet()
    warnings.filterwarnings("ignore", category=FutureWarning)  # from importing vLLM
    from transformers import AutoTokenizer

    token_ids = AutoTokenizer.from_pretrained(args.model)(Path(BOOK).read_text())["input_ids"]
    rows = numbers(measure(args, token_ids, False), measure(args, token_ids, True))
    results.save(args.out, [table(rows, args)], {"turns": rows}, vars(args), argv)
    if not all(row["same_tokens"] and row["same_logprobs"] for row in rows):
        raise SystemExit("the answers with prefix caching are not those without")


if __name__ == "__main__":
    main()
