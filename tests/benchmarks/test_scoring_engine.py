# SPDX-License-Identifier: Apache-2.0
"""One engine: texts at a time score as alone, scores are vLLM's own, and the pool is as planned."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from benchmarks.inputs.texts import Stream
from benchmarks.running import answers, arms, pools, prompt_scores, scoring
from benchmarks.running.answers import Asking, Prompt
from benchmarks.running.engines import EngineSettings
from benchmarks.running.parts import Parts
from benchmarks.running.scoring import Job
from tests.engine.pool import EnginePool
from vllm_cascade.policies.registry import POLICIES

SETTINGS = EngineSettings(
    policy={"name": "cascade", "budget": 64, "prefill_stride": 32},
    max_model_len=602,
    max_num_seqs=2,
    max_num_batched_tokens=128,
)


@pytest.fixture(scope="module")
def llm(engine_pool: EnginePool) -> Iterator[Any]:
    before = dict(POLICIES)
    arguments = SETTINGS.llm_arguments()
    POLICIES.clear()  # without the controls, which other tests do not know
    POLICIES.update(before)
    started = engine_pool.get(
        model=Path(arguments.pop("model")),
        policy=SETTINGS.policy,
        **{key: value for key, value in arguments.items() if key != "additional_config"},
    )
    yield started
    engine_pool.close()  # its scores are not vLLM's any more


@pytest.fixture(scope="module")
def texts(book_tokens: list[int]) -> list[Stream]:
    """Three of different lengths, none a whole number of strides."""
    parts = [book_tokens[:600], book_tokens[1000:1250], book_tokens[2000:2333]]
    return [Stream(f"text {n}", ids, np.ones(len(ids) - 1, bool)) for n, ids in enumerate(parts)]


@pytest.fixture(scope="module")
def stock_nll(llm: Any, texts: list[Stream]) -> list[np.ndarray]:
    """Before any other test: vLLM's own scores, each text alone."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, flat_logprobs=True)
    prompts = [{"prompt_token_ids": text.token_ids} for text in texts]
    outputs = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
    return [-np.asarray(output.prompt_logprobs.logprobs) for output in outputs]


def test_the_pool_is_what_was_planned(llm: Any, stock_nll: list[np.ndarray]) -> None:
    pages = 1 + pools.MARGIN_PAGES + 2 * 3  # 64 tokens and 4 sinks are 3 pages
    assert llm.llm_engine.vllm_config.cache_config.num_gpu_blocks == pages


@pytest.mark.parametrize("group", [1, 2, 3])
def test_together_as_alone(
    llm: Any, texts: list[Stream], stock_nll: list[np.ndarray], group: int
) -> None:
    """Also where one of three waits for room."""
    found = scoring.run_on(llm, Job("cascade", SETTINGS, tuple(texts), group=group))
    for ours, alone in zip(found.nll, stock_nll, strict=True):
        assert ours == pytest.approx(alone, abs=2e-5)
    assert found.counters["evicted_tokens"] == sum(len(t.token_ids) - 68 for t in texts)
    # Texts share a step only where one of them leaves tokens of it.
    assert found.pages_peak == 3 if group == 1 else 3 <= found.pages_peak <= 6
    assert found.tokens_per_second == pytest.approx(1183 / found.seconds)


def test_scores_of_one_token_only() -> None:
    import torch

    logits = torch.randn(150, 977, generator=torch.Generator().manual_seed(0)) * 5
    ids = torch.arange(150) * 6
    expected = torch.log_softmax(logits.double(), -1)[torch.arange(150), ids]
    for dtype, far in ((torch.float32, 1e-5), (torch.bfloat16, 0.2)):
        found = prompt_scores.log_probabilities(logits.to(dtype), ids)
        assert found.dtype == torch.float32
        assert (found - expected).abs().max() < far
    with pytest.raises(ValueError, match="prompt_logprobs=0"):
        prompt_scores._gather(logits, 5, ids)


def no_engine(work: Any, jobs: list[Job], at_a_time: int) -> list[Any]:
    """For ``arms.outcomes`` where every arm must have been kept."""
    assert not jobs
    return []


def test_a_stream_that_is_kept_is_not_read_again(
    llm: Any, texts: list[Stream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job("cascade", SETTINGS, tuple(texts))
    job = replace(job, arm=Parts(tmp_path).arm(job.label, job.determines()))
    read, names = scoring._read, []

    def failing(engine: Any, job: Job, group: list[Stream]) -> Any:
        names.append(group[0].name)
        if names == ["text 0", "text 1"]:
            raise RuntimeError("the machine went away")
        return read(engine, job, group)

    monkeypatch.setattr(scoring, "_read", failing)
    with pytest.raises(RuntimeError, match="went away"):
        scoring.run_on(llm, job)
    found = scoring.run_on(llm, job)
    assert names == ["text 0", "text 1", "text 1", "text 2"]
    fresh = scoring.run_on(llm, replace(job, arm=None))
    for kept, ours in zip(found.nll, fresh.nll, strict=True):
        assert (kept == ours).all(), "nine digits are all of a float32"
    assert found.counters == fresh.counters
    monkeypatch.setattr(arms, "outcomes", no_engine)
    kept_in = Parts(tmp_path)
    again = arms.run_all(scoring.run, [replace(job, arm=None)], 1, kept_in).done["cascade"]
    assert [values.tolist() for values in again.nll] == [values.tolist() for values in found.nll]
    half = np.zeros(599, dtype=bool)
    half[300:] = True
    masked = replace(job, streams=(replace(texts[0], scored=half), *texts[1:]), arm=None)
    once_more = arms.run_all(scoring.run, [masked], 1, kept_in).done["cascade"]
    assert np.isnan(once_more.nll[0][:300]).all() and once_more.num_tokens == again.num_tokens - 300


def test_answers_are_kept_one_by_one(
    llm: Any, texts: list[Stream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tuple(Prompt(tuple(text.token_ids[:200]), 6) for text in texts)
    params = SamplingParams(temperature=0.0, max_tokens=6)
    inputs = [{"prompt_token_ids": list(one.tokens)} for one in prompts]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    monkeypatch.setattr(EngineSettings, "start", lambda self: llm)
    job = Asking("cascade", SETTINGS, prompts)
    job = replace(job, arm=Parts(tmp_path).arm(job.label, job.determines()))
    assert answers.ask(replace(job, prompts=prompts[:2])) == [
        o.outputs[0].text for o in outputs[:2]
    ]
    assert len(job.arm.read()) == 2
    assert answers.ask(job) == [output.outputs[0].text for output in outputs]
    assert answers.ask(replace(job, arm=None)) == answers.ask(job)


def test_pool_sizes_by_hand() -> None:
    """books-5m: 6 layers, 2 KV heads of 64; a policy has three numbers of 4 bytes a slot."""
    keys_and_values = 6 * 2 * 64 * 2
    full = replace(SETTINGS, policy=None, max_num_seqs=1)
    assert pools.page_bytes(full) == 32 * keys_and_values * 4
    assert (
        pools.page_bytes(replace(full, dtype="bfloat16", block_size=16)) == 16 * keys_and_values * 2
    )
    assert pools.page_bytes(SETTINGS) == 32 * (keys_and_values * 4 + 6 * 12)
    per_head = replace(SETTINGS, policy={**SETTINGS.policy, "head_policy": "per_kv_head"})
    assert pools.page_bytes(per_head) == 32 * (keys_and_values * 4 + 6 * 2 * 12)
    in_8_bits = replace(SETTINGS, arguments={"kv_cache_dtype": "fp8"})
    assert pools.page_bytes(in_8_bits) == 32 * (keys_and_values + 6 * 12)
    of_rows = replace(SETTINGS, arguments={"kv_cache_dtype": "int8_per_token_head"})
    assert pools.page_bytes(of_rows) == 32 * (keys_and_values + 6 * 2 * 8 + 6 * 12)
    spare = 1 + pools.MARGIN_PAGES
    assert pools.pool_bytes(full) == (19 + spare) * pools.page_bytes(full), "602 tokens: 19 pages"
    many = replace(full, max_num_seqs=100_000)
    assert pools.pool_bytes(many) == 1 << 30, "some wait"
    long = replace(full, max_model_len=1 << 20)
    assert pools.pool_bytes(long) == ((1 << 15) + spare) * pools.page_bytes(full), "one must fit"
