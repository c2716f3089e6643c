# SPDX-License-Identifier: Apache-2.0
"""Other programs that bound a KV cache, beside this one: ``python -m benchmarks.peers``.

The same model, the same tokens and the same number of cached tokens for this project's policies,
NVIDIA's kvpress (on transformers) and llama.cpp's context shift (on the model's own GGUF), with
full attention of each program as its ceiling. Four questions, every one to every arm in a process
of its own: perplexity of a long stream, perplexity of what follows a bounded prompt, pass keys, and
speed with memory. The peers are installed into environments of their own by the first run
(``requirements/kvpress.txt``, ``requirements/llama-cpp.txt``); one that cannot be installed is a
row that says why.

After an eviction every arm holds ``--kept`` tokens, and ``--stride`` more may come before the
next. llama.cpp drops half of its context instead, unless told otherwise: it runs as it is by
default, with a context of ``--kept``, and once more with the stride of the others.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks import models
from benchmarks.inputs import pass_keys, texts
from benchmarks.reporting import peers_report, results
from benchmarks.running import scoring
from benchmarks.running.engines import BOOK, load_tokenizer, native_positions, quiet
from benchmarks.running.peers.answers import ask_all
from benchmarks.running.peers.process import QUESTIONS, Arm, Task

ANSWER_TOKENS = 16
SNAPKV_WINDOW = 32
"""Queries that SnapKV looks at while it decodes: its 64 need more than 64 tokens between times."""

PROMPT_ONLY = "bounds the cache once, after a prompt that full attention reads"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", default=str(BOOK), help="the text: a file, a folder, hf:...")
    parser.add_argument("--documents", type=int, help="stop after so many documents")
    parser.add_argument("--kept", type=int, default=516, help="tokens cached, sinks included")
    parser.add_argument("--num-sinks", type=int, default=4)
    parser.add_argument("--stride", type=int, default=64, help="tokens between evictions")
    parser.add_argument("--policies", nargs="+", default=["sink", "cascade"])
    parser.add_argument("--base", default="cascade", help="policy that peers are compared with")
    parser.add_argument("--peers", nargs="*", choices=("kvpress", "llama.cpp"), default=None)
    parser.add_argument("--questions", nargs="+", choices=QUESTIONS, default=QUESTIONS)
    parser.add_argument("--tokens", type=int, default=16_000, help="stream: tokens of a text")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens before a cache is asked")
    parser.add_argument("--prompts", type=int, default=100, help="continuation: how many")
    parser.add_argument("--depths", type=float, nargs="+", default=[0.1, 0.3, 0.5, 0.7, 0.9])
    parser.add_argument("--samples", type=int, default=10, help="pass keys a depth")
    parser.add_argument("--speed-prompt", type=int, default=4096, help="speed: tokens to read")
    parser.add_argument("--new-tokens", type=int, default=128, help="speed: tokens to write")
    parser.add_argument("--trials", type=int, default=3, help="speed: prompts")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--eager", action="store_true", help="vLLM without compilation")
    results.add_arguments(parser, "peers")
    args = parser.parse_args(argv)
    args.base = args.base if args.base in args.policies else args.policies[0]
    args.peers = ["kvpress", "llama.cpp"] if args.peers is None else args.peers
    return args


# --- arms of equal size -------------------------------------------------------------------------


def arms(args: argparse.Namespace, positions: int) -> list[Arm]:
    """Every way to bound a cache, and full attention of every program, which ends at ``positions``.

    Raises:
        KVPolicyError: no budget of a policy fits ``args.kept``.
    """
    chosen = vllm_arms(args, positions)
    if "kvpress" in args.peers:
        chosen += kvpress_arms(args.kept, args.stride)
    if "llama.cpp" in args.peers:
        chosen += llama_arms(args.kept, args.stride, args.num_sinks, positions)
    return chosen


def vllm_arms(args: argparse.Namespace, positions: int) -> list[Arm]:
    """Stock vLLM and this project's policies."""
    longest = max(args.tokens, args.prompt + args.stride, args.speed_prompt + args.new_tokens)
    full = {"policy": None, "cached": positions, "positions": positions, "eager": args.eager}
    found = [Arm("full, vLLM", "vLLM", full, bounded=False)]
    for name in args.policies:
        policy = scoring.equal_policy(
            name, args.kept, num_sinks=args.num_sinks, prefill_stride=args.stride
        )
        size = {"cached": args.kept + args.stride, "positions": longest + 128, "eager": args.eager}
        found.append(Arm(name, "vLLM", {"policy": policy, **size}))
    return found


def kvpress_arms(kept: int, stride: int) -> list[Arm]:
    """Presses after the prompt, and while decoding where kvpress allows that."""
    size = {"kept": kept, "interval": stride, "step": stride}
    both = {**size, "decoding": True}
    once = {**size, "why_not": PROMPT_ONLY}
    window = {"decoding_options": {"window_size": min(SNAPKV_WINDOW, stride - 1)}}
    streaming = {"press": "StreamingLLMPress"}
    chosen: dict[str, dict[str, Any]] = {
        "StreamingLLM": {**both, **streaming},
        "StreamingLLM, re-rotated": {**once, **streaming, "rerotated": True},
        "observed attention": {**once, "press": "ObservedAttentionPress", "attention": "eager"},
        "SnapKV": {**both, "press": "SnapKVPress", **window},
        "expected attention": {**both, "press": "ExpectedAttentionPress"},
        "TOVA": {**both, "press": "TOVAPress"},
        "KeyDiff": {**both, "press": "KeyDiffPress"},
    }
    full = Arm("full, transformers", "kvpress", bounded=False)
    return [full, *(Arm(f"kvpress {name}", "kvpress", s) for name, s in chosen.items())]


def llama_arms(kept: int, stride: int, sinks: int, positions: int) -> list[Arm]:
    """llama.cpp as it shifts by itself, and told to shift as often as the others evict."""
    own = {"context": kept, "keep": sinks}
    equal = {"context": kept + stride, "keep": sinks, "discard": stride}
    return [
        Arm("full, llama.cpp", "llama.cpp", {"context": positions}, bounded=False),
        Arm("llama.cpp shift, half", "llama.cpp", own),
        Arm(f"llama.cpp shift, {stride}", "llama.cpp", equal),
    ]


# --- questions ----------------------------------------------------------------------------------


def items(args: argparse.Namespace, tokenizer: Any, positions: int) -> dict[str, list[Any]]:
    """What is asked, by question: token ids, the same for every arm.

    Raises:
        ValueError: a text that is too short, or a prompt that full attention could not read.
    """
    found = texts.read(args.data, args.documents)
    documents = [tokenizer(text)["input_ids"] for text in found.values()]
    longest = max(documents, key=len)
    for name, length in (("--prompt", args.prompt), ("--speed-prompt", args.speed_prompt)):
        if not args.kept < length <= positions - args.new_tokens - args.stride:
            raise ValueError(
                f"{name} {length}: more than --kept {args.kept}, and room for what follows in the "
                f"model's {positions} positions, is needed"
            )
    keys = pass_keys.pass_keys(tokenizer, longest, args.prompt, args.depths, args.samples)
    starts = spread_out(len(longest) - args.speed_prompt, args.trials)
    return {
        "stream": [ids[: args.tokens] for ids in documents],
        "continuation": continuations(documents, args.prompt, args.stride, args.prompts),
        "passkey": [{**asdict(key), "most": ANSWER_TOKENS} for key in keys],
        "speed": [
            {"prompt": longest[start : start + args.speed_prompt], "new": args.new_tokens}
            for start in starts
        ],
    }


def continuations(
    documents: Sequence[list[int]], length: int, following: int, count: int
) -> list[dict[str, list[int]]]:
    """Prompts that lie evenly over all documents, and what follows each."""
    rooms = [max(len(ids) - length - following + 1, 0) for ids in documents]
    made = []
    for place in spread_out(sum(rooms), count):
        for ids, room in zip(documents, rooms, strict=True):
            if place < room:
                end = place + length
                made.append({"prompt": ids[place:end], "following": ids[end : end + following]})
                break
            place -= room
    return made


def spread_out(room: int, count: int) -> list[int]:
    """``count`` places in ``range(room)``, evenly.

    Raises:
        ValueError: a text with less room than places.
    """
    if room < count:
        raise ValueError(f"the text is too short: {max(room, 0)} places for {count} prompts")
    return [room * index // count for index in range(count)]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    args = parse_args(argv)
    quiet()
    model, gguf = str(models.real_model()), str(models.real_gguf())
    tokenizer, positions = load_tokenizer(model), native_positions(model)
    asked = items(args, tokenizer, positions)
    chosen = arms(args, positions)
    tasks = [
        Task(arm, question, model, gguf, args.threads, asked[question])
        for question in args.questions
        for arm in chosen
    ]
    answers = ask_all(tasks, args.out.with_suffix(".arms"))
    report = peers_report.Report(chosen, answers, asked, positions, args.base, tokenizer.decode)
    results.save(args.out, report.tables(), report.numbers(), vars(args), argv)


if __name__ == "__main__":
    main()
