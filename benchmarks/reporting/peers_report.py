# SPDX-License-Identifier: Apache-2.0
"""What the runs of ``benchmarks.peers`` say: one table, who is better, what is missing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.inputs.pass_keys import digits_right, exact
from benchmarks.reporting import stats
from benchmarks.reporting.tables import Table, number, spread
from benchmarks.running.environment import ROOT
from benchmarks.running.peers.answers import Answer
from benchmarks.running.peers.process import Arm

MIB = 1 << 20


@dataclass(frozen=True)
class Measure:
    """Something that arms are compared by.

    Attributes:
        values: per arm, one float array a unit that can be resampled; nats or exact matches.
        more_is_better: False for nats.
    """

    name: str
    values: dict[str, list[np.ndarray]]
    more_is_better: bool = False


@dataclass(frozen=True)
class Report:
    """Tables and numbers of a run.

    Attributes:
        answers: by arm's label and question.
        asked: what was asked, by question.
        positions: that the model has.
        base: the arm of this project that peers are compared with.
        decode: token ids to text.
    """

    arms: Sequence[Arm]
    answers: Mapping[tuple[str, str], Answer]
    asked: Mapping[str, list[Any]]
    positions: int
    base: str
    decode: Callable[[list[int]], str]

    def tables(self) -> list[Table]:
        """The one table first; the others say what it leaves out."""
        made = [self._overall(), self._verdicts(), self._depths(), self._missing()]
        return [table for table in made if table.rows]

    def numbers(self) -> dict[str, Any]:
        """For the JSON: every arm's results, as far as they are not a number a token."""
        return {arm.label: self._numbers(arm) for arm in self.arms}

    # --- what was found -------------------------------------------------------------------------

    def found(self, arm: Arm, question: str) -> Any:
        """An arm's answer; None where there is none."""
        return self.answers.get((arm.label, question), {}).get("found")

    def streams(self, arm: Arm, past: bool) -> list[np.ndarray]:
        """Nats of tokens within the model's positions, or past them; empty if not measured."""
        found = self.found(arm, "stream") or []
        end = self.positions - 1  # entry i is token i + 1
        parts = [np.asarray(text[end:] if past else text[:end]) for text in found]
        return [part for part in parts if len(part)]

    def continuations(self, arm: Arm) -> list[np.ndarray]:
        """Nats of what follows each prompt."""
        return [np.asarray(one) for one in self.found(arm, "continuation") or []]

    def matches(self, arm: Arm) -> list[float]:
        """Whether each pass key was answered, 0 or 1."""
        texts = [self.decode(ids) for ids in self.found(arm, "passkey") or []]
        keys = [item["key"] for item in self.asked["passkey"]]
        return [float(exact(text, key)) for text, key in zip(texts, keys, strict=False)]

    def measures(self) -> list[Measure]:
        """What can be compared with an interval."""

        def of(find: Callable[[Arm], list[np.ndarray]]) -> dict[str, list[np.ndarray]]:
            return {arm.label: found for arm in self.arms if (found := find(arm))}

        def keys(arm: Arm) -> list[np.ndarray]:
            return [np.asarray([match]) for match in self.matches(arm)]

        return [
            Measure(f"stream to {self.positions:,}", of(lambda arm: self.streams(arm, False))),
            Measure("stream past that", of(lambda arm: self.streams(arm, True))),
            Measure("after a prompt", of(self.continuations)),
            Measure("pass keys", of(keys), more_is_better=True),
        ]

    def _numbers(self, arm: Arm) -> dict[str, Any]:
        kept: dict[str, Any] = {"program": arm.program, "settings": arm.settings}
        for measure in self.measures():
            if values := measure.values.get(arm.label):
                kept[measure.name] = {
                    "mean": float(np.concatenate(values).mean()),
                    "count": sum(map(len, values)),
                }
        if self.matches(arm):
            kept["pass key answers"] = [self.decode(ids) for ids in self.found(arm, "passkey")]
        for question in self.asked:
            if (answer := self.answers.get((arm.label, question))) is not None:
                kept[question] = {key: answer[key] for key in answer if key not in ("found", "run")}
        if speed := self.found(arm, "speed"):
            kept["speed"] |= speed
        return kept

    # --- tables ---------------------------------------------------------------------------------

    def _overall(self) -> Table:
        rows = [
            (
                arm.label,
                _perplexity(self.streams(arm, False)),
                _perplexity(self.streams(arm, True)),
                _perplexity(self.continuations(arm)),
                _share(self.matches(arm)),
                *self._speed(arm),
            )
            for arm in self.arms
        ]
        prompt = _length(self.asked, "continuation", "prompt")
        columns = (
            "arm",
            f"perplexity to {self.positions:,}",
            "past that",
            f"after {prompt:,} tokens",
            "pass key",
            "read tok/s",
            "write tok/s",
            "memory MiB",
            "KV MiB",
        )
        return Table("The same model, tokens and cached tokens", columns, tuple(rows), self._note())

    def _speed(self, arm: Arm) -> tuple[str, str, str, str]:
        """Tokens a second, median and range of the trials; the process's memory and the cache's."""
        found, asked = self.found(arm, "speed"), self.asked.get("speed")
        if not found or not asked:
            return ("-", "-", "-", "-")
        pairs = list(zip(asked, found["times"], strict=True))
        held = self.answers[arm.label, "speed"]["held"]
        return (
            spread([len(item["prompt"]) / times["read"] for item, times in pairs], 0),
            spread([(item["new"] - 1) / times["decode"] for item, times in pairs], 1),
            number(found["resident_peak"] / MIB, 0) + ("*" if found["load_included"] else ""),
            number(held["bytes"] / MIB, 1),
        )

    def _note(self) -> str:
        stream = sum(len(ids) for ids in self.asked.get("stream", []))
        following = _length(self.asked, "continuation", "following")
        count = len(self.asked.get("continuation", []))
        read, keys = _length(self.asked, "speed", "prompt"), len(self.asked.get("passkey", []))
        return (
            f"Perplexity of {stream:,} tokens that go through one cache a text; of the {following} "
            f"tokens that follow each of {count} prompts, once their cache was bounded; exact "
            f"answers to {keys} pass keys. Speed with {read:,} tokens to read; memory is the most "
            "that the process had resident while it read and wrote (weights and program included; "
            "*: and while it loaded), KV the most in use. The presses read a whole prompt with "
            "full attention and bound the cache layer by layer after it; this project and "
            f"llama.cpp never hold more while they read. {versions()}"
        )

    def _verdicts(self) -> Table:
        """Every peer beside the base, with intervals."""
        ours = [arm.label for arm in self.arms if arm.bounded and arm.program == "vLLM"]
        peers = [arm.label for arm in self.arms if arm.bounded and arm.program != "vLLM"]
        measures = [measure for measure in self.measures() if self.base in measure.values]
        rows, better = [], []
        for label in peers:
            cells = []
            for measure in measures:
                verdict, text = _compared(measure, label, self.base)
                cells.append(text)
                if verdict == "better":
                    better.append(f"{label} ({measure.name})")
            rows.append((label, *cells))
        said = (
            f"Better than {self.base}: {', '.join(better)}."
            if better
            else f"No peer is better than {self.base} in any of these beyond its interval."
        )
        note = (
            f"Nats a token (or share of pass keys) more than {self.base}, with 95 % intervals; "
            f"undecided where they hold 0. {said} Programs round differently: compare their rows "
            "of full attention. "
            f"Arms of this project: {', '.join(ours)}."
        )
        columns = ("peer", *(measure.name for measure in measures))
        return Table(f"Peers against {self.base}", columns, tuple(rows if measures else ()), note)

    def _depths(self) -> Table:
        keys = self.asked.get("passkey", [])
        depths = sorted({item["depth"] for item in keys})
        rows = []
        for arm in self.arms:
            texts = [self.decode(ids) for ids in self.found(arm, "passkey") or []]
            if texts:
                cells = [_cell(texts, keys, depth) for depth in depths]
                rows.append((arm.label, *cells))
        columns = ("arm", *(f"depth {depth:g}" for depth in depths))
        each = len(keys) // max(len(depths), 1)
        note = (
            f"Exact answers, and digits that are right (guessing gives 10 %); {each} prompts of "
            f"{_length(self.asked, 'passkey', 'context'):,} tokens a depth. The question comes "
            "after the cache was bounded."
        )
        return Table("Pass keys by depth", columns, tuple(rows), note)

    def _missing(self) -> Table:
        rows = []
        for (label, question), answer in self.answers.items():
            why = answer.get("cannot") or answer.get("failed")
            if why:
                kind = "cannot" if "cannot" in answer else "failed"
                rows.append((label, question, kind, " ".join(why.split())))
        return Table("What is missing", ("arm", "question", "", "why"), tuple(rows))


def versions() -> str:
    """The peers' pinned versions, as a sentence."""
    pins = {}
    for peer in ("kvpress", "llama-cpp"):
        lines = (ROOT / f"requirements/{peer}.txt").read_text("utf-8").splitlines()
        pins |= dict(line.split("==") for line in lines if "==" in line)
    return (
        f"kvpress {pins['kvpress']} on transformers {pins['transformers']}, in bf16; "
        f"llama-cpp-python {pins['llama-cpp-python']}, with the GGUF's 4-bit weights and an f16 "
        "cache; vLLM in bf16."
    )


def _perplexity(values: Sequence[np.ndarray]) -> str:
    return number(stats.perplexity(values)) if values else "-"


def _share(matches: Sequence[float]) -> str:
    return f"{np.mean(matches):.0%}" if matches else "-"


def _length(asked: Mapping[str, list[Any]], question: str, part: str) -> int:
    return len(asked[question][0][part]) if asked.get(question) else 0


def _compared(measure: Measure, label: str, base: str) -> tuple[str, str]:
    """Better, worse or undecided, and the difference; empty for an arm that was not measured."""
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
    right = np.mean([exact(text, key) for text, key in pairs])
    digits = np.mean([digits_right(text, key) for text, key in pairs])
    return f"{right:.0%} ({digits:.0%})"
