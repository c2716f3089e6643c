# SPDX-License-Identifier: Apache-2.0
"""Models that see images, given text: positions of several axes (M-RoPE), windows."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from tests.engine.pool import EnginePool
from tests.engine.test_against_oracle import MAX_ERROR, MEAN_ERROR, PYTORCH
from tests.engine.test_families import POLICIES, check_company, compare
from tests.oracle.multimodal import run_text, write_multimodal
from vllm_cascade.engine.admission import check_media

CASES = [
    pytest.param("qwen2.5-vl", "cascade", {}, id="qwen2.5-vl-cascade"),
    *(
        pytest.param(*case, id="-".join(case[:2]), marks=pytest.mark.slow)
        for case in (
            ("qwen2.5-vl", "sink-heads", dict(PYTORCH)),
            ("qwen3-vl", "cascade", {}),
            ("qwen3-vl", "sink-heads", dict(PYTORCH)),
            ("gemma3", "cascade", {}),
            ("gemma4", "cascade", {}),
        )
    ),
]


@pytest.mark.parametrize(("name", "policy", "env"), CASES)
def test_text(
    name: str, policy: str, env: dict[str, str], engine_pool: EnginePool, tmp_path: Path
) -> None:
    """1,000 tokens and 60 more: past the budget and the model's 512 positions."""
    pytest.importorskip("torchvision", reason="vLLM's models that see images import it")
    seed = 2 if name == "gemma4" else 0  # with 0 and 1 it writes an image
    path, settings = write_multimodal(tmp_path, name, seed), POLICIES[policy]
    llm = engine_pool.get(
        {**settings, "trace": True},
        path,
        env=env,
        max_model_len=2048,
        max_num_batched_tokens=100,
        skip_tokenizer_init=True,
        language_model_only=True,
    )
    error, grown = compare(
        llm,
        name,
        lambda tokens: run_text(path, name, tokens, 1000, settings),
        prompt_len=1000,
        kept_at_most=settings["budget"] + 8,
    )
    assert error.max() < MAX_ERROR and error.mean() < MEAN_ERROR
    assert grown["evicted_tokens"] > 0 and (grown["native_calls"] > 0) == (not env)
    check_company(llm, settings["prefill_stride"])


def config(mrope: bool, policy: dict[str, Any] | None) -> Any:
    extra = {} if policy is None else {"kv_policy": {"name": "sink", "budget": 64, **policy}}
    return SimpleNamespace(additional_config=extra, model_config=SimpleNamespace(uses_mrope=mrope))


def test_pictures_are_refused_where_positions_have_several_axes() -> None:
    with pytest.raises(VLLMValidationError, match=r"\(M-RoPE\), and kv_policy sink can only move"):
        check_media(config(True, {}), True)
    check_media(config(True, {}), False)
    check_media(config(False, {}), True)
    check_media(config(True, None), True)


def test_every_way_in_is_checked() -> None:
    """A request of the API server before it answers, and any other where it is processed."""
    from vllm_cascade.patches import request_checks

    made = SimpleNamespace(
        mm_features=["an image"],
        prompt_token_ids=[1, 2],
        prompt_embeds=None,
        sampling_params=None,
        resumable=False,
    )
    process = request_checks._wrap_process_inputs(lambda self: made)
    with pytest.raises(VLLMValidationError, match="M-RoPE"):
        process(SimpleNamespace(vllm_config=config(True, {})))
    server = SimpleNamespace(vllm_config=config(True, {}))
    generate = request_checks._wrap_generate(lambda *args: "answer")
    image = {"type": "multimodal", "prompt_token_ids": [1, 2]}
    with pytest.raises(VLLMValidationError, match="M-RoPE"):
        generate(server, image, None)
    assert generate(server, {**image, "type": "token"}, None) == "answer"
