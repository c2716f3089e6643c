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
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.policies.registry import policy_of
from vllm_cascade.policies.schedule import compiled

USAGE_GAUGE = "vllm:kv_cache_usage_perc"


@dataclass(frozen=True)
class Together:
    """What several streams through one engine gave.

    Attributes:
        nll: float64 ``[num_tokens - 1]`` a stream, in nats.
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


@dataclass(frozen=True)
class StreamResult:
    """What one stream through one engine gave.

    Attributes:
        nll: float64 ``[num_tokens - 1]``, negative log-likelihood in nats of tokens 1, 2, ...
        seconds: from the request's arrival to the end of its prompt.
        pages_peak: the most pages in use after any step.
        page_bytes: one page of every layer, with the policy's per-slot numbers.
        cached: tokens each layer and head set held at the end of the prompt.
        counters: what the policy counted; empty for stock vLLM.
        token_seconds: time of each token generated after the prompt, less the first, which the
            prompt's last step gives.
        written: the tokens generated after the prompt.
    """

    nll: np.ndarray
    seconds: float
    pages_peak: int
    page_bytes: int
    cached: int
    counters: dict[str, int]
    token_seconds: list[float]
    written: list[int]

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.nll) + 1

    @property
    def peak_bytes(self) -> int:
        """Most bytes of KV cache in use after any step."""
        return self.pages_peak * self.page_bytes

    def perplexity(self, start: int = 0, end: int | None = None) -> float:
        """Perplexity of tokens ``start .. end - 1``; the first token is never predicted."""
        end = self.num_tokens if end is None else end
        return float(np.exp(self.nll[max(start - 1, 0) : end - 1].mean()))


def stream(
    llm: LLM,
    token_ids: list[int],
    *,
    label: str,
    max_new_tokens: int = 2,
    bar_line: int = 0,
    warm_tokens: int = 1000,
) -> StreamResult:
    """Send ``token_ids`` through ``llm`` as one prompt, then generate some tokens.

    A short unmeasured request first keeps one-off costs out of the timing.

    Args:
        label: shown at the progress bar.
        max_new_tokens: at least 2: the step of a request's last token also frees its pages.
        bar_line: line of the terminal, for the progress bar of one of several streams at a time.
        warm_tokens: of the unmeasured request.
    """
    assert max_new_tokens >= 2, "one token more is needed to see the pages"
    config = llm.llm_engine.vllm_config
    policy = policy_of(config.additional_config)
    params = SamplingParams(max_tokens=2, prompt_logprobs=0, flat_logprobs=True)
    llm.generate({"prompt_token_ids": token_ids[:warm_tokens]}, params, use_tqdm=False)
    found = read_together(
        llm, [token_ids], label=label, bar_line=bar_line, max_new_tokens=max_new_tokens
    )
    return StreamResult(
        nll=found.nll[0],
        seconds=found.seconds,
        pages_peak=found.pages_peak,
        page_bytes=bytes_per_page(config),
        cached=len(token_ids) if policy is None else compiled(policy).count_at(len(token_ids)),
        counters=found.counters,
        token_seconds=found.token_seconds,
        written=found.written,
    )


def read_together(
    llm: LLM,
    prompts: Sequence[list[int]],
    *,
    label: str,
    bar_line: int = 0,
    max_new_tokens: int = 1,
) -> Together:
    """Send prompts through ``llm``, as many at a time as it takes.

    The engine needs ``disable_log_stats=False``, so that steps that only read report, too, and to
    be in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``), so that counters are those at the
    prompts' end.

    Args:
        max_new_tokens: tokens generated after each prompt. The policy counts those after the
            first, so the counters are read before them; more than one is for a single prompt.
    """
    params = SamplingParams(
        max_tokens=max_new_tokens,
        ignore_eos=True,
        temperature=0.0,
        prompt_logprobs=0,
        flat_logprobs=True,
    )
    engine, ended, token_seconds = llm.llm_engine, dict[str, Any](), list[float]()
    shown = {"unit": "tok", "unit_scale": True, "dynamic_ncols": True, "leave": False}
    bar = tqdm(total=sum(map(len, prompts)), desc=label, position=bar_line, **shown)
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
            bar.update(min(_chunk(engine.vllm_config), bar.total - bar.n))
            last = time.perf_counter()
    outputs = [ended[str(place)] for place in range(len(prompts))]
    return Together(
        nll=[-np.asarray(output.prompt_logprobs.logprobs) for output in outputs],
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


def bytes_per_page(config: VllmConfig) -> int:
    """Bytes of one page over all layers.

    Worked out from the page specs, then checked against the number of pages that the engine
    itself made out of ``kv_cache_memory_bytes``.
    """
    model, cache = config.model_config, config.cache_config
    spec = FullAttentionSpec(
        block_size=cache.block_size,
        num_kv_heads=model.get_num_kv_heads(config.parallel_config),
        head_size=model.get_head_size(),
        dtype=model.dtype,
    )
    policy = policy_of(config.additional_config)
    if policy is not None:
        spec = KVPolicySpec.from_full(spec, policy)
    used = model.get_num_layers(config.parallel_config) * spec.page_size_bytes
    memory = cache.kv_cache_memory_bytes
    assert memory is None or memory // used == cache.num_gpu_blocks, "pages of another size"
    return used


def _chunk(config: VllmConfig) -> int:
    """Prompt tokens that an engine with one request reads in a step."""
    most = config.scheduler_config.max_num_batched_tokens
    policy = policy_of(config.additional_config)
    return most if policy is None else most // policy.prefill_stride * policy.prefill_stride


def _counters(llm: LLM) -> dict[str, int]:
    if policy_of(llm.llm_engine.vllm_config.additional_config) is None:
        return {}
    return dict(llm.collective_rpc("kv_policy_counters")[0])
