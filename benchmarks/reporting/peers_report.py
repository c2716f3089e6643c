# SPDX-License-Identifier: Apache-2.0
"""What the runs of ``benchmarks.peers`` say: one table, who is better, what is missing."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.inputs.pass_keys import digits_right, is_exact
from benchmarks.reporting import stats
from benchmarks.reporting.tables import Table, number, spread
from benchmarks.running.peers.environment import requirements
from benchmarks.running.peers.process import Entry

MIB = 1 << 20
Key = tuple[str, str]
"""An entry's label and a question."""


@dataclass(frozen=True)
class Answers:
    """What came of each question to each entry.

    Attributes:
        found: an answer an item.
        cannot: why it was not asked. ``failed``: why there is no answer.
    """

    found: dict[Key, list[dict[str, Any]]]
    cannot: dict[Key, str]
    failed: dict[Key, str]


@dataclass(frozen=True)
class Measure:
    """Something that entries are compared by.

    Attributes:
        values: per entry, one float array a unit that can be resampled; nats or exact matches.
        more_is_better: False for nats.
    """

    name: str
    values: dict[str, list[np.ndarray]]
    more_is_better: bool = False


@dataclass(frozen=True)
class Report:
    """Tables and numbers of a run.

    Attributes:
        asked: what was asked, by question; others are not spoken of.
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
        """The one table first; the others say what it leaves out."""
        made = [self._overall(), self._verdicts(), self._depths(), self._missing()]
        return [table for table in made if table.rows]

    def numbers(self) -> dict[str, Any]:
        """For the JSON: every entry's results, as far as they are not a number a token."""
        return {entry.label: self._numbers(entry) for entry in self.entries}

    # --- what was found -------------------------------------------------------------------------

    def found(self, entry: Entry, question: str) -> list[Any]:
        """An entry's answers, one an item; empty where there are none."""
        return [one["found"] for one in self.answers.found.get((entry.label, question), [])]

    def streams(self, entry: Entry, past: bool) -> list[np.ndarray]:
        """Nats of tokens within the model's positions, or past them; empty if not measured."""
        found = self.found(entry, "stream")
        end = self.limit - 1  # entry i is token i + 1
        parts = [np.asarray(text[end:] if past else text[:end]) for text in found]
        return [part for part in parts if len(part)]

    def continuations(self, entry: Entry) -> list[np.ndarray]:
        """Nats of what follows each prompt."""
        return [np.asarray(one) for one in self.found(entry, "continuation")]

    def matches(self, entry: Entry) -> list[float]:
        """Whether each pass key was answered, 0 or 1."""
        texts = [self.decode(ids) for ids in self.found(entry, "passkey")]
        keys = [item["key"] for item in self.asked.get("passkey", [])]
        return [float(is_exact(text, key)) for text, key in zip(texts, keys, strict=False)]

    def measures(self) -> list[Measure]:
        """What can be compared with an interval."""

        def of(find: Callable[[Entry], list[np.ndarray]]) -> dict[str, list[np.ndarray]]:
            return {entry.label: found for entry in self.entries if (found := find(entry))}

        def keys(entry: Entry) -> list[np.ndarray]:
            return [np.asarray([match]) for match in self.matches(entry)]

        return [
            Measure(f"stream to {self.limit:,}", of(lambda entry: self.streams(entry, False))),
            Measure("stream past that", of(lambda entry: self.streams(entry, True))),
            Measure("after a prompt", of(self.continuations)),
            Measure("pass keys", of(keys), more_is_better=True),
        ]

    def _numbers(self, entry: Entry) -> dict[str, Any]:
        kept: dict[str, Any] = {"program": entry.program, "settings": entry.settings}
        for measure in self.measures():
            if values := measure.values.get(entry.label):
                kept[measure.name] = {
                    "mean": float(np.concatenate(values).mean()),
                    "count": sum(map(len, values)),
                }
        if self.matches(entry):
            kept["pass key answers"] = [self.decode(ids) for ids in self.found(entry, "passkey")]
        for question in self.asked:
            key = entry.label, question
            for word, why in (("cannot", self.answers.cannot), ("failed", self.answers.failed)):
                if key in why:
                    kept[question] = {word: why[key]}
            if key in self.answers.found:
                kept[f"held for {question}"] = self.answers.found[key][-1]["held"]
        if speed := self.found(entry, "speed"):
            kept["speed"] = speed
        return kept

    # --- tables ---------------------------------------------------------------------------------

    def _overall(self) -> Table:
        """A row an entry, and columns for what was asked."""
        prompt = _length(self.asked, "continuation", "prompt")
        columns: dict[str, tuple[tuple[str, ...], Callable[[Entry], tuple[str, ...]]]] = {
            "stream": (
                (f"perplexity to {self.limit:,}", "past that"),
                lambda entry: (
                    _perplexity(self.streams(entry, False)),
                    _perplexity(self.streams(entry, True)),
                ),
            ),
            "continuation": (
                (f"after {prompt:,} tokens",),
                lambda entry: (_perplexity(self.continuations(entry)),),
            ),
            "passkey": (("pass key",), lambda entry: (_share(self.matches(entry)),)),
            "speed": (("read tok/s", "write tok/s", "memory MiB", "KV MiB"), self._speed),
        }
        shown = [columns[question] for question in columns if question in self.asked]
        names = ("entry", *(name for group, _ in shown for name in group))
        rows = [
            (entry.label, *(cell for _, cells in shown for cell in cells(entry)))
            for entry in self.entries
        ]
        return Table("The same model, tokens and cached tokens", names, tuple(rows), self._note())

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

    def _speed(self, entry: Entry) -> tuple[str, str, str, str]:
        """Median and range of the trials; ``*`` where memory is that of loading, too."""
        found = self.speeds(entry)
        if not found:
            return ("-", "-", "-", "-")
        mark = "*" if self.found(entry, "speed")[0]["load_included"] else ""
        return (
            spread(found["read"], 0),
            spread(found["write"], 1),
            number(found["memory"][0], 0) + mark,
            number(found["KV"][0], 1),
        )

    def _note(self) -> str:
        """What the columns are, of what was asked."""
        stream = sum(len(ids) for ids in self.asked.get("stream", []))
        following = _length(self.asked, "continuation", "following")
        count, keys = (len(self.asked.get(name, [])) for name in ("continuation", "passkey"))
        read = _length(self.asked, "speed", "prompt")
        parts = {
            "stream": f"perplexity of {stream:,} tokens that go through one cache a text",
            "continuation": f"perplexity of the {following} tokens that follow each of {count} "
            "prompts, once their cache was bounded",
            "passkey": f"exact answers to {keys} pass keys",
            "speed": f"speed with {read:,} tokens to read, where memory is the most that the "
            "process had resident while it read and wrote (weights and program included; *: and "
            f"while it loaded) and KV the most in use{self._when()}",
        }
        said = "; ".join(text for question, text in parts.items() if question in self.asked)
        return (
            f"{said[:1].upper()}{said[1:]}. The presses read a whole prompt with full attention "
            "and bound the cache layer by layer after it; this project and llama.cpp never hold "
            f"more while they read. {versions()}"
        )

    def _when(self) -> str:
        """Over which part of a day the times were taken: they are to be compared if it is short."""
        at = [one["at"] for entry in self.entries for one in self.found(entry, "speed")]
        return f", timed from {_clock(min(at))} to {_clock(max(at))} UTC" if at else ""

    def _verdicts(self) -> Table:
        """Every peer beside the base, with intervals."""
        peers = [entry for entry in self.entries if entry.bounded and entry.program != "vLLM"]
        measures = [measure for measure in self.measures() if self.base in measure.values]
        rows, better = [], []
        for entry in peers:
            cells = [_compared(measure, entry.label, self.base) for measure in measures]
            rows.append((entry.label, *(text for _, text in cells)))
            for measure, (verdict, _) in zip(measures, cells, strict=True):
                if verdict == "better":
                    better.append(f"{entry.label} ({measure.name})")
        better += self._faster(peers)
        also = ", in speed or in memory" if "speed" in self.asked else ""
        said = (
            f"Better than {self.base}: {', '.join(better)}."
            if better
            else f"No peer is better than {self.base} in any of these{also}."
        )
        share = " (or share of pass keys)" if "passkey" in self.asked else ""
        note = (
            f"Nats a token{share} more than {self.base}, with 95 % intervals; undecided where they "
            f"hold 0. {said} Programs round differently: compare their rows of full attention."
        )
        columns = ("peer", *(measure.name for measure in measures))
        return Table(f"Peers against {self.base}", columns, tuple(rows if measures else ()), note)

    def _faster(self, peers: Sequence[Entry]) -> list[str]:
        """Peers of which every trial was better than every one of the base."""
        bases = [self.speeds(entry) for entry in self.entries if entry.label == self.base]
        ours = bases[0] if bases else {}
        found = []
        for entry in peers:
            theirs = self.speeds(entry) if ours else {}
            faster = [k for k in ("read", "write") if theirs and min(theirs[k]) > max(ours[k])]
            smaller = [k for k in ("memory", "KV") if theirs and theirs[k] < ours[k]]
            if faster or smaller:
                found.append(f"{entry.label} ({', '.join(faster + smaller)})")
        return found

    def _depths(self) -> Table:
        keys = self.asked.get("passkey", [])
        depths = sorted({item["depth"] for item in keys})
        rows = []
        for entry in self.entries:
            texts = [self.decode(ids) for ids in self.found(entry, "passkey")]
            if texts:
                cells = [_cell(texts, keys, depth) for depth in depths]
                rows.append((entry.label, *cells))
        columns = ("entry", *(f"depth {depth:g}" for depth in depths))
        each = len(keys) // max(len(depths), 1)
        note = (
            f"Exact answers, and digits that are right (guessing gives 10 %); {each} prompts of "
            f"{_length(self.asked, 'passkey', 'context'):,} tokens a depth. The question comes "
            "after the cache was bounded."
        )
        return Table("Pass keys by depth", columns, tuple(rows), note)

    def _missing(self) -> Table:
        rows = [
            (label, question, word, why)
            for word, all_ in (("cannot", self.answers.cannot), ("failed", self.answers.failed))
            for (label, question), why in all_.items()
        ]
        return Table("What is missing", ("entry", "question", "", "why"), tuple(rows))


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


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M", time.gmtime(seconds))


def _perplexity(values: Sequence[np.ndarray]) -> str:
    return number(stats.perplexity(values)) if values else "-"


def _share(matches: Sequence[float]) -> str:
    return f"{np.mean(matches):.0%}" if matches else "-"


def _length(asked: Mapping[str, list[Any]], question: str, part: str) -> int:
    return len(asked[question][0][part]) if asked.get(question) else 0


def _compared(measure: Measure, label: str, base: str) -> tuple[str, str]:
    """Better, worse or undecided, and the difference; empty for what was not measured."""
    values, zero = measure.values.get(label), measure.values[base]
    if not values:
        return "", "-"
    block = 1 if measure.more_is_better else stats.BLOCK
    found = stats.paired_difference(values, zero, block=block)
    if found.units < 2 or found.low <= 0 <= found.high:
        verdict = "undecided"
    else:
        verdict = "better" if (found.mean > 0) == measure.more_is_better else "worse"
    return verdict, f"{found}, {verdict}"


def _cell(texts: Sequence[str], keys: Sequence[Mapping[str, Any]], depth: float) -> str:
    pairs = [(t, k["key"]) for t, k in zip(texts, keys, strict=True) if k["depth"] == depth]
    right = np.mean([is_exact(text, key) for text, key in pairs])
    digits = np.mean([digits_right(text, key) for text, key in pairs])
    return f"{right:.0%} ({digits:.0%})"
