# SPDX-License-Identifier: Apache-2.0
"""One stream's pace, in repeated trials: TTFT, TPOT, tokens/s, run time and peak memory.

The lazy-pruning paper's protocol: the baseline recomputes a sliding window for every token, without
a cache; a warm-up pass, then N trials; and perplexity of the same text.
"""

import resource
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.inputs.texts import Stream
from benchmarks.running import arms, parts, scoring
from benchmarks.running.engines import EngineSettings

if TYPE_CHECKING:
    from vllm import LLM


@dataclass(frozen=True)
class Pace:
    """One arm.

    Attributes:
        text: read for perplexity; its first ``prompt`` tokens are each trial's prompt.
        new_tokens: generated in a trial.
        window: not None: no cache, this many tokens are read again for every new one.
        stride: of the recomputed window, for perplexity.
        arm: where the result is kept; None: nowhere.
    """

    label: str
    engine: EngineSettings
    text: Stream = field(repr=False)
    prompt: int
    new_tokens: int
    trials: int
    window: int | None = None
    stride: int = 1
    arm: parts.Arm | None = None

    @property
    def keys(self) -> list[str]:
        return [parts.digest_of_tokens(self.text.token_ids)]

    def determines(self) -> dict[str, Any]:
        asked = {key: getattr(self, key) for key in ("prompt", "new_tokens", "trials")}
        window = {"window": self.window, "window_stride": self.stride} if self.window else {}
        return {**self.engine.determines(), **asked, **window}

    def result(self, values: list[dict[str, Any]]) -> "Paced":
        (value,) = values
        return Paced(**value)


@dataclass(frozen=True)
class Paced:
    """What an arm gave; lists have an entry a trial."""

    ttft_ms: list[float]
    tpot_ms: list[float]
    tokens_per_second: list[float]
    seconds: list[float]
    peak_memory_mib: float
    nll: float


def run(job: Pace) -> Paced:
    """An arm, in this (child) process."""
    return arms.fill(job, lambda places: ({place: asdict(_pace(job))} for place in places))


def _pace(job: Pace) -> Paced:
    llm = job.engine.start()
    job_scored = scoring.Job(job.label, job.engine, (job.text,), job.window, job.stride)
    # Perplexity first: it is the warm-up pass too.
    scored = scoring.run_on(llm, job_scored)
    trial = _recomputed if job.window else _cached
    trial(llm, job)
    trials = [trial(llm, job) for _ in range(job.trials)]
    totals = [sum(times) for times in trials]
    return Paced(
        ttft_ms=[1e3 * times[0] for times in trials],
        tpot_ms=[1e3 * sum(times[1:]) / (len(times) - 1) for times in trials],
        tokens_per_second=[len(t) / total for t, total in zip(trials, totals, strict=True)],
        seconds=totals,
        peak_memory_mib=_peak_memory(),
        nll=float(scored.scored[0].mean()),
    )


def _params(max_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def _cached(llm: "LLM", job: Pace) -> list[float]:
    """Seconds to each token, from the one before."""
    engine = llm.llm_engine
    prompt = {"prompt_token_ids": job.text.token_ids[: job.prompt]}
    engine.add_request("pace", prompt, _params(job.new_tokens))
    times, last = [], time.perf_counter()
    while engine.has_unfinished_requests():
        if engine.step():  # a step that only reads has no output
            now = time.perf_counter()
            times.append(now - last)
            last = now
    assert len(times) == job.new_tokens, "a step gave more than one token, or none"
    return times


def _recomputed(llm: "LLM", job: Pace) -> list[float]:
    """The same, each token from a fresh pass over the last ``window`` ones."""
    assert job.window is not None
    tokens = job.text.token_ids[: job.prompt]
    times = []
    for _ in range(job.new_tokens):
        start = time.perf_counter()
        prompt = {"prompt_token_ids": tokens[-job.window :]}
        (output,) = llm.generate([prompt], _params(1), use_tqdm=False)
        times.append(time.perf_counter() - start)
        tokens = [*tokens, output.outputs[0].token_ids[0]]
    return times


def _peak_memory() -> float:
    """MiB: of the GPU's allocations where there is one, else of this process."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
