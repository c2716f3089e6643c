# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding on the Triton kernels, in the interpreter.

Answers and kept tokens are those of an engine without it, which runs in C++, and of the oracle.
Drafters are scripted (``drafters.py``); vLLM's own runs in a process with the second model runner.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.chats import Turn
from tests.engine.cuda_backend import use_cuda_backend
from tests.engine.drafters import Scripted, scripted
from tests.engine.pool import EnginePool
from tests.engine.test_against_oracle import run_oracle
from tests.engine.test_metrics import metrics
from tests.engine.test_runner_v2 import run
from tests.engine.test_speculation import (
    agree,
    answers,
    check_released,
    company,
    compare,
    in_a_process,
    script,
    spec_metric,
    worker,
)
from tests.oracle.families import FAMILIES, write_family
from tests.oracle.full_attention import OWN_MODULES
from tests.oracle.settings import with_prompt
from vllm_cascade.engine.gpu_worker import keep_prompts_out_of_graphs

SMALL = {"max_model_len": 512, "max_num_batched_tokens": 64, "max_num_seqs": 16, "block_size": 16}
CASCADE = {"name": "cascade", "budget": 32, "num_subcaches": 2, "num_sinks": 2}
EACH = {"head_policy": "per_kv_head"}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    # Settings, and the number of drafts.
    "window": ({"name": "window", "budget": 20}, 1),
    "sink": ({"name": "sink", "budget": 20, "overflow": 3}, 2),
    "lazy": ({"name": "lazy", "budget": 20, "overflow": 8, "slack": 6, "max_drop": 3}, 5),
    "cascade": (CASCADE, 4),
    "cascade-heads": ({**CASCADE, **EACH, "head_reduction": "max"}, 7),
    "beehive": (
        {"name": "beehive", "budget": 24, "window": 6, "stride": 3, "threshold": 14},
        6,
    ),
    "h2o": ({"name": "h2o", "budget": 24, "normalise": True}, 3),
    "random": ({"name": "random", "budget": 24}, 4),
    "dgc": ({"name": "dgc", "budget": 20, "importance": "attention"}, 3),
    "units": ({**CASCADE, "num_sinks": 4, "unit": 4}, 5),
    "recall": ({"name": "sink", "budget": 24, "num_sinks": 8, "unit": 8, "recall": 2,
                "recall_store": 64, "recall_every": 5}, 7),
    "keep-prompt": ({**CASCADE, "keep_prompt": 16}, 2),
}  # fmt: skip
ASKED: dict[str, list[dict[str, Any]]] = {
    "cascade": [{}, {"kv_budget": 16}, {"kv_policy": "h2o", "kv_budget": 12}],
    "recall": [{}, {"kv_recall": 0}, {"kv_policy": "window"}],
}
TOKENS = np.random.default_rng(1).integers(1, 500, 200).tolist()
PROMPTS = [TOKENS[:37], TOKENS[50:54], TOKENS[60:71]]
ANSWER = 30


@contextmanager
def triton() -> Iterator[None]:
    """Engines that start in this context run the CUDA backend's code."""
    with pytest.MonkeyPatch.context() as patch:
        use_cuda_backend(patch.setattr)
        yield


def engine(
    pool: EnginePool, policy: dict[str, Any], drafts: int, model: Path, **kwargs: Any
) -> Any:
    """An engine of its own: in C++ without drafts, on the Triton kernels with them."""
    pool.close()
    settings = {**SMALL, **kwargs}
    policy = {"prefill_stride": 8, "trace": True, **policy}
    if not drafts:
        return pool.get(policy, model, **settings)
    with triton():
        return pool.get(policy, model, speculative_config=scripted(drafts), **settings)


def check_case(pool: EnginePool, name: str, model: Path, rights: list[float]) -> None:
    policy, drafts = CASES[name]
    asked = ASKED.get(name)

    def start(num: int) -> Any:
        return engine(pool, policy, num, model, enable_prefix_caching=False)

    truth = agree(start, drafts, PROMPTS, asked, rights, num=ANSWER, alone=20)
    if asked is None:
        near_the_oracle(truth, policy, model)
    pool.close()


def near_the_oracle(truth: list[Turn], policy: dict[str, Any], model: Path) -> None:
    for prompt, (generated, found) in zip(PROMPTS, truth, strict=True):
        settings = with_prompt({"prefill_stride": 8, **policy}, len(prompt))
        told = run_oracle(settings, prompt + generated, model, prompt_len=len(prompt))
        expected = np.asarray(told.logprobs[len(prompt) - 1 :])
        assert np.abs(np.asarray(found) - expected).max() < 2e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_policy(name: str, engine_pool: EnginePool, llama: Path) -> None:
    check_case(engine_pool, name, llama, [0.7])


@pytest.mark.slow
@pytest.mark.parametrize("drafts", range(1, 8))
def test_any_number_of_drafts(drafts: int, engine_pool: EnginePool, llama: Path) -> None:
    CASES["numbered"] = (CASES["cascade"][0], drafts)
    check_case(engine_pool, "numbered", llama, [0.0, 0.8, 1.0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "cache_dtype"),
    [
        ("gemma2", "auto"),
        ("gpt-oss", "auto"),
        ("deepseek-v2", "auto"),
        ("deepseek-v2", "int8_per_token_head"),
    ],
)
def test_layers_of_other_kinds(
    architecture: str, cache_dtype: str, engine_pool: EnginePool, tmp_path: Path
) -> None:
    """Windows, learned sinks, latent rows, also in 8 bits."""
    model = write_family(tmp_path, (FAMILIES | OWN_MODULES)[architecture])
    policy = {**CASCADE, "trace": False}
    settings = {"skip_tokenizer_init": True, "enable_prefix_caching": False}
    settings["kv_cache_dtype"] = cache_dtype
    prompts = [TOKENS[:45], TOKENS[50:58]]
    truth = answers(engine(engine_pool, policy, 0, model, **settings), prompts, num=20)
    llm = engine(engine_pool, policy, 4, model, **settings)
    script(prompts, truth, 0.6)
    compare(answers(llm, prompts, num=20), truth)
    assert spec_metric(llm, "num_accepted_tokens") > 5
    engine_pool.close()


@pytest.mark.slow
def test_two_ranks() -> None:
    """Ranks exchange the scores of every draft."""
    found = in_a_process("tests.engine.triton_cpu", "drafts", "ngram", "h2o", "2")
    assert found["accepted"] > 20


@pytest.mark.slow
def test_sixteen_requests_with_aborts(engine_pool: EnginePool, llama: Path) -> None:
    policy = {**CASCADE, "budget": 16, "trace": False}
    prompts = [TOKENS[9 * i :][: 1 + 2 * i] for i in range(16)]
    asked = ASKED["cascade"] * 5 + [{}]
    truth = answers(engine(engine_pool, policy, 0, llama), prompts, asked, num=12)
    llm = engine(engine_pool, policy, 7, llama)
    script(prompts, truth, 0.8)
    company(llm, prompts, asked, truth, {3: 2, 7: 3, 12: 4}, num=12)
    assert spec_metric(llm, "num_accepted_tokens") > 50
    check_released(llm)
    engine_pool.close()


@pytest.mark.slow
def test_snapshots_preemptions_and_aborts(engine_pool: EnginePool, llama: Path) -> None:
    """Requests that come and go; a second batch starts from snapshots of the first one's."""
    num, policy = 14, {**CASCADE, "budget": 16, "trace": False}
    asked = [{}, {"kv_budget": 12}, {"kv_policy": "h2o", "kv_budget": 12}, {}]
    prompts = [TOKENS[9 * i :][: 1 + 11 * i] for i in range(4)]
    plain = engine(engine_pool, policy, 0, llama, enable_prefix_caching=True)
    truth = answers(plain, prompts, asked, num=num)
    llm = engine(engine_pool, policy, 3, llama, enable_prefix_caching=True)
    script(prompts, truth, 0.7)
    company(llm, prompts, asked, truth, {1: 4}, num=num, name="first")
    company(llm, prompts, asked, truth, {1: 4}, preempted=(5,), num=num, name="second")
    assert metrics(llm)["snapshot_hits"] > 1 and spec_metric(llm, "num_accepted_tokens") > 15
    check_released(llm)
    engine_pool.close()


def test_a_prompt_as_long_as_a_row_is_no_uniform_decode(
    engine_pool: EnginePool, llama: Path
) -> None:
    """Model Runner V1 would replay a graph of single tokens for it."""
    llm = engine(engine_pool, CASCADE, 3, llama)
    runner, seen = worker(llm).model_runner, []
    assert runner.uniform_decode_query_len == 4
    keep_prompts_out_of_graphs(runner)
    ours = runner._is_uniform_decode

    def noted(**numbers: Any) -> bool:
        seen.append((numbers["num_tokens"], numbers["num_reqs"], ours(**numbers)))
        return seen[-1][2]

    prompts, Scripted.answers = [TOKENS[:4], TOKENS[10:14]], []
    script(prompts, answers(llm, prompts, num=9), 1.0)
    runner._is_uniform_decode = noted
    answers(llm, prompts, num=9)
    assert seen[0] == (8, 2, False) and (8, 2, True) in seen[1:], seen
    assert ours(
        max_num_scheduled_tokens=4,
        uniform_decode_query_len=4,
        num_tokens=8,
        num_reqs=2,
        force_uniform_decode=True,
    )
    engine_pool.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [{"name": "cascade"}, {"name": "h2o", **EACH}, CASES["lazy"][0]],
    ids=lambda policy: policy["name"],
)
def test_second_runner(policy: dict[str, Any]) -> None:
    """Drafts that vLLM's drafter makes on the device, and the host does not know.

    Before that vLLM's warm-up serves requests of its own, with drafts and without.
    """
    found = run(policy, "drafts")
    assert found["runner"] == ["V2", "V2"] and min(found["warmed"]) >= 5, found["warmed"]
    assert found["async"] == [True, False], "drafts are undone before the next step"
    (texts, logprobs), (drafted, their) = found["answers"]
    assert drafted == texts
    for ours, expected in zip(their, logprobs, strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-4)
    assert 30 < found["accepted"] < found["draft"] and min(found["evicted"]) > 100
    assert found["reused"][0] == found["reused"][1] > 1
