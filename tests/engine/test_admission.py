# SPDX-License-Identifier: Apache-2.0
"""How large a request may be, what it may ask for, and whose pool may be too small.

The 400 of a live server: ``tests/engine/test_faults.py``.
"""

import re
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import PoolingParams, SamplingParams
from vllm.config import ParallelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.exceptions import VLLMValidationError
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.conftest import MODEL
from tests.policies.test_per_request import CASCADE, UNMET
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.engine import admission
from vllm_cascade.engine.admission import (
    check_arguments,
    check_request,
    longest_stream,
    usable_pages,
)
from vllm_cascade.engine.devices import DEVICES
from vllm_cascade.engine.lookup import requests_of
from vllm_cascade.patches import kv_cache_planning, request_checks
from vllm_cascade.policies.per_request import PerRequest
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.registry import POLICIES, policy_of, resolve
from vllm_cascade.policies.schedule import compiled
from vllm_cascade.policies.settings import KVPolicyError

POLICY = {"name": "sink", "budget": 64, "prefill_stride": 16}


@settings(deadline=None)
@given(name=st.sampled_from(sorted(POLICIES)), slots=st.integers(0, 90), limit=st.integers(0, 200))
def test_longest_stream(name: str, slots: int, limit: int) -> None:
    schedule = compiled(resolve({"name": name, "budget": 64, "prefill_stride": 16}))
    needed = np.maximum.accumulate([schedule.count_at(t) for t in range(limit + 1)])
    assert longest_stream(schedule, slots, limit) == np.flatnonzero(needed <= slots)[-1]


def config(policy: dict[str, Any] | None = POLICY, **kwargs: Any) -> Any:
    sizes = {"max_model_len": 1000, "block_size": 16, **kwargs}
    additional = {} if policy is None else {"kv_policy": {"recall": 0, **policy}}
    made = EngineArgs(model=str(MODEL), additional_config=additional, **sizes)
    return made.create_engine_config()


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (40, 8, None),
        (
            40,
            9,
            r"needs 4 KV cache pages of 16 tokens, but the pool has 3.*max_tokens to at most 8",
        ),
        (40, None, r"prompt 40 \+ max_tokens 960, at most max_model_len 1000.*at most 8"),
        (48, 1, "may have 48 tokens, and these are 49 .*shorten the prompt"),
        (990, 500, "needs 5 KV cache pages .*these are 1000 "),
    ],
)
def test_check_request(prompt: int, max_tokens: int | None, message: str | None) -> None:
    engine = config()
    engine.cache_config.num_gpu_blocks = 4
    params = SamplingParams(max_tokens=max_tokens)
    if message is None:
        check_request(engine, prompt, params)
        return
    with pytest.raises(VLLMValidationError, match=message):
        check_request(engine, prompt, params)


@pytest.mark.parametrize(
    "given",
    [
        {"kv_budge" + "t" * 4_000_000: 1},
        {"kv_budget": "x" * 4_000_000},
        {"kv_policy": "x" * 4_000_000},
        {"kv_session": "x" * 3_000_000},
        {"kv_session": "a", "kv_session_release": ["x" * 1000] * 1000},
    ],
    ids=["key", "number", "policy", "session", "release"],
)
def test_a_refusal_is_short(given: dict[str, Any]) -> None:
    """Whatever the client has sent."""
    engine = config()
    engine.additional_config["kv_sessions"] = True
    with pytest.raises(VLLMValidationError) as error:
        check_request(engine, 5, SamplingParams(max_tokens=1, extra_args=given))
    assert len(str(error.value)) < 600 and len(error.value.parameter or "") <= 80


def test_streaming_input_needs_room_for_the_longest_stream() -> None:
    """Its parts may come to any length; what the message proposes is accepted."""
    engine = config()
    engine.cache_config.num_gpu_blocks = 4
    params = SamplingParams(max_tokens=8)
    check_request(engine, 30, params)
    refused = (
        "may grow to --max-model-len 1000 tokens and then needs 5 KV cache pages of 16 tokens "
        "under kv_policy sink, but the pool has 3. .*-blocks-override 6 .*--max-model-len 48 "
    )
    with pytest.raises(VLLMValidationError, match=refused):
        check_request(engine, 30, params, resumable=True)
    check_request(
        engine, 30, SamplingParams(max_tokens=8, extra_args={"kv_budget": 40}), resumable=True
    )
    engine.cache_config.num_gpu_blocks = 6
    check_request(engine, 30, params, resumable=True)
    shorter = config(max_model_len=48)
    shorter.cache_config.num_gpu_blocks = 4
    check_request(shorter, 30, params, resumable=True)
    with pytest.raises(VLLMValidationError, match="unknown argument 'kv_bugdet'"):
        check_request(engine, 5, SamplingParams(extra_args={"kv_bugdet": 5}), resumable=True)


def test_a_part_of_streaming_input_is_checked_as_the_whole() -> None:
    """The first part's length decides what ``keep_prompt`` keeps, and parts do not know it."""
    engine = config({**POLICY, "keep_prompt": 64})
    engine.cache_config.num_gpu_blocks = 6
    check_request(engine, 5, SamplingParams(max_tokens=500))
    for prompt in (5, 100):
        with pytest.raises(VLLMValidationError, match="needs 8 KV cache pages"):
            check_request(engine, prompt, SamplingParams(max_tokens=5), resumable=True)


def test_both_ways_in_know_streaming_input() -> None:
    """An answer to come is refused before the prompt's first part is there."""
    engine, params = config(), SamplingParams(max_tokens=8)
    engine.cache_config.num_gpu_blocks = 4
    asked = SimpleNamespace(vllm_config=engine)

    def made(self: Any, resumable: bool) -> Any:
        tokens = {"prompt_token_ids": [1, 2], "prompt_embeds": None, "mm_features": None}
        return SimpleNamespace(sampling_params=params, resumable=resumable, **tokens)

    async def prompt() -> AsyncGenerator[list[int], None]:
        yield [1, 2]

    process = request_checks._wrap_process_inputs(made)
    assert process(asked, resumable=False).resumable is False
    with pytest.raises(VLLMValidationError, match="may grow to --max-model-len"):
        process(asked, resumable=True)
    generate = request_checks._wrap_generate(lambda *args: "answer")
    with pytest.raises(VLLMValidationError, match="may grow to --max-model-len"):
        generate(asked, prompt(), params)
    engine.cache_config.num_gpu_blocks = 6
    assert generate(asked, prompt(), params) == "answer"


def test_prompts_of_an_encoder_and_a_decoder() -> None:
    """Of speech models, for one: they have no policy, and their prompts have two parts."""
    decoder = {"type": "token", "prompt_token_ids": [1, 2]}
    audio = {"type": "multimodal", "prompt_token_ids": [1] * 400}
    prompt = {"type": "enc_dec", "encoder_prompt": audio, "decoder_prompt": decoder}
    stock = SimpleNamespace(vllm_config=config(None))
    generate = request_checks._wrap_generate(lambda *args: "answer")
    params = SamplingParams(max_tokens=8)
    assert generate(stock, prompt, params) == "answer"
    with pytest.raises(VLLMValidationError, match="this server runs no KV policy"):
        generate(stock, prompt, SamplingParams(extra_args={"kv_budget": 5}))


def test_sessions_are_refused_where_there_are_none() -> None:
    params = SamplingParams(extra_args={"kv_session": "mine"})
    for policy, flags in (None, "--kv-policy and --kv-sessions"), (POLICY, "--kv-sessions"):
        with pytest.raises(VLLMValidationError, match=f"no sessions; start it with {flags} "):
            check_request(config(policy), 2, params)


def test_responses_are_checked_before_they_begin() -> None:
    """vLLM's generator of ``/v1/responses`` calls the engine after a stream's status is sent."""
    request_checks.apply_to_responses()
    request_checks.apply_to_responses()  # changes nothing
    engine = config()
    engine.cache_config.num_gpu_blocks = 4
    serving = OpenAIServingResponses.__new__(OpenAIServingResponses)
    serving.engine_client = SimpleNamespace(vllm_config=engine)  # type: ignore[assignment]

    def ask(prompt: int, context: Any = None, **kwargs: Any) -> Any:
        tokens: Any = {"type": "token", "prompt_token_ids": [1] * prompt}
        params = SamplingParams(max_tokens=8, **kwargs)
        return serving._generate_with_builtin_tools(
            request_id="a", engine_input=tokens, sampling_params=params, context=context
        )

    with pytest.raises(VLLMValidationError, match="kv_budget 999 is more than the server's"):
        ask(2, extra_args={"kv_budget": 999})
    with pytest.raises(VLLMValidationError, match="KV cache pages"):
        ask(300)
    assert isinstance(ask(2), AsyncGenerator)


def test_without_a_policy_nothing_is_checked() -> None:
    engine = config(None)
    engine.cache_config.num_gpu_blocks = 4
    check_request(engine, 990, SamplingParams(max_tokens=500))
    check_request(engine, 990, SamplingParams(max_tokens=500), resumable=True)


@pytest.mark.parametrize(
    ("size", "local", "local_only", "pages"),
    [(1, 1, False, 99), (4, 1, False, 24), (4, 2, True, 49), (4, 0, True, 24)],
)
def test_pages_of_one_of_many_engines(size: int, local: int, local_only: bool, pages: int) -> None:
    """vLLM tells a front-end the sum of the pools of the engines it talks to."""
    parallel = SimpleNamespace(
        data_parallel_size=size,
        data_parallel_size_local=local,
        local_engines_only=local_only,
        data_parallel_rank_local=None,
        distributed_executor_backend="mp",
    )
    cache = SimpleNamespace(num_gpu_blocks=100)
    assert usable_pages(SimpleNamespace(parallel_config=parallel, cache_config=cache)) == pages


@pytest.mark.parametrize("launcher", ["mp", "external_launcher"])
def test_pages_of_an_offline_rank(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process has one engine, of which vLLM tells it the pool."""
    rank = {"data_parallel_size": 2, "distributed_executor_backend": launcher}
    if launcher == "mp":
        for name, value in (("SIZE", "2"), ("RANK", "1"), ("MASTER_IP", "127.0.0.1")):
            monkeypatch.setenv(f"VLLM_DP_{name}", value)
        monkeypatch.setenv("VLLM_DP_MASTER_PORT", "29501")
        parallel = ParallelConfig()
        assert (parallel.data_parallel_size, parallel.data_parallel_rank) == (2, 1)
    else:
        parallel = SimpleNamespace(**rank, data_parallel_rank_local=None)
    cache = SimpleNamespace(num_gpu_blocks=100)
    assert usable_pages(SimpleNamespace(parallel_config=parallel, cache_config=cache)) == 99


def test_only_engines_with_a_policy_may_have_a_small_pool() -> None:
    def configs(engine: Any, num_pages: int) -> Any:
        engine.cache_config.kv_cache_layout = "LBHNC"
        spec: Any = FullAttentionSpec(
            block_size=16, num_kv_heads=2, head_size=8, dtype=engine.model_config.dtype
        )
        policy = policy_of(engine.additional_config)
        if policy is not None:
            spec = KVPolicySpec.from_full(spec, policy)
        specs, memory = [{"a": spec}], [(num_pages + 1) * spec.page_size_bytes]
        planning = kv_cache_planning()
        if not hasattr(planning, "get_global_kv_cache_groups"):  # before vLLM 0.33
            return planning.get_kv_cache_configs(engine, specs, memory)
        groups = planning.get_global_kv_cache_groups(engine, specs)
        return planning.get_kv_cache_configs(engine, specs, memory, groups)

    with pytest.raises(ValueError, match="To serve at least one request"):
        configs(config(None), 62)
    assert configs(config(None), 63)[0].num_blocks == 64
    assert configs(config(), 2)[0].num_blocks == 3
    with pytest.raises(ValueError, match="No available memory for the cache blocks"):
        configs(config(), 0)


def check(policy: Policy | None, **extra_args: Any) -> str:
    """The message of the refusal of a request's arguments; empty where there is none."""
    requests = None if policy is None else PerRequest(compiled(policy))
    try:
        check_arguments(requests, SamplingParams(extra_args=extra_args))
    except VLLMValidationError as error:
        assert error.parameter in extra_args
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("policy", "extra_args", "message"),
    [
        *UNMET,
        (CASCADE, {"kv_bugdet": 5}, "unknown argument 'kv_bugdet'.*did you mean 'kv_budget'"),
        (CASCADE, {"kv_keep_promt": 9}, "'kv_keep_promt'.*did you mean 'kv_keep_prompt'"),
        (CASCADE, {"KV_BUDGET": 5}, "unknown argument 'KV_BUDGET'.*did you mean 'kv_budget'"),
        (CASCADE, {"kv-policy": "sink"}, "'kv-policy'.*did you mean 'kv_policy'"),
        (CASCADE, {" kv_budget": 5}, "' kv_budget'.*did you mean 'kv_budget'"),
        (CASCADE, {"budget": 5}, "unknown argument 'budget'.*did you mean 'kv_budget'"),
        (CASCADE, {"kv_policy_config": {}}, "unknown argument 'kv_policy_config', choose from"),
        (None, {"kv_budget": 5}, "this server runs no KV policy; start it with --kv-policy"),
        (None, {"kv_policy": "sink"}, "this server runs no KV policy"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    policy: Policy | None, extra_args: dict[str, Any], message: str
) -> None:
    assert re.search(message, check(policy, **extra_args))


@settings(deadline=None)
@given(
    name=st.sampled_from(sorted(POLICIES)),
    own=st.sampled_from(sorted(POLICIES)),
    budget=st.one_of(st.none(), st.integers(1, 300)),
    overflow=st.integers(1, 40),
)
def test_refused_is_what_has_no_schedule(
    name: str, own: str, budget: int | None, overflow: int
) -> None:
    sizes = {"budget": 256, "prefill_stride": 32, "overflow": overflow}
    engine = resolve({"name": name, **sizes})
    asked = {"kv_policy": own, "kv_budget": budget}
    try:
        PerRequest(compiled(engine)).schedule(asked)
    except KVPolicyError as error:
        assert check(engine, **asked).startswith(str(error))
        return
    assert check(engine, **asked) == ""


def test_arguments_that_are_not_ours_pass() -> None:
    assert check(None, kv_something=1, forced=2, kv_policy="full") == ""
    assert check(None) == ""
    for extra_args in ({}, {"forced": [1]}, {"kv_transfer_params": {}}):
        assert check(CASCADE, **extra_args) == ""
    check_arguments(PerRequest(compiled(CASCADE)), PoolingParams())
    keys = SamplingParams(extra_args={1: "x", None: 2, "kv_budget": 64})  # pyright: ignore[reportArgumentType]
    check_arguments(PerRequest(compiled(CASCADE)), keys)
    keys.extra_args = {1: "x", "kv_bugdet": 64}  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(VLLMValidationError, match="did you mean 'kv_budget'"):
        check_arguments(PerRequest(compiled(CASCADE)), keys)


def test_arguments_are_checked_with_the_size() -> None:
    engine = config()
    engine.cache_config.num_gpu_blocks = 4
    with pytest.raises(VLLMValidationError, match="set it to at most 64"):
        check_request(engine, 5, SamplingParams(extra_args={"kv_budget": 65}))
    longer = SamplingParams(max_tokens=500, extra_args={"kv_budget": 40})  # 44 slots, three pages
    check_request(engine, 490, longer)
    with pytest.raises(VLLMValidationError, match="this server runs no KV policy"):
        check_request(config(None), 5, SamplingParams(extra_args={"kv_budget": 65}))
    check_request(engine, 490, None)


def test_a_front_end_keeps_its_schedules() -> None:
    """Looked up for every request that comes, in engines with and without a policy."""
    first, again, other = config(), config(), config({**POLICY, "budget": 96})
    assert requests_of(config(None)) is None
    requests = requests_of(first)
    assert requests_of(again) is requests is requests_of(first) is not requests_of(other)
    assert requests.engine is compiled(policy_of(first.additional_config))


def test_a_policy_with_too_many_rules_is_refused_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thinning cascade that evicts in batches while it fills: a rule for nearly every token."""
    policy = resolve({"name": "cascade", "budget": 2048, "eager_fill": False, "overflow": 8})
    assert check(policy, kv_budget=1024) == ""
    monkeypatch.setattr(admission, "this_device", lambda: DEVICES["cuda"])
    refused = check(policy, kv_budget=1024)
    assert re.search(r"kv_budget: cascade with overflow 8 .* rules, more than the 1024", refused)
    assert check(policy, kv_budget=128) == ""
    assert check(resolve({"name": "cascade"}), kv_budget=1024) == ""
