# SPDX-License-Identifier: Apache-2.0
"""Log-likelihoods of texts under policies of equal size: what the quality benchmarks share."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.inputs.texts import Stream
from benchmarks.running.engines import EngineSettings, in_children

if TYPE_CHECKING:
    from vllm import LLM

    from vllm_cascade.policies import Policy

REFERENCE = "full, recomputed"
"""Stock attention over the last tokens, recomputed: what a bounded cache could at best equal."""


@dataclass(frozen=True)
class Job:
    """Streams through one engine.

    Attributes:
        window: not None: no cache at all; every ``stride`` tokens are predicted from a fresh
            forward pass over the ``window`` tokens before the last of them.
        batched: all streams at a time, as many as ``engine.max_num_seqs``; for short ones.
    """

    label: str
    engine: EngineSettings
    streams: tuple[Stream, ...] = field(repr=False)
    window: int | None = None
    stride: int = 1
    batched: bool = False
    bar_line: int = 0


@dataclass(frozen=True)
class Scored:
    """What a job gave.

    Attributes:
        nll: float64 ``[tokens - 1]`` a stream, in nats; NaN where a token is not scored.
        counters: what the policy counted (evicted tokens and so on), over all streams.
        pages_peak: most pages that a stream held.
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


def run(job: Job) -> Scored:
    """A job in this (child) process."""
    return run_on(job.engine.start(), job)


def run_on(llm: "LLM", job: Job) -> Scored:
    """A job on an engine that is up."""
    if job.window:
        return _recompute(llm, job)
    return _batch(llm, job) if job.batched else _stream(llm, job)


def run_all(jobs: Sequence[Job], at_a_time: int = 1) -> dict[str, Scored]:
    """Every job in a process of its own, by label."""
    placed = [replace(job, bar_line=index % at_a_time) for index, job in enumerate(jobs)]
    return {scored.label: scored for scored in in_children(run, placed, at_a_time)}


def _stream(llm: "LLM", job: Job) -> Scored:
    from benchmarks.running.stream import stream

    nll, seconds, peak = [], 0.0, 0
    counters: dict[str, int] = {}
    for text in job.streams:
        label = f"{job.label} {text.name}"[:40]
        result = stream(llm, text.token_ids, label=label, bar_line=job.bar_line, warm_up=not nll)
        nll.append(np.where(text.scored, result.nll, np.nan))
        seconds += result.seconds
        peak = max(peak, result.pages_peak)
        for name, value in result.counters.items():
            counters[name] = counters.get(name, 0) + value
    return Scored(job.label, nll, seconds, counters, peak)


def _batch(llm: "LLM", job: Job) -> Scored:
    start = time.perf_counter()
    found = prompt_nll(llm, [text.token_ids for text in job.streams])
    nll = [np.where(t.scored, values, np.nan) for t, values in zip(job.streams, found, strict=True)]
    seconds = time.perf_counter() - start
    counters = llm.collective_rpc("kv_policy_counters")[0] if job.engine.policy else {}
    return Scored(job.label, nll, seconds, counters, 0)


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


def _recompute(llm: "LLM", job: Job) -> Scored:
    assert job.window is not None
    start = time.perf_counter()
    nll = []
    for text in job.streams:
        spans = list(windows(len(text.token_ids), job.window, job.stride))
        prompts = [text.token_ids[begin:end] for begin, end, _ in spans]
        values = np.full(len(text.token_ids) - 1, np.nan)
        for (begin, end, first), found in zip(spans, prompt_nll(llm, prompts), strict=True):
            values[first - 1 : end - 1] = found[first - begin - 1 :]
        nll.append(np.where(text.scored, values, np.nan))
    return Scored(job.label, nll, time.perf_counter() - start, {}, 0)


def prompt_nll(llm: "LLM", prompts: Sequence[list[int]], bar: bool = True) -> list[np.ndarray]:
    """Negative log-likelihood of tokens 1, 2, ... of every prompt, many prompts at a time."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, flat_logprobs=True)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(requests, params, use_tqdm=bar)
    return [-np.asarray(output.prompt_logprobs.logprobs) for output in outputs]


def equal_policy(name: str, capacity: int, **settings: Any) -> dict[str, Any]:
    """Settings of a policy that never caches more than ``capacity`` tokens between strides.

    Sinks, and what ``lazy`` or ``overflow`` let a cache grow by, are part of the capacity, so that
    no policy is compared while it holds more than another. A policy whose budgets come in steps
    gets the largest that fits.

    Raises:
        KVPolicyError: a setting that the policy does not have, or no budget that fits.
    """
    from vllm_cascade import KVPolicyError
    from vllm_cascade.policies import policy_class, resolve

    cls = policy_class(name)
    if name == "window":
        settings.pop("num_sinks", None)
    step = cls.budget_step(settings)
    fields = {
        key: settings.get(key, cls.model_fields[key].default) for key in ("num_sinks", "overflow")
    }
    budget = capacity - fields["num_sinks"] - (fields["overflow"] - 1)
    budget = budget // step * step
    if budget < 1:
        raise KVPolicyError(f"kv_policy: no budget of {name} fits {capacity} cached tokens")
    chosen = {"name": name, "budget": budget, **settings}
    peak = resolve(chosen).capacity
    assert peak <= capacity, f"{name} holds {peak} tokens, more than {capacity}"
    return chosen


def cached(policy: "Policy", num_tokens: int) -> tuple[int, float, int]:
    """Least, mean and most tokens cached over a long stream, once the cache has been full."""
    from vllm_cascade.policies import compiled

    counts = compiled(policy).counts(np.arange(num_tokens + 1))
    full = int(counts.argmax())
    steady = counts[full:]
    return int(steady.min()), float(steady.mean()), int(steady.max())


def eviction_batches(policy: "Policy", num_tokens: int) -> np.ndarray:
    """Tokens after whose step at least two tokens were dropped at once."""
    from vllm_cascade.policies import compiled

    counts = compiled(policy).counts(np.arange(num_tokens + 1))
    return np.flatnonzero(counts[:-1] + 1 - counts[1:] >= 2)
