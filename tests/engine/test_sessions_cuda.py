# SPDX-License-Identifier: Apache-2.0
"""Sessions on the CUDA backend's code, interpreted: byte-equal to an uninterrupted stream.

Copies go the way that they go on a GPU (``sessions/copies.py``), through streams that do nothing.
``tests/sessions/test_copies.py`` has streams that are late. Evicted units lie in rings, of latent
rows in 8 bits with the rows' scales.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine import async_cpu
from tests.engine.chats import (
    ask,
    chat,
    flush,
    index_of,
    params,
    says,
    uninterrupted,
    wait_for_files,
)
from tests.engine.drafters import scripted
from tests.engine.pool import EnginePool, generated, pool_usage
from tests.engine.test_full_attention import experts_in_one_group
from tests.engine.test_latent import V2
from tests.engine.test_runner_v2 import run
from tests.engine.test_sessions import engine
from tests.engine.test_speculation import check_released, compare, drafted, spoken
from tests.engine.test_triton_recall import CASCADE, EACH
from tests.oracle.families import shallow, write_family
from tests.sessions.held import held_in
from vllm_cascade.engine.devices import CPU, CUDA
from vllm_cascade.sessions.copies import StreamCopies

__all__ = ["experts_in_one_group"]  # a fixture
pytestmark = pytest.mark.slow

TOKENS = np.random.default_rng(8).integers(1, 500, 3000).tolist()
TURNS = 3
CASES: dict[str, dict[str, Any]] = {
    "cascade": {**CASCADE, "unit": 1, "prefill_stride": 16},
    "recall": {**CASCADE, "prefill_stride": 16, "recall": 2, "recall_store": 64, "recall_every": 3},
    "recall-heads": {
        "name": "sink",
        "budget": 32,
        "unit": 16,
        "prefill_stride": 32,
        "recall": 2,
        "recall_store": 512,
        **EACH,
    },
    "h2o": {"name": "h2o", "budget": 24, "prefill_stride": 16, **EACH},
}
"""``recall``'s store overflows within a turn."""
LATENT = [
    ("cascade", "auto"),
    ("recall", "auto"),
    ("h2o", "fp8"),
    ("recall", "int8_per_token_head"),
    ("recall-heads", "fp8"),
]
"""Policies on latent rows, by the type of the cache."""
ROWS = [("cascade", "fp8"), ("recall", "int8_per_token_head"), ("recall-heads", "fp8_e5m2")]
"""Policies on rows of keys and values in 8 bits, by their type."""


@pytest.fixture(autouse=True)
def like_cuda(monkeypatch: pytest.MonkeyPatch, triton_backend: None) -> None:
    async_cpu.turn_on(monkeypatch.setattr)
    monkeypatch.setattr(CPU, "session_copies", CUDA.session_copies)


@pytest.fixture(scope="module")
def latent_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("deepseek"), shallow(V2))


def start(pool: EnginePool, name: str, folder: Path, model: Path, **kwargs: Any) -> Any:
    pool.close()
    return engine(
        pool,
        CASES[name],
        str(folder),
        model=model,
        max_model_len=1024,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        block_size=16,
        **kwargs,
    )


@pytest.mark.parametrize("name", CASES)
def test_memory_and_a_new_engine(
    name: str, engine_pool: EnginePool, tmp_path: Path, llama: Path
) -> None:
    check_chat(engine_pool, name, tmp_path, llama)


@pytest.mark.parametrize("name", ["recall", "recall-heads"])
def test_a_chat_that_leaves_thoughts_out(
    name: str, engine_pool: EnginePool, tmp_path: Path, llama: Path
) -> None:
    """The state before the answer is copied while its request runs."""
    settings = {"kv_sessions_prompts": True, "enable_prefix_caching": False}
    llm = start(engine_pool, name, tmp_path, llama, **settings)
    stride, history = CASES[name]["prefill_stride"], TOKENS[:150]
    _, (answer, _) = ask(llm, history)
    known = (len(history) - 16) // stride * stride
    history = [*history, *answer[30:], *TOKENS[400:460]]
    cached, turn = ask(llm, history)
    plain = {"prompt_token_ids": history, "cache_salt": "nothing is found"}
    (truth,) = llm.generate([plain], params(), use_tqdm=False)
    assert cached == known and turn == generated(truth)
    assert index_of(llm).counters.hits == {"memory": 1} and pool_usage(llm) == 0.0
    engine_pool.close()


@pytest.mark.parametrize(("name", "cache_dtype"), ROWS)
def test_rows_in_8_bits(
    name: str, cache_dtype: str, engine_pool: EnginePool, tmp_path: Path, llama: Path
) -> None:
    check_chat(engine_pool, name, tmp_path, llama, kv_cache_dtype=cache_dtype)


@pytest.mark.parametrize(("name", "cache_dtype"), LATENT)
def test_latent_rows(
    name: str, cache_dtype: str, engine_pool: EnginePool, tmp_path: Path, latent_model: Path
) -> None:
    llm = check_chat(
        engine_pool,
        name,
        tmp_path,
        latent_model,
        kv_cache_dtype=cache_dtype,
        skip_tokenizer_init=True,
    )
    assert llm.llm_engine.vllm_config.model_config.use_mla


def check_chat(
    engine_pool: EnginePool, name: str, tmp_path: Path, model: Path, **kwargs: Any
) -> Any:
    """A turn from memory, and one from the folder of an engine that is gone."""
    llm = start(engine_pool, name, tmp_path, model, **kwargs)
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    assert type(worker._sessions._copies) is StreamCopies
    truth = uninterrupted(llm, TOKENS, TURNS)
    answers = chat(llm, TOKENS, TURNS - 1, between=lambda: time.sleep(0.2))
    flush(llm)
    index = index_of(llm)
    assert index.counters.hits == {"memory": TURNS - 2}
    (held,) = llm.collective_rpc(held_in)
    assert 0 < held <= index.used["memory"]
    wait_for_files(tmp_path, TURNS - 1)
    engine_pool.close()

    llm = start(engine_pool, name, tmp_path, model, **kwargs)
    index = index_of(llm)
    history = [t for n in range(TURNS - 1) for t in says(TOKENS, n) + answers[n][0]]
    cached, last = ask(llm, history + says(TOKENS, TURNS - 1))
    assert cached == len(history) - 1 and index.counters.hits == {"disk": 1}
    assert [*answers, last] == truth and pool_usage(llm) == 0.0
    engine_pool.close()
    return llm


@pytest.mark.parametrize("name", ["h2o", "recall"])
def test_drafts(name: str, engine_pool: EnginePool, tmp_path: Path, llama: Path) -> None:
    """A session is the state after the tokens of its answer, and no draft."""
    truth = uninterrupted(start(engine_pool, name, tmp_path, llama), TOKENS, 2)
    llm = start(engine_pool, name, tmp_path, llama, speculative_config=scripted(5))
    spoken(TOKENS, truth)
    compare(chat(llm, TOKENS, 2), truth)
    seen, accepted = drafted(llm)
    print(f"{seen} drafts, {accepted} accepted")
    assert 5 < accepted < seen
    check_released(llm)
    engine_pool.close()


@pytest.mark.parametrize("name", ["cascade", "recall"])
def test_second_runner(name: str, engine_pool: EnginePool, tmp_path: Path, llama: Path) -> None:
    """The order of copies of Model Runner V2, beside snapshots of prompts and another request.

    The uninterrupted stream is the first runner's.
    """
    found = run(CASES[name], "sessions")
    assert found["runner"] == "V2"
    assert found["hits"] == {"memory": TURNS - 2, "disk": 1} and found["reused"] > 0, found
    cached, known = found["beside"]
    assert cached == known - 1 and "slow" not in found["misses"], found
    truth = uninterrupted(start(engine_pool, name, tmp_path, llama), TOKENS, TURNS)
    for (ids, logprobs), (wanted, own) in zip(found["answers"], truth, strict=True):
        assert ids == wanted
        np.testing.assert_allclose(logprobs, own, atol=1e-5)
    engine_pool.close()
