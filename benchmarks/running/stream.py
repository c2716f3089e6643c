# SPDX-License-Identifier: Apache-2.0
"""Streams one long text through an offline engine and measures what it did.

The text is a single prompt, so the engine itself cuts it into chunks; ``prompt_logprobs`` gives
the log-probability of every token given what the cache then held. The engine is stepped by hand,
for two reasons: a progress bar can follow, and the pages in use can be read after every step.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.policies.registry import policy_of
from vllm_cascade.policies.schedule import compiled

USAGE_GAUGE = "vllm:kv_cache_usage_perc"


@dataclass(frozen=True)
class StreamResult:
    """What one stream through one engine gave.

    Attributes:
        nll: float64 ``[num_tokens - 1]``, negative log-likelihood in nats of tokens 1, 2, ...
        seconds: from the request's arrival to the end of its prompt.
        pages_end: pages the request held after its last token.
        pages_peak: the most pages in use after any step.
        page_bytes: one page of every layer, with the policy's per-slot numbers.
        full_page_bytes: the same for stock vLLM, which stores keys and values only.
        cached: tokens each layer and head set held at the end of the prompt.
        counters: what the policy counted over the prompt; empty for stock vLLM.
        token_seconds: time of each token generated after the prompt, less the first, which the
            prompt's last step gives.
        written: the tokens generated after the prompt.
    """

    nll: np.ndarray
    seconds: float
    block_size: int
    pages_end: int
    pages_peak: int
    page_bytes: int
    full_page_bytes: int
    cached: int
    counters: dict[str, int]
    token_seconds: list[float]
    written: list[int]

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.nll) + 1

    @property
    def tokens_per_second(self) -> float:
        """Prompt tokens read in a second, log-probabilities included."""
        return self.num_tokens / self.seconds

    @property
    def peak_bytes(self) -> int:
        """Most bytes of KV cache in use after any step."""
        return self.pages_peak * self.page_bytes

    @property
    def full_bytes(self) -> int:
        """Bytes of KV cache that full attention needs for the same prompt."""
        return cdiv(self.num_tokens, self.block_size) * self.full_page_bytes

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
) -> StreamResult:
    """Send ``token_ids`` through ``llm`` as one prompt, then generate some tokens.

    The engine needs ``disable_log_stats=False``: then every one of its steps reports, also those
    that only read a part of the prompt. A short unmeasured request first keeps one-off costs
    (compiling the log-probability helper) out of the timing. With the engine in this process
    (``VLLM_ENABLE_V1_MULTIPROCESSING=0``) the counters are those at the prompt's very end; an
    engine in another process may already be some tokens further.

    Args:
        label: shown at the progress bar.
        max_new_tokens: at least 2: the step of a request's last token also frees its pages, so only
            a step before it can show them.
        bar_line: line of the terminal, for the progress bar of one of several streams at a time.
    """
    assert max_new_tokens >= 2, "one token more is needed to see the pages"
    config = llm.llm_engine.vllm_config
    policy = policy_of(config.additional_config)
    params = SamplingParams(
        max_tokens=max_new_tokens,
        ignore_eos=True,
        temperature=0.0,
        prompt_logprobs=0,
        flat_logprobs=True,
    )
    _warm_up(llm, token_ids)
    before = _counters(llm)
    usage, seconds, counters, output = [], 0.0, before, None
    token_seconds: list[float] = []
    start = last = time.perf_counter()
    for outputs in _steps(llm, token_ids, params, label, bar_line):
        now = time.perf_counter()
        usage.append(pages_in_use(llm))
        if output is not None:
            token_seconds.append(now - last)
        elif outputs:
            seconds = now - start
            counters = _counters(llm)
        output = outputs[0] if outputs else output
        last = time.perf_counter()
    assert output is not None and output.prompt_logprobs is not None
    page_bytes, full_page_bytes = bytes_per_page(config)
    cached = len(token_ids) if policy is None else compiled(policy).count_at(len(token_ids))
    return StreamResult(
        nll=-np.asarray(output.prompt_logprobs.logprobs),
        seconds=seconds,
        block_size=config.cache_config.block_size,
        pages_end=next((pages for pages in reversed(usage) if pages), 0),
        pages_peak=max(usage),
        page_bytes=page_bytes,
        full_page_bytes=full_page_bytes,
        cached=cached,
        counters={name: counters[name] - before[name] for name in counters},
        token_seconds=token_seconds,
        written=list(output.outputs[0].token_ids),
    )


@dataclass(frozen=True)
class Together:
    """What several streams through one engine gave.

    Attributes:
        nll: float64 ``[num_tokens - 1]`` a stream, in nats.
        seconds: from the first one's arrival to the end of the last one.
        pages_peak: most pages in use after any step; a step that ends a text has freed its own.
        counters: what the policy counted; empty for stock vLLM.
    """

    nll: list[np.ndarray]
    seconds: float
    pages_peak: int
    counters: dict[str, int]


def read_together(
    llm: LLM, prompts: Sequence[list[int]], *, label: str, bar_line: int = 0
) -> Together:
    """Send prompts through ``llm``, as many at a time as it takes; nothing is kept of an answer."""
    # One token: with a second one, the policy would count its step too.
    params = SamplingParams(
        max_tokens=1, ignore_eos=True, temperature=0.0, prompt_logprobs=0, flat_logprobs=True
    )
    engine, nll = llm.llm_engine, dict[str, np.ndarray]()
    before, peak, start = _counters(llm), 0, time.perf_counter()
    for place, prompt in enumerate(prompts):
        engine.add_request(str(place), {"prompt_token_ids": prompt}, params)
    bar = tqdm(
        total=sum(map(len, prompts)),
        desc=label,
        unit="tok",
        unit_scale=True,
        dynamic_ncols=True,
        position=bar_line,
        leave=False,
    )
    with bar:
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    nll[output.request_id] = -np.asarray(output.prompt_logprobs.logprobs)
            peak = max(peak, pages_in_use(llm))
            bar.update(min(_chunk(engine.vllm_config), bar.total - bar.n))
    seconds, after = time.perf_counter() - start, _counters(llm)
    return Together(
        nll=[nll[str(place)] for place in range(len(prompts))],
        seconds=seconds,
        pages_peak=peak,
        counters={name: after[name] - before[name] for name in after},
    )


def pages_in_use(llm: LLM) -> int:
    """Pages of the pool that requests hold, as vLLM's own usage gauge last saw it."""
    (usage,) = (metric.value for metric in llm.get_metrics() if metric.name == USAGE_GAUGE)
    pool = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks - 1  # less the null block
    return round(usage * pool)


def bytes_per_page(config: VllmConfig) -> tuple[int, int]:
    """Bytes of one page over all layers: under the engine's policy, and in stock vLLM.

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
    num_layers, policy = (
        model.get_num_layers(config.parallel_config),
        policy_of(config.additional_config),
    )
    full = num_layers * spec.page_size_bytes
    used = full
    if policy is not None:
        used = num_layers * KVPolicySpec.from_full(spec, policy).page_size_bytes
    memory = cache.kv_cache_memory_bytes
    assert memory is None or memory // used == cache.num_gpu_blocks, "pages of another size"
    return used, full


def _warm_up(llm: LLM, token_ids: list[int]) -> None:
    """Run every code path once, on a prompt of a few strides."""
    length = min(len(token_ids), 1000)
    params = SamplingParams(max_tokens=2, prompt_logprobs=0, flat_logprobs=True)
    llm.generate({"prompt_token_ids": token_ids[:length]}, params, use_tqdm=False)


def _steps(
    llm: LLM, token_ids: list[int], params: SamplingParams, label: str, bar_line: int
) -> Iterator[list[Any]]:
    """Engine steps of one request; yields each step's outputs (none while it reads)."""
    engine, total = llm.llm_engine, len(token_ids)
    chunk = _chunk(engine.vllm_config)
    engine.add_request(label, {"prompt_token_ids": token_ids}, params)
    with tqdm(
        total=total,
        desc=label,
        unit="tok",
        unit_scale=True,
        dynamic_ncols=True,
        position=bar_line,
        leave=False,
    ) as bar:
        while engine.has_unfinished_requests():
            outputs = engine.step()
            if bar.n < total:
                bar.update(min(chunk, total - bar.n))
            if bar.n == total:
                bar.close()  # its time is the prompt's, without the continuation's
            yield outputs


def _chunk(config: VllmConfig) -> int:
    """Prompt tokens that an engine with one request reads in a step."""
    most, policy = (
        config.scheduler_config.max_num_batched_tokens,
        policy_of(config.additional_config),
    )
    return most if policy is None else most // policy.prefill_stride * policy.prefill_stride


def _counters(llm: LLM) -> dict[str, int]:
    if policy_of(llm.llm_engine.vllm_config.additional_config) is None:
        return {}
    return dict(llm.collective_rpc("kv_policy_counters")[0])
