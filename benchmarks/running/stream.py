# SPDX-License-Identifier: Apache-2.0
"""Streams long texts through an offline engine, with the log-probability of every token.

A text is a single prompt, which the engine itself cuts into chunks; ``prompt_logprobs`` gives the
log-probability of every token given what the cache then held. The engine is stepped by hand, so
that a progress bar can follow and the pages in use can be read after every step.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm
from vllm import LLM, SamplingParams

from benchmarks.running import prompt_scores
from vllm_cascade.policies.registry import policy_of

USAGE_GAUGE = "vllm:kv_cache_usage_perc"


@dataclass(frozen=True)
class Together:
    """What several streams through one engine gave.

    Attributes:
        nll: float64 ``[num_tokens - 1]`` a stream, in nats; empty if none were asked for.
        seconds: from the first one's arrival to the end of the last prompt.
        pages_peak: most pages in use after any step; a step that ends a text has freed its own.
        counters: what the policy counted; empty for stock vLLM.
        token_seconds: time of each generated token after the first.
        written: the tokens generated after the last prompt.
    """

    nll: list[np.ndarray]
    seconds: float
    pages_peak: int
    counters: dict[str, int]
    token_seconds: list[float] = field(default_factory=list)
    written: list[int] = field(default_factory=list)


def prepare(llm: LLM, token_ids: list[int]) -> None:
    """Scores without detours, and every code path once: an unmeasured prompt and a token."""
    prompt_scores.install(llm)
    params = SamplingParams(max_tokens=2, prompt_logprobs=0, flat_logprobs=True)
    llm.generate({"prompt_token_ids": token_ids}, params, use_tqdm=False)


def read_together(
    llm: LLM,
    prompts: Sequence[list[int]],
    *,
    label: str,
    bar_line: int = 0,
    max_new_tokens: int = 1,
    scored: bool = True,
    ignore_eos: bool = True,
) -> Together:
    """Send prompts through ``llm``, as many at a time as it takes.

    The engine needs ``disable_log_stats=False``, so that steps that only read report, too, and to
    be in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``), so that counters are those at the
    prompts' end.

    Args:
        max_new_tokens: tokens generated after each prompt. The policy counts those after the
            first, so the counters are read before them; more than one is for a single prompt.
        scored: with log-probabilities of the prompts.
    """
    wanted = {"prompt_logprobs": 0, "flat_logprobs": True} if scored else {}
    params = SamplingParams(
        max_tokens=max_new_tokens, ignore_eos=ignore_eos, temperature=0.0, **wanted
    )
    engine, ended, token_seconds = llm.llm_engine, dict[str, Any](), list[float]()
    shown = {"unit": "tok", "unit_scale": True, "dynamic_ncols": True, "leave": False}
    bar = tqdm(total=sum(map(len, prompts)), desc=label, position=bar_line, **shown)
    chunk = engine.vllm_config.scheduler_config.max_num_batched_tokens
    if policy := policy_of(engine.vllm_config.additional_config):
        chunk -= chunk % policy.prefill_stride
    before, peak, seconds = _counters(llm), 0, 0.0
    counters, start = before, time.perf_counter()
    for place, prompt in enumerate(prompts):
        engine.add_request(str(place), {"prompt_token_ids": prompt}, params)
    last = start
    with bar:
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            if outputs and len(prompts) == 1 and ended:
                token_seconds.append(now - last)
            elif outputs:
                seconds, counters = now - start, _counters(llm)
            ended |= {output.request_id: output for output in outputs}
            peak = max(peak, pages_in_use(llm))
            bar.update(min(chunk, bar.total - bar.n))
            last = time.perf_counter()
    outputs = [ended[str(place)] for place in range(len(prompts))]
    return Together(
        nll=[-np.asarray(output.prompt_logprobs.logprobs) for output in outputs if scored],
        seconds=seconds,
        pages_peak=peak,
        counters={name: counters[name] - before[name] for name in counters},
        token_seconds=token_seconds,
        written=list(outputs[-1].outputs[0].token_ids),
    )


def pages_in_use(llm: LLM) -> int:
    """Pages of the pool that requests hold, as vLLM's own usage gauge last saw it."""
    (usage,) = (metric.value for metric in llm.get_metrics() if metric.name == USAGE_GAUGE)
    pool = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks - 1  # less the null block
    return round(usage * pool)


def _counters(llm: LLM) -> dict[str, int]:
    if policy_of(llm.llm_engine.vllm_config.additional_config) is None:
        return {}
    return dict(llm.collective_rpc("kv_policy_counters")[0])
