# SPDX-License-Identifier: Apache-2.0
"""Drafting models on the Triton kernels, in the interpreter: draft models, EAGLE, EAGLE-3 and MTP.

As on the CPU (``test_drafting_models.py``): a draft model that is the target is always right, and
what other drafting layers see is the oracle's.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context

from tests.engine.pool import EnginePool
from tests.engine.test_drafting_models import always_right, check_drafts, drafter, speculative
from tests.engine.test_metrics import metrics
from tests.engine.test_runner_v2 import run
from tests.engine.test_speculation import answers, company, compare, in_a_process
from tests.engine.test_triton_speculation import (
    ASKED,
    CASCADE,
    CASES,
    PROMPTS,
    SMALL,
    TOKENS,
    near_the_oracle,
    triton,
)
from tests.engine.test_triton_speculation import engine as scripted_engine
from tests.oracle.families import FAMILIES, write_family
from tests.oracle.full_attention import OWN_MODULES
from vllm_cascade.attention.cuda.builder import CUDABuilder

EXACT = [name for name in CASES if name not in ("random", "recall")]
"""``random`` draws other numbers for other layers, and draft models recall nothing."""


def engine(
    pool: EnginePool, policy: dict[str, Any], drafts: int, model: Path, **kwargs: Any
) -> Any:
    """An engine of its own, whose drafting model is the target unless ``kwargs`` says otherwise."""
    pool.close()
    policy = {"prefill_stride": 8, **policy}
    kwargs.setdefault("speculative_config", speculative(drafts, model))
    with triton():
        return pool.get(policy, model, **{**SMALL, **kwargs})


def plain(pool: EnginePool, policy: dict[str, Any], model: Path, **kwargs: Any) -> Any:
    """An engine in C++ without drafts."""
    return scripted_engine(pool, {**policy, "trace": False}, 0, model, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_the_target_drafts_for_itself(name: str, engine_pool: EnginePool, llama: Path) -> None:
    policy, drafts = CASES[name]
    asked = ASKED.get(name)
    truth = answers(plain(engine_pool, policy, llama), PROMPTS, asked, num=30)
    llm = engine(engine_pool, {**policy, "trace": False}, drafts, llama)
    (builder,) = drafter(llm).builders
    assert isinstance(builder, CUDABuilder)
    build, chunks = builder.build, []

    def noted(*args: Any, **kwargs: Any) -> Any:
        metadata = build(*args, **kwargs)
        chunks.extend(wave.chunks for wave in metadata.waves)
        return metadata

    builder.build = noted
    with always_right(llm):
        compare(answers(llm, PROMPTS, asked, num=30), truth)
    # A prompt's strides are one launch where a policy compares no scores, as in the target.
    assert any(chunks) == (builder.schedule.keeps_newest is not None)
    if asked is None:
        near_the_oracle(truth, policy, llama)
    engine_pool.close()


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("mtp", "window"),
        pytest.param("eagle", "cascade", marks=pytest.mark.slow),
        pytest.param("draft_model", "recall", marks=pytest.mark.slow),
        pytest.param("draft_model", "h2o", marks=pytest.mark.slow),
        pytest.param("eagle", "units", marks=pytest.mark.slow),
        pytest.param("eagle3", "sink", marks=pytest.mark.slow),
        pytest.param("mtp", "cascade-heads", marks=pytest.mark.slow),
    ],
)
def test_against_the_oracle(
    method: str, name: str, engine_pool: EnginePool, tmp_path: Path
) -> None:
    policy = {"prefill_stride": 8, **CASES[name][0]}

    def start(policy: dict[str, Any], drafts: int, model: Path, **kwargs: Any) -> Any:
        make = engine if drafts else scripted_engine
        return make(engine_pool, policy, drafts, model, **kwargs)

    # Of the text with seed 1, rounding decides between two tokens of h2o with almost one score.
    sizes = {"num_prompt": 50, "num": 28, "max_model_len": 512}
    check_drafts(method, policy, start, tmp_path, seed=2, **sizes)
    engine_pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", ["auto", "int8_per_token_head"])
@pytest.mark.parametrize("architecture", ["gemma2", "gpt-oss", "deepseek-v2"])
def test_layers_of_other_kinds(
    architecture: str, cache_dtype: str, engine_pool: EnginePool, tmp_path: Path
) -> None:
    """Windows, learned sinks and latent rows in both models, also in 8 bits, where C++ and Triton
    may round a number to neighbouring codes."""
    model = write_family(tmp_path, (FAMILIES | OWN_MODULES)[architecture])
    settings = {"skip_tokenizer_init": True, "kv_cache_dtype": cache_dtype}
    prompts = [TOKENS[:45], TOKENS[50:58]]
    truth = answers(plain(engine_pool, CASCADE, model, **settings), prompts, num=20)
    llm = engine(engine_pool, CASCADE, 4, model, **settings)
    with always_right(llm):
        compare(answers(llm, prompts, num=20), truth, 1e-4 if cache_dtype == "auto" else 5e-3)
    engine_pool.close()


@pytest.mark.slow
def test_snapshots_preemptions_and_aborts(engine_pool: EnginePool, llama: Path) -> None:
    """Requests that come and go, so that rows of a pass are empty; a second batch starts from
    snapshots, which hold the draft model's state, too."""
    num, policy = 14, {**CASCADE, "budget": 16}
    asked = [{}, {"kv_budget": 12}, {"kv_policy": "h2o", "kv_budget": 12}, {}]
    prompts = [TOKENS[9 * i :][: 1 + 11 * i] for i in range(4)]
    settings = {"enable_prefix_caching": True}
    truth = answers(plain(engine_pool, policy, llama, **settings), prompts, asked, num=num)
    llm = engine(engine_pool, policy, 3, llama, **settings)
    with always_right(llm):
        company(llm, prompts, asked, truth, {1: 4}, num=num, name="first")
        company(llm, prompts, asked, truth, {1: 4}, preempted=(5,), num=num, name="second")
    assert metrics(llm)["snapshot_hits"] > 1
    engine_pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "mtp"])
def test_second_runner(method: str) -> None:
    """Through vLLM's profile and warm-up; requests come and go, and are preempted."""
    found = run({"name": "cascade"}, "model_drafts", method)
    (texts, logprobs), (drafted, their) = found["answers"]
    assert drafted == texts and found["wrong"] == 0
    np.testing.assert_allclose(np.asarray(their), np.asarray(logprobs), atol=1e-4)
    assert found["async"] == [True, False], "drafts are undone before the next step"
    assert found["reused"][0] == found["reused"][1] > 1 and min(found["warmed"]) >= 5
    assert 40 < found["accepted"] < found["draft"] and found["drafts"] > 30


@pytest.mark.slow
def test_two_ranks() -> None:
    """Ranks exchange the scores of a drafting model's tokens, too."""
    found = in_a_process("tests.engine.triton_cpu", "drafts", "draft_model", "h2o", "2")
    assert found["accepted"] == found["drafted"] > 20


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_padded_as_in_a_graph(method: str, engine_pool: EnginePool, tmp_path: Path) -> None:
    """A drafting model's CUDA graphs run batches that are padded, in vLLM's buffers.

    Some padded batches run without a graph, as where another data-parallel engine has none.
    """
    policy, calls = {"prefill_stride": 8, **CASCADE}, []

    def start(policy: dict[str, Any], drafts: int, model: Path, **kwargs: Any) -> Any:
        if not drafts:
            return scripted_engine(engine_pool, policy, 0, model, **kwargs)
        llm = engine(engine_pool, policy, drafts, model, **kwargs)
        drafting = drafter(llm)
        run = drafting.model.forward

        def forward(**inputs: Any) -> Any:
            mode = get_forward_context().cudagraph_runtime_mode
            num = len(inputs["input_ids"])
            calls.append((mode, num <= 40))
            assert inputs["positions"].shape == (num,)
            if num <= 40:
                assert num % 8 == 0
                for name in {"input_ids", "hidden_states"} & set(inputs):
                    assert inputs[name].data_ptr() == getattr(drafting, name).data_ptr()
            return run(**inputs)

        def pad(num: int, **_: Any) -> tuple[CUDAGraphMode, int, None]:
            if num > 40:
                return CUDAGraphMode.NONE, num, None
            mode = CUDAGraphMode.NONE if num % 2 else CUDAGraphMode.PIECEWISE
            return mode, -(-num // 8) * 8, None

        drafting.model.forward, drafting._determine_batch_execution_and_padding = forward, pad
        return llm

    # Of the text with seed 1, rounding decides between two tokens of h2o with almost one score.
    sizes = {"num_prompt": 50, "num": 28, "max_model_len": 512}
    check_drafts(method, policy, start, tmp_path, seed=2, **sizes)
    none, graph = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE
    assert set(calls) == {(none, False), (none, True), (graph, True)} and len(calls) > 40
    engine_pool.close()
