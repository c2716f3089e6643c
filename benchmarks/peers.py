# SPDX-License-Identifier: Apache-2.0
"""Other programs that bound a KV cache, beside this one: ``python -m benchmarks.peers``.

The same model, the same tokens and the same number of cached tokens for this project's policies,
NVIDIA's kvpress (on transformers) and llama.cpp's context shift (on the model's own GGUF), with
full attention of each program as its ceiling. Four questions, every one to every entry in a process
of its own: perplexity of a long stream, perplexity of what follows a bounded prompt, pass keys, and
speed with memory. The peers are installed into environments of their own by the first run
(``requirements/kvpress.txt``, ``requirements/llama-cpp.txt``); one that cannot be installed is a
row that says why.

After an eviction every entry holds ``--kept`` tokens, and ``--stride`` more may come before the
next. llama.cpp drops half of its context instead, unless told otherwise: it runs as it is by
default, with a context of ``--kept``, and once more with the stride of the others.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks import models
from benchmarks.inputs import pass_keys, texts
from benchmarks.reporting import peers_report, results
from benchmarks.running import arms, scoring
from benchmarks.running.answers import as_tokens
from benchmarks.running.engines import BOOK, load_tokenizer, native_positions, quiet
from benchmarks.running.peers.environment import PeerUnavailable, python_of
from benchmarks.running.peers.process import PROGRAMS, Asked, Entry, Task, ask
from benchmarks.running.peers.questions import ASK

ANSWER_TOKENS = 16
SNAPKV_WINDOW = 32
"""Queries that SnapKV looks at while it decodes: its 64 need more than 64 tokens between times."""

PROMPT_ONLY = {"stream": "bounds the cache once, after a prompt that full attention reads"}
OBSERVED = {"stream": "weighs by the attention of a whole prompt, which a step does not have"}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", nargs="+", default=[str(BOOK)], help="files, folders, hf:...")
    parser.add_argument("--documents", type=int, help="stop after so many of a source")
    parser.add_argument("--kept", type=int, default=516, help="tokens cached, sinks included")
    parser.add_argument("--num-sinks", type=int, default=4)
    parser.add_argument("--stride", type=int, default=64, help="tokens between evictions")
    parser.add_argument("--policies", nargs="+", default=["sink", "cascade"])
    parser.add_argument("--base", default="cascade", help="policy that peers are compared with")
    peers = ("kvpress", "llama.cpp")
    parser.add_argument("--peers", nargs="*", choices=peers, default=peers)
    parser.add_argument("--questions", nargs="+", choices=tuple(ASK), default=tuple(ASK))
    parser.add_argument("--tokens", type=int, default=16_000, help="stream: tokens of a text")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens before a cache is asked")
    parser.add_argument("--prompts", type=int, default=100, help="continuation: how many")
    parser.add_argument("--depths", type=float, nargs="+", default=[0.1, 0.3, 0.5, 0.7, 0.9])
    parser.add_argument("--samples", type=int, default=10, help="passkey: prompts a depth")
    parser.add_argument("--speed-prompt", type=int, default=4096, help="speed: tokens to read")
    parser.add_argument("--new-tokens", type=int, default=128, help="speed: tokens to write")
    parser.add_argument("--trials", type=int, default=3, help="speed: prompts")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help="speed: of every program")
    parser.add_argument("--engines", type=int, default=1, help="programs at a time, but for speed")
    results.add_arguments(parser, "peers")
    args = parser.parse_args(argv)
    if args.base not in args.policies:
        parser.error(f"--base {args.base} is none of --policies {' '.join(args.policies)}")
    return args


# --- entries of equal size ----------------------------------------------------------------------


def entries(args: argparse.Namespace, positions: int) -> list[Entry]:
    """Every way to bound a cache, and full attention of every program, which ends at ``positions``.

    Raises:
        KVPolicyError: no budget of a policy fits ``args.kept``.
    """
    chosen = vllm_entries(args, positions)
    if "kvpress" in args.peers:
        chosen += kvpress_entries(args.kept, args.stride)
    if "llama.cpp" in args.peers:
        chosen += llama_entries(args.kept, args.stride, args.num_sinks, positions)
    return chosen


def vllm_entries(args: argparse.Namespace, positions: int) -> list[Entry]:
    """Stock vLLM and this project's policies."""
    prompts = max(args.prompt, args.speed_prompt) + args.stride + args.new_tokens
    full = {"policy": None, "positions": positions}
    found = [Entry("full, vLLM", "vLLM", full, bounded=False)]
    for name in args.policies:
        policy = scoring.equal_policy(
            name, args.kept, num_sinks=args.num_sinks, prefill_stride=args.stride
        )
        longest = max(args.tokens + 2, prompts)
        found.append(Entry(name, "vLLM", {"policy": policy, "positions": longest}))
    return found


def kvpress_entries(kept: int, stride: int) -> list[Entry]:
    """Presses after the prompt, and while decoding where kvpress allows that."""
    size = {"kept": kept, "interval": stride, "step": stride}
    window = {"decoding_options": {"window_size": min(SNAPKV_WINDOW, stride - 1)}}
    streaming, observed = {"press": "StreamingLLMPress"}, {"press": "ObservedAttentionPress"}
    once = {
        "StreamingLLM, re-rotated": ({**streaming, "rerotated": True}, PROMPT_ONLY),
        "observed attention": ({**observed, "attention": "eager"}, OBSERVED),
    }
    always: dict[str, dict[str, Any]] = {
        "StreamingLLM": streaming,
        "SnapKV": {"press": "SnapKVPress", **window},
        "expected attention": {"press": "ExpectedAttentionPress"},
        "TOVA": {"press": "TOVAPress"},
        "KeyDiff": {"press": "KeyDiffPress"},
    }
    return [
        Entry("full, transformers", "kvpress", bounded=False),
        *(
            Entry(f"kvpress {name}", "kvpress", {**size, **settings}, cannot=cannot)
            for name, (settings, cannot) in once.items()
        ),
        *(
            Entry(f"kvpress {name}", "kvpress", {**size, **settings, "decoding": True})
            for name, settings in always.items()
        ),
    ]


def llama_entries(kept: int, stride: int, sinks: int, positions: int) -> list[Entry]:
    """llama.cpp as it shifts by itself, and told to shift as often as the others evict."""
    own = {"context": kept, "keep": sinks}
    equal = {"context": kept + stride, "keep": sinks, "discard": stride}
    return [
        Entry("full, llama.cpp", "llama.cpp", {"context": positions}, bounded=False),
        Entry("llama.cpp shift, half", "llama.cpp", own),
        Entry(f"llama.cpp shift, {stride}", "llama.cpp", equal),
    ]


# --- questions ----------------------------------------------------------------------------------


def items(args: argparse.Namespace, tokenizer: Any, positions: int) -> dict[str, list[Any]]:
    """What is asked, by question of ``--questions``: token ids, the same for every entry.

    Raises:
        ValueError: a text that is too short, or a prompt that full attention could not read.
    """
    for name, length in (("--prompt", args.prompt), ("--speed-prompt", args.speed_prompt)):
        if not args.kept < length <= positions - args.new_tokens - args.stride:
            raise ValueError(
                f"{name} {length}: more than --kept {args.kept}, and room for what follows in the "
                f"model's {positions} positions, is needed"
            )
    found: dict[str, str] = {}
    for source in args.data:
        found |= texts.read(source, args.documents)
    documents = [tokenizer(text)["input_ids"] for text in found.values()]
    longest = max(documents, key=len)
    starts = spread_out(len(longest) - args.speed_prompt, args.trials)
    made: dict[str, Callable[[], list[Any]]] = {
        "stream": lambda: [ids[: args.tokens] for ids in documents],
        "continuation": lambda: continuations(documents, args.prompt, args.stride, args.prompts),
        "passkey": lambda: asked_keys(args, tokenizer, max(found.values(), key=len)),
        "speed": lambda: [
            {"prompt": longest[start : start + args.speed_prompt], "new": args.new_tokens}
            for start in starts
        ],
    }
    return {question: make() for question, make in made.items() if question in args.questions}


def asked_keys(args: argparse.Namespace, tokenizer: Any, text: str) -> list[dict[str, Any]]:
    """Pass keys as a user's turn, in two parts: a cache is bounded before the question is read."""
    hidden = pass_keys.hide(
        tokenizer,
        text,
        lambda prompt: as_tokens(tokenizer, prompt, chat=True),
        pass_keys.ASKED,
        lengths=[args.prompt],
        depths=args.depths,
        samples=args.samples,
        seed=0,
    )
    asked = pass_keys.ASKED.partition("{text}")[2].strip()
    made = []
    for one in hidden:
        place = begin_of(tokenizer, one.prompt, asked)
        context, question = list(one.prompt[:place]), list(one.prompt[place:])
        parts_ = {"context": context, "question": question, "most": ANSWER_TOKENS}
        made.append({"depth": one.depth, "key": one.key, **parts_})
    return made


def begin_of(tokenizer: Any, token_ids: Sequence[int], words: str) -> int:
    """The last token that a text's tokens can be cut before, so that the rest has ``words``.

    Raises:
        ValueError: the text does not have them.
    """
    for place in reversed(range(len(token_ids))):
        if words in tokenizer.decode(list(token_ids[place:])):
            return place
    raise ValueError(f"the prompt does not contain {words!r}")


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


# --- asking -------------------------------------------------------------------------------------


def unavailable(chosen: Sequence[Entry]) -> dict[str, str]:
    """Programs that are not here and cannot be installed, and why; installs the others."""
    found = {}
    for program in dict.fromkeys(entry.program for entry in chosen):
        _, peer = PROGRAMS[program]
        try:
            if peer:
                python_of(peer)
        except PeerUnavailable as error:
            found[program] = str(error)
    return found


def ask_all(
    args: argparse.Namespace, chosen: Sequence[Entry], task: Task, asked: dict[str, list[Any]]
) -> peers_report.Answers:
    """Every question to every entry that can be asked it; times last, one program at a time."""
    missing = unavailable(chosen)
    answers = peers_report.Answers({}, {}, {})
    jobs: dict[bool, list[Asked]] = {False: [], True: []}
    for question in args.questions:
        timed = question == "speed"
        for entry in chosen:
            key = entry.label, question
            if question in entry.cannot:
                answers.cannot[key] = entry.cannot[question]
            elif entry.program in missing:
                answers.failed[key] = missing[entry.program]
            else:
                settings = entry.settings
                if timed and entry.program == "vLLM":
                    settings = {**settings, "compiled": True}
                one = replace(task, program=entry.program, settings=settings)
                one = replace(one, threads=args.threads if timed else 1)
                jobs[timed].append(Asked(entry, question, one, tuple(asked[question])))
    for timed, some in jobs.items():
        kept = results.parts_of(args)
        found = arms.run_all(ask, some, 1 if timed else args.engines, kept)
        for job in some:
            key = job.entry.label, job.question
            if job.label in found.done:
                answers.found[key] = found.done[job.label]
            else:
                answers.failed[key] = found.failed[job.label]
    return answers


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    args = parse_args(argv)
    quiet()
    model = str(models.real_model())
    task = Task("", {}, model, str(models.real_gguf()), threads=1)
    tokenizer, positions = load_tokenizer(model), native_positions(model)
    chosen, asked = entries(args, positions), items(args, tokenizer, positions)
    answers = ask_all(args, chosen, task, asked)
    report = peers_report.Report(chosen, answers, asked, positions, args.base, tokenizer.decode)
    results.save(args.out, report.tables(), report.numbers(), vars(args), argv)
    results.end({", ".join(key): why for key, why in answers.failed.items()})


if __name__ == "__main__":
    main()
