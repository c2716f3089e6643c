# SPDX-License-Identifier: Apache-2.0
"""The same answer in any batch and any chunking; streams far beyond the positions; no leaks."""

from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from tests.engine.pool import EnginePool, generated, pool_usage, preempted, prompt_logprobs

POLICY = {"name": "cascade", "budget": 128, "prefill_stride": 64}


class ForceTokens(AdapterLogitsProcessor):
    """Makes a request generate ``extra_args["forced"]``, so decode can be scored like a prompt."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        forced = (params.extra_args or {}).get("forced")
        if forced is None:
            return None

        def force(output_ids: list[int], logits: Any) -> Any:
            wanted = forced[len(output_ids)]
            value = logits[wanted].clone()
            logits.fill_(-float("inf"))
            logits[wanted] = value
            return logits

        return force


def forced(text: list[int], length: int, **asked: Any) -> SamplingParams:
    """Decode all of a text but its first ``length`` tokens, with every log-probability."""
    return SamplingParams(
        max_tokens=len(text) - length,
        prompt_logprobs=0,
        logprobs=0,
        temperature=0.0,
        ignore_eos=True,
        extra_args={"forced": text[length:], **asked},
    )


def engine(pool: EnginePool, token_budget: int = 512, **policy: Any) -> Any:
    return pool.get(
        {**POLICY, **policy},
        max_model_len=24_000,
        max_num_batched_tokens=token_budget,
        logits_processors=[ForceTokens],
    )


def score(llm: Any, prompts: list[list[int]], max_tokens: int = 8) -> list[tuple[Any, Any]]:
    """Prompt log-probabilities and the generated (token, log-probability) pairs."""
    params = SamplingParams(
        max_tokens=max_tokens, prompt_logprobs=0, logprobs=0, temperature=0.0, ignore_eos=True
    )
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [
        (
            np.asarray(prompt_logprobs(output)),
            list(zip(*generated(output), strict=True)),
        )
        for output in outputs
    ]


@pytest.fixture(scope="module")
def prompts(book_tokens: list[int]) -> list[list[int]]:
    """17 prompts: one token, a few, across strides, far beyond the position range."""
    lengths = [1500, 1, 2, 63, 64, 65, 100, 128, 129, 300, 511, 700, 900, 1024, 1025, 1300, 2000]
    return [book_tokens[1000 * i : 1000 * i + n] for i, n in enumerate(lengths)]


@pytest.mark.parametrize("head_policy", ["homogeneous", "per_kv_head"])
def test_alone_in_a_batch_and_in_any_chunks(
    head_policy: str, engine_pool: EnginePool, prompts: list[list[int]]
) -> None:
    small = engine(engine_pool, 256, head_policy=head_policy)
    alone = [score(small, [prompt])[0] for prompt in (prompts[0], prompts[1], prompts[9])]
    together_small = score(small, prompts)
    large = engine(engine_pool, 4096, head_policy=head_policy)
    together_large = score(large, prompts)
    for index, (logprobs, answer) in zip((0, 1, 9), alone, strict=True):
        for other_logprobs, other_generated in (together_small[index], together_large[index]):
            np.testing.assert_allclose(logprobs, other_logprobs, atol=1e-4)
            assert [t for t, _ in answer] == [t for t, _ in other_generated]
            np.testing.assert_allclose(
                [p for _, p in answer], [p for _, p in other_generated], atol=1e-4
            )
    for small_result, large_result in zip(together_small, together_large, strict=True):
        np.testing.assert_allclose(small_result[0], large_result[0], atol=1e-4)
        assert [t for t, _ in small_result[1]] == [t for t, _ in large_result[1]]
    assert pool_usage(large) == 0.0


def test_forced_decoding_is_the_token_by_token_prompt(
    engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    llm = engine(engine_pool, prefill_stride=1)
    tokens = book_tokens[5000:5700]
    ((expected, _),) = score(llm, [tokens], max_tokens=1)
    forced = tokens[1:]
    params = SamplingParams(
        max_tokens=len(forced),
        logprobs=0,
        temperature=0.0,
        ignore_eos=True,
        extra_args={"forced": forced},
    )
    (output,) = llm.generate([{"prompt_token_ids": tokens[:1]}], params, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == forced
    decoded = [
        entry[token].logprob
        for token, entry in zip(forced, output.outputs[0].logprobs, strict=True)
    ]
    np.testing.assert_allclose(decoded, expected, atol=1e-4)


@pytest.mark.slow
def test_a_stream_of_20_000_tokens(engine_pool: EnginePool, book_tokens: list[int]) -> None:
    """Twenty times the model's positions: no error, constant pages, no decay.

    The second and the last quarter are the same 5,000 tokens (long gone from a cache of 132), so
    that a difference in perplexity is the cache's and not the text's.
    """
    llm = engine(engine_pool)
    pages = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks - 1
    params = SamplingParams(max_tokens=4, prompt_logprobs=0, temperature=0.0, ignore_eos=True)
    stream = book_tokens[:15_000] + book_tokens[5_000:10_000]
    llm.llm_engine.add_request("long", {"prompt_token_ids": stream}, params)
    held, outputs = [], []
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
        held.append(round(pool_usage(llm) * pages))
    assert len(held) > 20_000 // 512
    assert held[-1] == 0
    assert set(held[1:-1]) == {-(-(4 + 128) // 32)}
    nll = -np.asarray(prompt_logprobs(outputs[-1]))
    assert np.isfinite(nll).all()
    quarters = [np.exp(part.mean()) for part in np.array_split(nll, 4)]
    print("perplexity by quarter:", [f"{q:.2f}" for q in quarters])
    assert quarters[3] == pytest.approx(quarters[1], rel=0.05)


def test_a_replay_after_preemption_changes_nothing(
    engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    """vLLM recomputes a preempted request, generated tokens included: same tokens, same pages."""
    llm = engine(engine_pool)
    params = SamplingParams(max_tokens=60, logprobs=0, temperature=0.0, ignore_eos=True)
    prompt = book_tokens[2000:2333]
    (whole,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    (again, found), (tokens, wanted) = map(generated, (preempted(llm, prompt, params), whole))
    assert again == tokens
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert pool_usage(llm) == 0.0


def test_aborted_requests_give_their_pages_back(
    engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    llm = engine(engine_pool)
    params = SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True)
    for name, length in (("decoding", 100), ("prefilling", 9000)):
        llm.llm_engine.add_request(name, {"prompt_token_ids": book_tokens[:length]}, params)
    for _ in range(5):
        llm.llm_engine.step()
    assert pool_usage(llm) > 0
    llm.llm_engine.abort_request(["decoding", "prefilling"])
    score(llm, [book_tokens[:50]])
    assert pool_usage(llm) == 0.0


def test_sampling_stays_diverse_beyond_the_budget(
    engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    """Frozen positions must not freeze the sampler's noise (DESIGN section 5)."""
    llm = engine(engine_pool)
    params = SamplingParams(max_tokens=400, temperature=1.0, ignore_eos=True, n=2)
    (output,) = llm.generate([{"prompt_token_ids": book_tokens[:40]}], params, use_tqdm=False)
    first, second = (list(completion.token_ids) for completion in output.outputs)
    assert first != second
    for tokens in (first, second):
        early, late = len(set(tokens[:100])), len(set(tokens[-100:]))
        assert late > 0.6 * early, (early, late)
