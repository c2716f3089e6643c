# SPDX-License-Identifier: Apache-2.0
"""Families of models with windows, learned sinks or unrotated layers, against the oracle.

Tiny random models of the real architectures. A prompt is read in strides and greedy tokens follow,
past the windows, the budget and the model's 512 positions. The oracle is transformers' modules
around explicit token lists (tests/oracle/streamed.py).
"""

import math
import multiprocessing
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from tests.cpp_library import CALLS
from tests.engine.pool import EnginePool, pool_usage
from tests.engine.test_against_oracle import MAX_ERROR, MEAN_ERROR, PYTORCH
from tests.engine.test_metrics import metrics
from tests.engine.test_prefix_caching import ask
from tests.engine.test_units import decode, kept_sets
from tests.oracle.families import FAMILIES, WINDOW, Family, run_family, write_family
from vllm_cascade.models.probe import BY_TRANSFORMERS
from vllm_cascade.policies.settings import KVPolicyError

Case = tuple[str, str, dict[str, str]]
"""A family, a policy's name in ``POLICIES``, and the environment."""
CASCADE = {"name": "cascade", "budget": 64, "prefill_stride": 32}
SINK = {"name": "sink", "budget": 24, "prefill_stride": 64, "head_policy": "per_kv_head"}
POLICIES: dict[str, dict[str, Any]] = {
    "cascade": CASCADE,
    "cascade-heads": {**CASCADE, "head_policy": "per_kv_head", "prefill_stride": 24},
    "sink": {**SINK, "head_policy": "homogeneous"},  # a budget below the window
    "sink-heads": SINK,
    "h2o": {"name": "h2o", "budget": 40, "prefill_stride": 16, "overflow": 3},
    "units": {"name": "cascade", "num_subcaches": 2, "budget": 64, "prefill_stride": 32, "unit": 8},
}
UNSURE = -0.2
"""Mean log-probability of generated tokens, at most, where they depend on what is attended to. A
model that is certain of its next token says the same with any cache."""
FAST = [
    ("gemma3", "cascade", {}),
    ("gpt-oss", "cascade-heads", {}),
    ("cohere2", "sink", {}),
    ("llama4", "cascade", {}),  # strides that cross chunks
]
SLOW = [
    *((family, "cascade", {}) for family in FAMILIES if (family, "cascade", {}) not in FAST),
    *((family, "sink-heads", dict(PYTORCH)) for family in FAMILIES),
    *((family, "units", {}) for family in ("gemma3", "gpt-oss")),
    ("gemma3", "h2o", {}),
    ("gemma4-shared", "h2o", {}),
    ("gpt-oss", "h2o", dict(PYTORCH)),
    ("gemma3n", "h2o", dict(PYTORCH)),
    ("llama4", "h2o", dict(PYTORCH)),
    ("llama4", "units", {}),
    ("llama4", "cascade-heads", {}),
    ("gemma3n", "units", {}),
    ("gemma4-shared", "units", dict(PYTORCH)),
    ("gemma3", "units", dict(PYTORCH)),
]


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the models that a test has asked for."""
    return {}


@pytest.fixture
def model_of(written: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    def folder(family: str) -> Path:
        if family not in written:
            path = tmp_path_factory.mktemp(family)
            written[family] = apart(write_family, path, FAMILIES[family])
        return written[family]

    return folder


def engine(
    pool: EnginePool, path: Path, policy: dict[str, Any], env: dict[str, str], **kwargs: Any
) -> Any:
    return pool.get(
        {**policy, "trace": True},
        path,
        env=env,
        max_model_len=2048,
        max_num_batched_tokens=100,
        skip_tokenizer_init=True,
        **kwargs,
    )


def random_tokens(seed: int, num: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 500, num).tolist()


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that uses transformers' models.

    It runs in another process once vLLM has run a model by transformers in this one: vLLM changes
    the model's class for good.
    """
    if BY_TRANSFORMERS not in sys.modules:
        return function(*arguments)
    return other_process().submit(function, *arguments).result()


@cache
def other_process() -> ProcessPoolExecutor:
    """A process without vLLM, which lives as long as this one."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def compare(
    llm: Any, name: str, truth_of: Callable[[list[int]], Any], prompt_len: int, kept_at_most: int
) -> tuple[np.ndarray, dict[str, int]]:
    """A random prompt and 60 more tokens on an engine, and what a reference says of the same.

    Kept tokens are those of the reference, and no page is left.

    Args:
        truth_of: the reference's run of some tokens, ``prompt_len`` of them the prompt's.
        kept_at_most: tokens that no policy can have evicted.

    Returns:
        Errors of log-probabilities, and how the engine's counters and ``native_calls`` have grown.
    """
    more = 60
    (before,) = llm.collective_rpc("kv_policy_counters")
    calls = sum(CALLS.values())
    llm.collective_rpc("kv_policy_trace", args=(1,))
    tokens, logprobs = decode(llm, random_tokens(0, prompt_len), more + 1)
    kept = kept_sets(llm)
    (after,) = llm.collective_rpc("kv_policy_counters")
    grown = {"evicted_tokens": after["evicted_tokens"] - before["evicted_tokens"]}
    grown["native_calls"] = sum(CALLS.values()) - calls
    truth = truth_of(tokens[:-1])
    assert truth.closest_contest > 1e-6, "a tie that rounding decides: choose another seed"
    assert np.mean(logprobs[prompt_len - 1 :]) < UNSURE
    error = np.abs(np.asarray(logprobs[:-1]) - np.asarray(truth.logprobs))
    print(f"{name}: max {error.max():.2e}, mean {error.mean():.2e}")
    assert kept == truth.kept
    assert grown["evicted_tokens"] >= prompt_len + more - kept_at_most
    assert pool_usage(llm) == 0.0
    return error, grown


def cases(fast: Sequence[Case], slow: Sequence[Case]) -> list[Any]:
    """Families under policies, with what the engine's environment is; the latter are slow ones."""

    def named(case: Case, *marks: pytest.MarkDecorator) -> Any:
        path = ["pytorch"] if marks and case[2] else []
        return pytest.param(*case, id="-".join([*case[:2], *path]), marks=marks)

    return [*map(named, fast), *(named(case, pytest.mark.slow) for case in slow)]


def check(
    llm: Any,
    path: Path,
    named: tuple[str, Family],
    policy: dict[str, Any],
    prompt_len: int = 1000,
    native: bool = True,
) -> None:
    """Log-probabilities and kept tokens of a prompt and 60 more."""
    name, family = named
    error, grown = compare(
        llm,
        name,
        lambda tokens: apart(run_family, path, family, tokens, prompt_len, policy),
        prompt_len=prompt_len,
        kept_at_most=max(policy["budget"] + 8 + policy.get("unit", 1) - 1, WINDOW),
    )
    assert error.max() < MAX_ERROR and error.mean() < MEAN_ERROR
    assert grown["evicted_tokens"] > 0
    assert (grown["native_calls"] > 0) == native


def check_company(llm: Any, stride: int, lengths: Sequence[int] = (330, 1, 47, 600, 48)) -> None:
    """The same alone, among others, and from a snapshot."""
    interval = math.lcm(stride, 32)
    prompts = [random_tokens(seed, length) for seed, length in enumerate(lengths, 1)]
    alone = [ask(llm, [prompt])[0] for prompt in prompts]
    again = [ask(llm, [prompt])[0] for prompt in prompts]
    assert [turn[0] for turn in again] == [(len(p) - 1) // interval * interval for p in prompts]
    llm.reset_prefix_cache()
    together = ask(llm, prompts)
    assert [turn[0] for turn in together] == [0] * len(prompts)
    for single, *others in zip(alone, again, together, strict=True):
        for other in others:
            assert other[1] == single[1]
            np.testing.assert_allclose(other[2], single[2], atol=1e-4)


def test_a_pool_without_room_for_a_window_is_refused(
    engine_pool: EnginePool, model_of: Any
) -> None:
    with pytest.raises(KVPolicyError, match="also for the model's sliding windows"):
        engine(engine_pool, model_of("gemma3"), CASCADE, {}, num_gpu_blocks_override=3)


def test_pages_and_saved_bytes(engine_pool: EnginePool, model_of: Any) -> None:
    """What requests hold is what the kinds' sizes say, and metrics count both kinds."""
    llm = engine(engine_pool, model_of("gemma3"), CASCADE, {})
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    for name, length in {"long": 300, "short": 20, "between": 47}.items():
        prompt = {"prompt_token_ids": random_tokens(length, length)}
        llm.llm_engine.add_request(name, prompt, params)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    token = 2 * 2 * 32 * 4  # K and V of 2 heads of 32 fp32 numbers
    slots = 16  # 47 tokens of a window on the 3 pages that 68 tokens need
    page = 2 * 32 * (token + 16) + 2 * slots * (token + 16)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        live = [r.num_computed_tokens for r in scheduler.requests.values()]
        pages = sum(max(-(-min(n, 68) // 32), -(-min(n, 47) // slots)) for n in live)
        blocks = [-(-n // 32) for n in live]
        stock = sum(2 * token * 32 * (n + min(n, 3)) for n in blocks)
        now = metrics(llm)
        assert now["pages"] == pages
        assert now["saved_bytes"] == stock - pages * page
    assert pool_usage(llm) == 0.0


def plain_shapes(llm: Any) -> set[tuple[Any, ...]]:
    """What the check at the start would compare: heads, size, pairs, window, chunks, sinks."""
    (shapes,) = llm.collective_rpc("_layer_shapes")
    found = {
        (x.num_kv_heads, x.head_size, x.rotary and x.is_neox, x.window, x.chunked, x.sinks)
        for x in shapes
    }
    assert len(found) == len(shapes)
    return found


SHAPES: dict[str, set[tuple[Any, ...]]] = {
    "gemma3": {(2, 32, True, WINDOW, False, False), (2, 32, True, None, False, False)},
    "gpt-oss": {(2, 32, True, WINDOW, False, True), (2, 32, True, None, False, True)},
    "cohere2": {(2, 32, False, WINDOW, False, False), (2, 32, None, None, False, False)},
    "gemma4-shared": {(2, 32, True, WINDOW, False, False), (2, 64, True, None, False, False)},
    "llama4": {(2, 32, True, WINDOW, True, False), (2, 32, None, None, False, False)},
}
"""The shapes of some families; pairs are neighbours (False), or nothing rotates (None)."""


def test_streams_that_end_in_the_short_range_of_longrope(
    engine_pool: EnginePool, model_of: Any
) -> None:
    """They have its frequencies, as in vLLM, also if the policy could keep more."""
    path, settings = model_of("phi3-long"), {**CASCADE, "prefill_stride": 8}
    length, prompt = 16, random_tokens(0, 10)
    llm = engine_pool.get(settings, path, max_model_len=length, skip_tokenizer_init=True)
    tokens, logprobs = decode(llm, prompt, length - len(prompt))
    family = replace(FAMILIES["phi3-long"], long=False)
    truth = apart(run_family, path, family, tokens, len(prompt), settings)
    assert len(logprobs) == length - 1
    assert np.abs(np.asarray(logprobs) - truth.logprobs).max() < MAX_ERROR


@pytest.mark.parametrize(("family", "policy", "env"), cases(FAST, SLOW))
def test_family(
    family: str, policy: str, env: dict[str, str], engine_pool: EnginePool, model_of: Any
) -> None:
    path, settings = model_of(family), POLICIES[policy]
    llm = engine(engine_pool, path, settings, env)
    check(llm, path, (family, FAMILIES[family]), settings, native=not env)
    check_company(llm, settings["prefill_stride"])
    if family in SHAPES:
        assert plain_shapes(llm) == SHAPES[family]
        (layers,) = llm.collective_rpc("_all_layers")  # chunks need memory as windows do
        assert {layer.impl.window for layer in layers.values()} == {WINDOW, None}


def other_checkpoint(path: Path, folder: Path, change: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """A copy of a checkpoint with other numbers in all weights of this name; and these weights."""
    other = shutil.copytree(path, folder / "other")
    weights = load_file(other / "model.safetensors")
    changed = {name: w.flip(0) + 0.5 for name, w in weights.items() if change in name}
    save_file({**weights, **changed}, other / "model.safetensors", {"format": "pt"})
    return other, changed


@pytest.mark.slow
def test_sinks_that_are_loaded_into_an_engine(
    engine_pool: EnginePool, model_of: Any, tmp_path: Path
) -> None:
    """By the model's own method, as a worker extension does. In bfloat16, kernels have a copy."""
    path, settings = model_of("gpt-oss"), POLICIES["cascade-heads"]
    other, sinks = other_checkpoint(path, tmp_path, "sinks")
    assert len(sinks) == 4
    prompts = [random_tokens(1, 300)]
    wanted = ask(engine(engine_pool, other, settings, {}, dtype="bfloat16"), prompts)
    llm = engine(engine_pool, path, settings, {}, dtype="bfloat16")
    before = ask(llm, prompts)
    assert before[0][2] != wanted[0][2]
    llm.apply_model(lambda model: model.load_weights(sinks.items()))
    llm.reset_prefix_cache()
    assert ask(llm, prompts) == wanted
    engine_pool.close()  # no other test expects these weights
