# SPDX-License-Identifier: Apache-2.0
"""Every family whose layers all attend, on the Triton kernels, interpreted, against the oracle.

Whole engines whose CPU backend is given the CUDA backend's implementation and builders, one for
each kind of layers. Log-probabilities and kept tokens past the windows and the budget; alone, in a
batch and from a snapshot.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine import graph_profile
from tests.engine.pool import EnginePool
from tests.engine.test_against_oracle import MAX_ERROR
from tests.engine.test_families import POLICIES, UNSURE, check, model_of, random_tokens, written
from tests.engine.test_full_attention import experts_in_one_group
from tests.engine.test_prefix_caching import ask
from tests.engine.test_quantised import ROUNDED
from tests.engine.test_units import decode
from tests.oracle import full_attention
from tests.oracle.families import FAMILIES, WINDOW, run_family, shallow, write_family
from tests.oracle.quantised import Quantiser

__all__ = ["experts_in_one_group", "model_of", "written"]  # fixtures
pytestmark = pytest.mark.usefixtures("triton_backend")

FAST = ("gemma3", "cascade")
SLOW = [
    FAST,
    ("gpt-oss", "cascade-heads"),  # learned sinks in scores, too
    ("gpt-oss", "sink"),  # a budget below the window, and a page of 47 slots for it
    ("gpt-oss", "h2o"),
    ("gemma3", "sink-heads"),
    ("gemma3", "units"),
    ("gemma2", "cascade"),  # a soft cap
    ("cohere2", "sink"),  # layers that do not rotate
    ("mistral", "cascade"),  # nothing but windows
    ("llama4", "cascade"),  # chunks of the stream, which strides cross
    ("llama4", "units"),
    ("gemma4-shared", "h2o"),  # layers that attend to another's cache
    ("gemma3n", "units"),
]

ALL = {**FAMILIES, **full_attention.OWN_MODULES, **full_attention.BY_TRANSFORMERS}
STRIDES = {"phi3": 32}
"""Of a model with 128 positions, which are not enough for 64 tokens beside what is kept."""


def engine(pool: EnginePool, path: Path, policy: dict[str, Any], **kwargs: Any) -> Any:
    """An engine of its own: the pool's others use the CPU's paths."""
    pool.close()
    own = {"max_model_len": 2048, "max_num_batched_tokens": 100, "skip_tokenizer_init": True}
    return pool.get(policy, path, **own, **kwargs)


def agrees(
    pool: EnginePool, path: Path, family: str, settings: dict[str, Any], prompt_len: int
) -> Any:
    """An engine, which says and keeps what the oracle does."""
    llm = engine(pool, path, {**settings, "trace": True})
    check(llm, path, (family, ALL[family]), settings, prompt_len, native=False)
    return llm


def check_decoding(
    pool: EnginePool,
    path: Path,
    family: Any,
    settings: dict[str, Any],
    prompt_len: int,
    num: int,
    cache_dtype: str = "auto",
) -> None:
    """Log-probabilities of ``num`` decoded tokens, without a trace, are the oracle's."""
    llm = engine(pool, path, settings, kv_cache_dtype=cache_dtype)
    tokens, found = decode(llm, random_tokens(0, prompt_len), num)
    assert np.mean(found[prompt_len - 1 :]) < UNSURE
    quantised = {"quantiser": Quantiser.of(cache_dtype)}
    truth = run_family(path, family, tokens[:-1], prompt_len, settings, **quantised)
    error = np.abs(np.asarray(found[:-1]) - np.asarray(truth.logprobs))
    assert error.max() < (MAX_ERROR if cache_dtype == "auto" else ROUNDED)
    assert error.mean() < (MAX_ERROR / 10 if cache_dtype == "auto" else ROUNDED / 20)
    pool.close()


@pytest.mark.slow
def test_windows(engine_pool: EnginePool, model_of: Any) -> None:
    family, policy = FAST
    agrees(engine_pool, model_of(family), family, POLICIES[policy], prompt_len=80)
    engine_pool.close()


@pytest.mark.parametrize(
    "family",
    [
        "gpt-oss",
        "llama4",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("gemma3", "gemma3n")),
    ],
)
def test_graphs_memory_is_profiled(
    family: str, engine_pool: EnginePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a cache of the runner's own specs, as GPUs do by default; tokens are right afterwards."""
    found = graph_profile.turn_on(monkeypatch.setattr)
    two_layers = shallow(FAMILIES[family])
    path = write_family(tmp_path, two_layers)
    check_decoding(engine_pool, path, two_layers, POLICIES["cascade"], prompt_len=130, num=6)
    assert found == [{"CUDABuilder"}]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "policy"), SLOW)
def test_family(family: str, policy: str, engine_pool: EnginePool, model_of: Any) -> None:
    check_company(agrees(engine_pool, model_of(family), family, POLICIES[policy], prompt_len=170))
    engine_pool.close()


def check_company(llm: Any) -> None:
    """The same alone, from a snapshot, and among others."""
    prompts = [random_tokens(seed, n) for seed, n in ((1, 130), (2, 1), (3, 47))]
    alone = [ask(llm, [prompt], 6)[0] for prompt in prompts]
    again = [ask(llm, [prompt], 6)[0] for prompt in prompts]
    assert again[0][0] > 0 and again[1][0] == 0, "tokens from a snapshot"
    llm.reset_prefix_cache()
    together = ask(llm, prompts, 6)
    assert [turn[0] for turn in together] == [0] * len(prompts)
    for single, *others in zip(alone, again, together, strict=True):
        for other in others:
            assert other[1] == single[1]
            np.testing.assert_allclose(other[2], single[2], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["cascade", "units"])
def test_heads_as_gemma_4_has_them(policy: str, engine_pool: EnginePool, tmp_path: Path) -> None:
    """Heads of 512 channels, eight to a KV head, beside windows with heads of 256."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    family = shallow(FAMILIES["gemma4"])
    family = replace(family, own=family.own | heads | {"global_head_dim": 512})
    path, settings = write_family(tmp_path, family), POLICIES[policy]
    llm = engine(engine_pool, path, {**settings, "trace": True})
    (shapes,) = llm.collective_rpc("_layer_shapes")
    found = {(x.num_heads, x.num_kv_heads, x.head_size, x.window) for x in shapes}
    assert found == {(8, 4, 256, WINDOW), (8, 1, 512, None)}
    check(llm, path, ("gemma4", family), settings, prompt_len=110, native=False)
    check_company(llm)
    engine_pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "llama4", "gemma3n"])
def test_chunks_at_once(family: str, engine_pool: EnginePool, model_of: Any) -> None:
    """Without a trace all strides of a chunk are one launch."""
    path, settings = model_of(family), POLICIES["sink"] | {"prefill_stride": 32}
    check_decoding(engine_pool, path, FAMILIES[family], settings, prompt_len=700, num=61)


@pytest.mark.slow
@pytest.mark.parametrize("family", ALL)
def test_every_family(family: str, engine_pool: EnginePool, tmp_path: Path) -> None:
    """1,000 tokens in strides and 60 more, and what is kept of them, per KV head."""
    if family in full_attention.IMAGES:
        pytest.importorskip("torchvision", reason="vLLM's models that see images import it")
    settings = POLICIES["cascade-heads"] | {"prefill_stride": STRIDES.get(family, 64)}
    shape = shallow(ALL[family])
    path = write_family(tmp_path, shape)
    llm = engine(engine_pool, path, {**settings, "trace": True})
    check(llm, path, (family, shape), settings, prompt_len=1000, native=False)
    check_company(llm)
    engine_pool.close()
