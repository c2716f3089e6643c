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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks import models
from benchmarks.inputs import pass_keys, texts
from benchmarks.inputs.pass_keys import is_exact
from benchmarks.reporting import results, stats
from benchmarks.reporting.tables import Table, number, spread
from benchmarks.running import arms, scoring
from benchmarks.running.answers import as_tokens
from benchmarks.running.engines import BOOK, load_tokenizer, native_positions, quiet
from benchmarks.running.peers.environment import PeerUnavailable, python_of, requirements
from benchmarks.running.peers.process import PROGRAMS, Asked, Entry, Task, ask
from benchmarks.running.peers.questions import QUESTIONS

ANSWER_TOKENS = 16
MIB = 1 << 20
Key = tuple[str, str]
"""An entry's label and a question."""
SNAPKV_WINDOW = 32
"""Queries that SnapKV looks at while it decodes: its 64 need more than 64 tokens between times."""

PROMPT_ONLY = {"stream": "bounds the cache once, after a prompt that full attention reads"}
OBSERVED = {"stream": "weighs by the attention of a whole prompt, which a step does not have"}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = results.parser_of("peers", __doc__, parts=True)
    add, programs = parser.add_argument, ("kvpress", "llama.cpp")
    add("--data", nargs="+", default=[str(BOOK)], help="files, folders, hf:...")
    add("--documents", type=int, help="stop after so many of a source")
    add("--kept", type=int, default=516, help="tokens cached, sinks included")
    add("--num-sinks", type=int, default=4)
    add("--stride", type=int, default=64, help="tokens between evictions")
    add("--policies", nargs="+", default=["sink", "cascade"])
    add("--base", default="cascade", help="policy that peers are compared with")
    add("--peers", nargs="*", choices=programs, default=programs)
    add("--questions", nargs="+", choices=QUESTIONS, default=QUESTIONS)
    add("--tokens", type=int, default=16_000, help="stream: tokens of a text")
    add("--prompt", type=int, default=2048, help="tokens before a cache is asked")
    add("--prompts", type=int, default=100, help="continuation: how many")
    add("--depths", type=float, nargs="+", default=[0.1, 0.3, 0.5, 0.7, 0.9])
    add("--samples", type=int, default=10, help="passkey: prompts a depth")
    add("--speed-prompt", type=int, default=4096, help="speed: tokens to read")
    add("--new-tokens", type=int, default=128, help="speed: tokens to write")
    add("--trials", type=int, default=3, help="speed: prompts")
    cores = len(os.sched_getaffinity(0))
    add("--threads", type=int, default=cores, help="speed: of every program")
    add("--engines", type=int, default=1, help="programs at a time, but for speed")
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
    prompts = max(args.prompt, args.speed_prompt) + args.stride + args.new_tokens
    full = {"policy": None, "positions": positions}
    chosen = [Entry("full, vLLM", "vLLM", full, bounded=False)]
    for name in args.policies:
        policy = scoring.equal_policy(
            name, args.kept, num_sinks=args.num_sinks, prefill_stride=args.stride
        )
        longest = max(args.tokens + 2, prompts)
        chosen.append(Entry(name, "vLLM", {"policy": policy, "positions": longest}))
    if "kvpress" in args.peers:
        chosen += kvpress_entries(args.kept, args.stride)
    if "llama.cpp" in args.peers:
        context, sinks = {"context": positions}, args.num_sinks
        own = {"context": args.kept, "keep": sinks}
        equal = {"context": args.kept + args.stride, "keep": sinks, "discard": args.stride}
        chosen += [
            Entry("full, llama.cpp", "llama.cpp", context, bounded=False),
            Entry("llama.cpp shift, half", "llama.cpp", own),
            Entry(f"llama.cpp shift, {args.stride}", "llama.cpp", equal),
        ]
    return chosen


def kvpress_entries(kept: int, stride: int) -> list[Entry]:
    """Presses after the prompt, and while decoding where kvpress allows that."""
    size = {"kept": kept, "interval": stride, "step": stride}
    window = {"decoding_options": {"window_size": min(SNAPKV_WINDOW, stride - 1)}}
    always, once = {"decoding": True}, {"rerotated": True}
    presses: list[tuple[str, str, dict[str, Any], dict[str, str]]] = [
        ("StreamingLLM, re-rotated", "StreamingLLMPress", once, PROMPT_ONLY),
        ("observed attention", "ObservedAttentionPress", {"attention": "eager"}, OBSERVED),
        ("StreamingLLM", "StreamingLLMPress", always, {}),
        ("SnapKV", "SnapKVPress", {**always, **window}, {}),
        ("expected attention", "ExpectedAttentionPress", always, {}),
        ("TOVA", "TOVAPress", always, {}),
        ("KeyDiff", "KeyDiffPress", always, {}),
    ]
    return [
        Entry("full, transformers", "kvpress", bounded=False),
        *(
            Entry(f"kvpress {name}", "kvpress", {**size, "press": press, **own}, cannot=cannot)
            for name, press, own, cannot in presses
        ),
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
    found = texts.read_all(args.data, args.documents)
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
    whole = length + following
    places = [(ids, at) for ids in documents for at in range(len(ids) - whole + 1)]
    return [
        {"prompt": ids[at : at + length], "following": ids[at + length : at + whole]}
        for ids, at in (places[index] for index in spread_out(len(places), count))
    ]


def spread_out(room: int, count: int) -> list[int]:
    """``count`` places in ``range(room)``, evenly.

    Raises:
        ValueError: a text with less room than places.
    """
    if room < count:
        raise ValueError(f"the text is too short: {max(room, 0)} places for {count} prompts")
    return [room * index // count for index in range(count)]


# --- the report ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answers:
    """The answers of each entry to each question, by the entry's label and the question.

    Attributes:
        found: an answer an item.
        cannot: why it was not asked. ``failed``: why there is no answer.
    """

    found: dict[Key, list[dict[str, Any]]]
    cannot: dict[Key, str]
    failed: dict[Key, str]


@dataclass(frozen=True)
class Measure:
    """A number that entries are compared by.

    Attributes:
        values: per entry, one float array a unit that can be resampled; nats or exact matches.
    """

    name: str
    values: dict[str, list[np.ndarray]]
    more_is_better: bool = False

    def compared(self, label: str, base: str) -> tuple[str, str]:
        """Better, worse or undecided, and the difference; empty if not measured."""
        if not self.values.get(label):
            return "", "-"
        block = 1 if self.more_is_better else stats.BLOCK
        found = stats.paired_difference(self.values[label], self.values[base], block=block)
        if found.units < 2 or found.low <= 0 <= found.high:
            verdict = "undecided"
        else:
            verdict = "better" if (found.mean > 0) == self.more_is_better else "worse"
        return verdict, f"{found}, {verdict}"


@dataclass(frozen=True)
class Report:
    """Tables and numbers of a run.

    Attributes:
        asked: what was asked, by question.
        positions: that the model has.
        base: the entry of this project that peers are compared with.
        decode: token ids to text.
    """

    entries: Sequence[Entry]
    answers: Answers
    asked: Mapping[str, list[Any]]
    positions: int
    base: str
    decode: Callable[[list[int]], str]

    @property
    def limit(self) -> int:
        """Tokens of a stream that every program reads with full attention: vLLM writes two."""
        return self.positions - 2

    def tables(self) -> list[Table]:
        """All entries, peers beside the base, and what is missing."""
        rows = [{"entry": entry.label, **self._cells(entry)} for entry in self.entries]
        names = ("entry", "question", "", "why")
        made = [
            Table.of("The same model, tokens and cached tokens", rows, self._note()),
            self._verdicts(),
            Table("What is missing", names, tuple(self.missing())),
        ]
        return [table for table in made if table.rows]

    def found(self, entry: Entry, question: str) -> list[Any]:
        """An entry's answers, one an item; empty if there are none."""
        return [one["found"] for one in self.answers.found.get((entry.label, question), [])]

    def streams(self, entry: Entry, past: bool) -> list[np.ndarray]:
        """Nats of tokens within the model's positions, or past them; empty if not measured."""
        end = self.limit - 1  # element i is token i + 1
        texts_ = self.found(entry, "stream")
        parts = [np.asarray(text[end:] if past else text[:end]) for text in texts_]
        return [part for part in parts if len(part)]

    def continuations(self, entry: Entry) -> list[np.ndarray]:
        """Nats of what follows each prompt."""
        return [np.asarray(one) for one in self.found(entry, "continuation")]

    def matches(self, entry: Entry) -> list[np.ndarray]:
        """Whether each pass key was answered, 0 or 1."""
        texts_ = [self.decode(ids) for ids in self.found(entry, "passkey")]
        pairs = zip(texts_, self.asked.get("passkey", []), strict=False)
        return [np.asarray([float(is_exact(text, item["key"]))]) for text, item in pairs]

    def measures(self) -> list[Measure]:
        """Everything that has an interval."""

        def of(find: Callable[[Entry], list[np.ndarray]]) -> dict[str, list[np.ndarray]]:
            return {entry.label: found for entry in self.entries if (found := find(entry))}

        return [
            Measure(f"stream to {self.limit:,}", of(lambda entry: self.streams(entry, False))),
            Measure("stream past that", of(lambda entry: self.streams(entry, True))),
            Measure("after a prompt", of(self.continuations)),
            Measure("pass keys", of(self.matches), more_is_better=True),
        ]

    def speeds(self, entry: Entry) -> dict[str, list[float]]:
        """Tokens a second of each trial, read and written; MiB of the process and of its cache."""
        found = self.found(entry, "speed")
        pairs = list(zip(self.asked.get("speed", []), found, strict=False))
        if not found:
            return {}
        held = self.answers.found[entry.label, "speed"][-1]["held"]["bytes"]
        return {
            "read": [len(item["prompt"]) / one["read"] for item, one in pairs],
            "write": [(item["new"] - 1) / one["decode"] for item, one in pairs],
            "memory": [max(one["resident_peak"] for one in found) / MIB],
            "KV": [held / MIB],
        }

    def numbers(self) -> dict[str, Any]:
        """For the JSON: settings, means and sizes of every entry, and why some are missing."""
        kept: dict[str, Any] = {
            entry.label: {"program": entry.program, "settings": entry.settings}
            for entry in self.entries
        }
        for measure in self.measures():
            for label, values in measure.values.items():
                mean, count = float(np.concatenate(values).mean()), sum(map(len, values))
                kept[label][measure.name] = {"mean": mean, "count": count}
        for (label, question), answers in self.answers.found.items():
            kept[label][f"held for {question}"] = answers[-1]["held"]
        for label, question, word, why in self.missing():
            kept[label][question] = {word: why}
        return kept

    def missing(self) -> list[tuple[str, str, str, str]]:
        """Entry, question, ``cannot`` or ``failed``, and why."""
        kinds = (("cannot", self.answers.cannot), ("failed", self.answers.failed))
        return [(*key, word, why) for word, of in kinds for key, why in of.items()]

    def _cells(self, entry: Entry) -> dict[str, str]:
        """A row of the first table; ``*`` where memory is that of loading, too."""
        near, past = (_perplexity(self.streams(entry, past)) for past in (False, True))
        prompt = _length(self.asked, "continuation", "prompt")
        matches, speeds = self.matches(entry), self.speeds(entry)
        speed = dict.fromkeys(("read tok/s", "write tok/s", "memory MiB", "KV MiB"), "-")
        if speeds:
            mark = "*" if self.found(entry, "speed")[0]["load_included"] else ""
            speed["read tok/s"] = spread(speeds["read"], 0)
            speed["write tok/s"] = spread(speeds["write"], 1)
            speed["memory MiB"] = number(speeds["memory"][0], 0) + mark
            speed["KV MiB"] = number(speeds["KV"][0], 1)
        after = _perplexity(self.continuations(entry))
        of = {
            "stream": {f"perplexity to {self.limit:,}": near, "past that": past},
            "continuation": {f"after {prompt:,} tokens": after},
            "passkey": {"pass key": f"{np.mean(matches):.0%}" if matches else "-"},
            "speed": speed,
        }
        shown = [of[question] for question in QUESTIONS if question in self.asked]
        return {name: cell for cells in shown for name, cell in cells.items()}

    def _note(self) -> str:
        """The columns that were asked, and the programs' versions."""
        stream = sum(len(ids) for ids in self.asked.get("stream", []))
        following = _length(self.asked, "continuation", "following")
        count, keys = (len(self.asked.get(name, [])) for name in ("continuation", "passkey"))
        read = _length(self.asked, "speed", "prompt")
        parts = {
            "stream": f"perplexity of {stream:,} tokens that go through one cache a text",
            "continuation": f"perplexity of the {following} tokens that follow each of {count} "
            "prompts, once their cache was bounded",
            "passkey": f"exact answers to {keys} pass keys",
            "speed": f"speed with {read:,} tokens to read; memory is the most that the process had "
            "resident while it read and wrote (weights and program included; *: and while it "
            "loaded), KV the most in use",
        }
        said = "; ".join(text for question, text in parts.items() if question in self.asked)
        return (
            f"{said[:1].upper()}{said[1:]}. The presses read a whole prompt with full attention "
            "and bound the cache layer by layer after it; this project and llama.cpp never hold "
            f"more while they read. {versions()}"
        )

    def _verdicts(self) -> Table:
        """Every peer beside the base, with intervals."""
        measures = [measure for measure in self.measures() if self.base in measure.values]
        rows, better = [], []
        for entry in self.entries if measures else ():
            if not entry.bounded or entry.program == "vLLM":
                continue
            row = {"peer": entry.label}
            for measure in measures:
                verdict, row[measure.name] = measure.compared(entry.label, self.base)
                if verdict == "better":
                    better.append(f"{entry.label} ({measure.name})")
            rows.append(row)
        said = f"Better than {self.base}: {', '.join(better)}."
        if not better:
            said = f"No peer is better than {self.base} in any of these."
        share = " (or share of pass keys)" if "passkey" in self.asked else ""
        note = (
            f"Nats a token{share} more than {self.base}, with 95 % intervals; undecided where they "
            f"hold 0. {said} Programs round differently: compare their rows of full attention."
        )
        return Table.of(f"Peers against {self.base}", rows, note)


def versions() -> str:
    """The peers' pinned versions, as a sentence."""
    pins: dict[str, str] = {}
    for peer in ("kvpress", "llama-cpp"):
        lines = requirements(peer).read_text("utf-8").splitlines()
        pins |= dict(line.split("==") for line in lines if "==" in line)
    return (
        f"kvpress {pins['kvpress']} on transformers {pins['transformers']}, in bf16; "
        f"llama-cpp-python {pins['llama-cpp-python']}, with the GGUF's 4-bit weights and an f16 "
        "cache; vLLM in bf16."
    )


def _perplexity(values: Sequence[np.ndarray]) -> str:
    return number(stats.perplexity(values)) if values else "-"


def _length(asked: Mapping[str, list[Any]], question: str, part: str) -> int:
    return len(asked[question][0][part]) if asked.get(question) else 0


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
) -> Answers:
    """Every question to every entry that can be asked it; times last, one program at a time.

    Times are neither kept nor taken up: those of one table are from one run.
    """
    missing = unavailable(chosen)
    answers = Answers({}, {}, {})
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
                label, its_items = ", ".join(key), tuple(asked[question])
                jobs[timed].append(Asked(label, entry, question, one, its_items))
    for timed, some in jobs.items():
        found = arms.run_all(ask, some) if timed else results.run_arms(ask, some, args)
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
    report = Report(chosen, answers, asked, positions, args.base, tokenizer.decode)
    failed = {", ".join(key): why for key, why in answers.failed.items()}
    results.finish(args, argv, report.tables(), report.numbers(), failed)


if __name__ == "__main__":
    main()
