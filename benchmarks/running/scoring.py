# SPDX-License-Identifier: Apache-2.0
"""Log-likelihoods of texts under policies of equal size: what the quality benchmarks share."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.inputs.texts import Stream
from benchmarks.running import arms, parts

if TYPE_CHECKING:
    from vllm import LLM

    from vllm_cascade.policies.policy import Policy

REFERENCE = "full, recomputed"
"""Stock attention recomputed over a sliding window: what the last tokens alone predict. Policies
can do better: they attend to up to a stride more than their capacity."""


@dataclass(frozen=True)
class Job(arms.EngineJob):
    """Streams through one engine.

    Attributes:
        window: not None: no cache at all; every ``stride`` tokens are predicted from a fresh
            forward pass over the ``window`` tokens before the last of them.
        group: streams that the engine gets at a time; ``engine.max_num_seqs`` of them share its
            steps. A group is kept when all of it is finished.
    """

    streams: tuple[Stream, ...] = field(repr=False)
    window: int | None = None
    stride: int = 1
    group: int = 1

    @property
    def keys(self) -> list[str]:
        """A stream's tokens and, as its group shares time and counters, those of the group."""
        own = [parts.digest_of_tokens(stream.token_ids) for stream in self.streams]
        groups = (own[begin : begin + self.group] for begin in range(0, len(own), self.group))
        return [
            key if len(group) == 1 else f"{key}-{parts.digest([place, *group])}"
            for group in groups
            for place, key in enumerate(group)
        ]

    def determines(self) -> dict[str, Any]:
        window = {"window": self.window, "window_stride": self.stride} if self.window else {}
        return {**super().determines(), **window}

    def result(self, values: list[dict[str, Any]]) -> "Scored":
        readings, nll, counters = [Reading(**value) for value in values], [], dict[str, int]()
        for text, one in zip(self.streams, readings, strict=True):
            nll.append(np.where(text.scored, np.asarray(one.nll), np.nan))
            for name, value in one.counters.items():
                counters[name] = counters.get(name, 0) + value
        seconds = sum(one.seconds for one in readings)
        peak = max(one.pages_peak for one in readings)
        return Scored(self.label, nll, seconds, counters, peak)


@dataclass(frozen=True)
class Scored:
    """What a job gave.

    Attributes:
        nll: float64 ``[tokens - 1]`` a stream, in nats; NaN where a token is not scored.
        seconds: that the engine read for, in one or several processes.
        counters: what the policy counted (evicted tokens and so on), over all streams.
        pages_peak: most pages that were in use.
    """

    label: str
    nll: list[np.ndarray]
    seconds: float
    counters: dict[str, int]
    pages_peak: int

    @property
    def scored(self) -> list[np.ndarray]:
        """Without the tokens that do not count."""
        return [values[~np.isnan(values)] for values in self.nll]

    @property
    def num_tokens(self) -> int:
        return sum(len(values) for values in self.scored)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the streams that were read in a second, log-probabilities included."""
        return sum(len(values) + 1 for values in self.nll) / self.seconds


@dataclass(frozen=True)
class Reading:
    """What an engine gave for one stream, as it is kept.

    Attributes:
        nll: nats of tokens 1, 2, ...; scored or not, since others may score others.
        seconds: of the stream's group, with its first stream; 0 for the others.
        counters: of the stream's group, in the same way.
        pages_peak: most pages in use while the group was read.
    """

    nll: np.ndarray
    seconds: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)
    pages_peak: int = 0

    def as_json(self) -> dict[str, Any]:
        """Nine digits are all of a float32."""
        nll = [float(f"{value:.9g}") for value in self.nll]
        return {**vars(self), "nll": nll}


def run(job: Job) -> Scored:
    """A job in this (child) process."""
    return run_on(job.engine.start(), job)


def run_on(llm: "LLM", job: Job) -> Scored:
    """A job on an engine that is up."""
    from benchmarks.running.stream import prepare

    most = min(1000, llm.llm_engine.vllm_config.model_config.max_model_len - 2)
    prepare(llm, job.streams[0].token_ids[:most])

    def work(places: list[int]) -> Iterable[dict[int, Any]]:
        # Also what is kept of a group whose last lines were cut off.
        for begin in sorted({place // job.group * job.group for place in places}):
            group = range(begin, min(begin + job.group, len(job.streams)))
            read = _read(llm, job, [job.streams[place] for place in group])
            yield {place: one.as_json() for place, one in zip(group, read, strict=True)}

    return arms.fill(job, work)


def _read(llm: "LLM", job: Job, group: Sequence[Stream]) -> list[Reading]:
    """A group of streams; draws of a random policy do not depend on what was read before."""
    import torch

    torch.manual_seed(job.engine.seed)
    if job.window:
        return [_recompute(llm, job, text) for text in group]
    from benchmarks.running.stream import read_together

    name = group[0].name if len(group) == 1 else f"{len(group)} texts"
    shown = {"label": f"{job.label} {name}"[:40], "bar_line": job.bar_line}
    found = read_together(llm, [text.token_ids for text in group], **shown)
    first = Reading(found.nll[0], found.seconds, found.counters, found.pages_peak)
    return [first, *(Reading(nll) for nll in found.nll[1:])]


def windows(num_tokens: int, window: int, stride: int) -> Iterable[tuple[int, int, int]]:
    """``(begin, end, first)``: tokens ``begin .. end - 1`` are read, ``first .. end - 1`` scored.

    Every token but the first is scored once, from the ``window - stride`` to ``window - 1`` tokens
    before it, or from all there are.

    Raises:
        ValueError: a stride that leaves some tokens without any context.
    """
    if not 0 < stride < window:
        raise ValueError(f"stride {stride} must be at least 1 and less than the window {window}")
    end = min(window, num_tokens)
    yield 0, end, 1
    while end < num_tokens:
        first, end = end, min(end + stride, num_tokens)
        yield max(end - window, 0), end, first


def _recompute(llm: "LLM", job: Job, text: Stream) -> Reading:
    from benchmarks.running.stream import read_together

    assert job.window is not None
    spans = list(windows(len(text.token_ids), job.window, job.stride))
    prompts = [text.part(begin, end) for begin, end, _ in spans]
    values = np.full(len(text.token_ids) - 1, np.nan)
    found = read_together(llm, prompts, label=f"{job.label} {text.name}"[:40])
    for (begin, end, first), nll in zip(spans, found.nll, strict=True):
        values[first - 1 : end - 1] = nll[first - begin - 1 :]
    return Reading(values, found.seconds)


def equal_policy(name: str, capacity: int, **settings: Any) -> dict[str, Any]:
    """Settings of a policy that never caches more than ``capacity`` tokens between strides.

    Sinks, and what ``lazy`` or ``overflow`` let a cache grow by, are part of the capacity, so that
    no policy is compared while it holds more than another. A policy whose budgets come in steps
    gets the largest that fits.

    Raises:
        KVPolicyError: a setting that the policy does not have, or no budget that fits.
    """
    from vllm_cascade import KVPolicyError
    from vllm_cascade.policies.registry import policy_class, resolve

    cls = policy_class(name)
    if name == "window":
        settings.pop("num_sinks", None)
    step = cls.budget_step(settings)
    most = capacity // step * step
    # What is cached besides the budget does not depend on it.
    besides = resolve({"name": name, "budget": most, **settings}) if most else None
    budget = most and (capacity - besides.capacity + besides.budget) // step * step
    if budget < 1:
        raise KVPolicyError(f"kv_policy: no budget of {name} fits {capacity} cached tokens")
    chosen = {"name": name, "budget": budget, **settings}
    peak = resolve(chosen).capacity
    assert peak <= capacity, f"{name} holds {peak} tokens, more than {capacity}"
    return chosen


def cached(policy: "Policy", num_tokens: int) -> tuple[int, float, int]:
    """Least, mean and most tokens cached over a long stream, once the cache has been full."""
    from vllm_cascade.policies.schedule import compiled

    counts = compiled(policy).positions(np.arange(num_tokens + 1))
    full = int(counts.argmax())
    steady = counts[full:]
    return int(steady.min()), float(steady.mean()), int(steady.max())
