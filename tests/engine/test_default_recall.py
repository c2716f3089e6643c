# SPDX-License-Identifier: Apache-2.0
"""An engine recalls units unless told otherwise, and says why where it does not."""

import json
import pickle
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.config import vllm as vllm_config
from vllm.config.utils import replace
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.conftest import MODEL
from tests.engine.cuda_backend import use_cuda_backend
from tests.engine.pool import EnginePool
from tests.engine.test_metrics import metrics
from tests.engine.test_refusals import GEMMA4
from vllm_cascade.cli import main
from vllm_cascade.engine import certify, configure, recall_memory
from vllm_cascade.engine.cpu_worker import CPUKVPolicyWorker
from vllm_cascade.engine.devices import CPU, CUDA, DEVICES
from vllm_cascade.policies.registry import policy_of, resolve
from vllm_cascade.policies.schedule import compiled
from vllm_cascade.policies.settings import DEFAULT_RECALL, RECALL_UNIT, KVPolicyError
from vllm_cascade.recall.log import UnitShape
from vllm_cascade.recall.rings import RingMemory, ring_bytes


def created(settings: dict[str, Any]) -> VllmConfig:
    arguments = EngineArgs(
        model=str(MODEL), block_size=32, additional_config={"kv_policy": settings}
    )
    return arguments.create_engine_config()


def resolved(settings: dict[str, Any]) -> dict[str, Any]:
    policy = policy_of(created(settings).additional_config)
    assert policy is not None
    return policy.model_dump()


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("WARNING", logger=configure.logger.name)
    return caplog


@pytest.mark.parametrize("name", ["window", "sink", "cascade", "beehive", "lazy", "h2o", "random"])
def test_every_policy_recalls(name: str, warnings: pytest.LogCaptureFixture) -> None:
    policy = resolved({"name": name})
    assert (policy["recall"], policy["unit"]) == (DEFAULT_RECALL, RECALL_UNIT) == (8, 16)
    assert policy["recall_memory"] > 0
    assert "recall" not in warnings.text


@pytest.mark.parametrize("model", [[], ["--model", str(MODEL)]], ids=["no model", "model"])
@pytest.mark.parametrize(
    ("flags", "recall", "unit"),
    [
        (["--kv-policy", "sink"], 8, 16),
        (["--kv-policy", "sink", "--kv-recall", "0"], 0, 1),
        (["--kv-policy", "cascade", "--kv-policy-config.preset", "paper"], 0, 1),
        (["--kv-policy", "sink", "--kv-budget", "100"], 0, 1),  # no whole number of units
        (["--kv-policy-config", '{"name": "sink", "unit": "page", "recall": 1, "budget": 256}'],
         1, 128),
    ],
)  # fmt: skip
def test_a_check_is_of_the_engines_policy(
    flags: list[str], recall: int, unit: int, model: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``vllm-cascade check`` compares what an engine with these flags runs, on pages of 128."""
    found: list[Any] = []
    monkeypatch.setattr(certify, "certify", lambda *arguments: found.append(arguments) or [])
    main(["check", *flags, *model])
    ((policy, shapes, *_),) = found
    assert (policy.recall, policy.unit) == (recall, unit)
    assert {shape.block_size for shape in shapes} == {CPU.page_tokens} == {128}


def test_a_check_fits_the_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its policy stays within the model's positions, as an engine's does, or is refused."""
    found: list[Any] = []
    monkeypatch.setattr(certify, "certify", lambda *arguments: found.append(arguments) or [])
    main(["check", "--kv-policy", "sink", "--model", str(MODEL)])
    policy, wanted = (
        found[0][0].model_dump(),
        policy_of(
            EngineArgs(str(MODEL), additional_config={"kv_policy": {"name": "sink"}})
            .create_engine_config()
            .additional_config
        ),
    )
    assert wanted is not None
    assert policy | {"recall_memory": 0} == wanted.model_dump() | {"recall_memory": 0}
    assert policy["budget"] < 1024
    with pytest.raises(SystemExit):
        main(["check", "--kv-policy", "sink", "--kv-budget", "2048", "--model", str(MODEL)])
    assert "--kv-budget 2048 is too large" in capsys.readouterr().err


def test_no_preset_is_the_default() -> None:
    """Written out as the documents show it."""
    assert resolved({"name": "cascade", "preset": None}) == resolved({"name": "cascade"})


@pytest.mark.parametrize(
    ("settings", "unit"),
    [
        ({"name": "sink", "recall": 0}, 1),
        ({"name": "cascade", "recall": 0, "unit": 16}, 16),
        ({"name": "cascade", "preset": "paper"}, 1),
    ],
    ids=["asked for none", "units", "a paper's settings"],
)
def test_none(settings: dict[str, Any], unit: int, warnings: pytest.LogCaptureFixture) -> None:
    policy = resolved(settings)
    assert (policy["recall"], policy["unit"]) == (0, unit)
    assert "recall" not in warnings.text


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"name": "sink", "budget": 100}, "100 is not a whole number of units of 16 tokens"),
        ({"name": "sink", "unit": 1}, "needs units of several tokens"),
        ({"name": "sink", "budget": 752}, "but the model has 1024"),
    ],
    ids=["budget", "single tokens", "positions"],
)
def test_what_does_not_fit(
    settings: dict[str, Any], why: str, warnings: pytest.LogCaptureFixture
) -> None:
    """The policy is what it would be if none had been asked for."""
    assert resolved(settings) == resolved({**settings, "recall": 0})
    (message,) = [record.getMessage() for record in warnings.records if "recall" in record.msg]
    assert "evicted tokens cannot be recalled" in message and why in message


def test_a_host_without_the_memory(
    monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    """The default falls back to none. Recall that was asked for stays on, with a warning."""
    monkeypatch.setattr(recall_memory, "available_bytes", lambda: 100_000)
    assert resolved({"name": "sink"})["recall"] == 0
    assert "more than the 9.31e-05 GiB of host memory that are available" in warnings.text
    warnings.clear()
    assert resolved({"name": "sink", "recall": 4})["recall"] == 4
    assert "requests that fill it would run out of memory" in warnings.text


@pytest.mark.parametrize("given", [{}, {"recall": 8}, {"recall_memory": 1.0}])
def test_requests_shorter_than_a_unit(given: dict[str, float]) -> None:
    """They evict nothing. The bound is still a size, and fits any number of them."""
    config = EngineArgs(
        model=str(MODEL),
        max_model_len=RECALL_UNIT - 1,
        block_size=32,
        additional_config={"kv_policy": {"name": "sink", **given}},
    ).create_engine_config()
    policy = policy_of(config.additional_config)
    assert policy is not None and policy.recall == 8 and policy.recall_memory > 0
    shape, _ = recall_memory._shape_of_config(config, policy)
    memory = recall_memory.open_memory(shape, policy, config)
    recall_memory.log_memory(memory, policy, config)
    assert memory.need(compiled(policy), RECALL_UNIT - 1) == 0 < memory.capacity


@pytest.mark.parametrize(
    ("changed", "layers", "heads", "channels"),
    [
        ({"attention_k_eq_v": False}, 2, 2, 64),
        ({"attention_k_eq_v": False, "num_kv_shared_layers": 2}, 1, 2, 64),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 1}, 2, 1, 64),
        ({"attention_k_eq_v": False, "head_dim": 128}, 2, 2, 64),
        ({"sliding_window": 1024}, 4, 2, 64),  # windows that no stream is longer than
    ],
    ids=["E2B's heads", "E4B", "12B", "long heads with windows", "no windows"],
)
def test_layers_without_windows_decide(
    changed: dict[str, Any], layers: int, heads: int, channels: int, tmp_path: Path
) -> None:
    """Of four layers of Gemma 4, every other one has a window. Only those without recall."""
    (tmp_path / "config.json").write_text(json.dumps({**GEMMA4, **changed}))
    config = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True).create_engine_config()
    shape, _ = recall_memory._shape_of_config(config, resolve({"name": "sink", "recall": 8}))
    assert (shape.num_layers, shape.num_kv_heads, shape.head_size) == (layers, heads, channels)


def test_a_pool_and_sessions_leave_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evicted units come later than the pool, and would end the server without memory."""
    monkeypatch.setattr(recall_memory, "available_bytes", lambda: 8 << 30)
    found = []
    for sessions, pool in ((0, 0), (0, 2), (2, 2), (2, 2.5)):
        own = {"kv_sessions": True, "kv_sessions_memory": float(sessions)} if sessions else {}
        arguments = EngineArgs(
            model=str(MODEL),
            block_size=32,
            max_model_len=100_000,
            max_num_seqs=1000,
            kv_cache_memory_bytes=int(pool * 2**30) or None,
            additional_config={"kv_policy": {"name": "sink"}, **own},
        )
        found.append(bound_of(arguments.create_engine_config()))
    assert found == [2.0, 1.5, 1.0, 0.875], "a quarter of the rest"


@pytest.mark.parametrize(
    ("ranks", "engines", "free"), [(1, 1, 6), (2, 1, 4), (1, 2, 2), (2, 2, 0), (4, 1, 0)]
)
def test_every_worker_of_the_host_has_a_pool(
    ranks: int, engines: int, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8 GiB, of which each pool takes 2."""
    monkeypatch.setattr(recall_memory, "available_bytes", lambda: 8 << 30)
    config: Any = SimpleNamespace(
        additional_config={},
        cache_config=SimpleNamespace(kv_cache_memory_bytes=2 << 30),
        parallel_config=SimpleNamespace(world_size=ranks, data_parallel_size_local=engines),
        use_v2_model_runner=False,
    )
    assert recall_memory._free_bytes(config) == free << 30


NGRAM = {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 2}


@pytest.mark.parametrize(
    ("runner", "length", "drafts", "logged", "left"),
    [
        ("V2", 3_000_000, None, "4 GiB of host memory", 4),
        ("V2", 3_000_000, NGRAM, "2.79 GiB of device memory", 8),
        ("V2", 10_000, None, None, 8 - 2**-6),
        ("V1", 3_000_000, None, None, 8),
    ],
)
def test_token_ids_of_the_second_runner(
    runner: str,
    length: int,
    drafts: Any,
    logged: str | None,
    left: float,
    monkeypatch: pytest.MonkeyPatch,
    warnings: pytest.LogCaptureFixture,
) -> None:
    """It holds as many as ``--max-num-seqs`` of the longest requests have, in pinned memory.

    That is taken in powers of two. Here 250 requests, and 8 GiB of host memory.
    """
    monkeypatch.setattr(recall_memory, "available_bytes", lambda: 8 << 30)
    monkeypatch.setattr(CPU, "own_refusals", ())
    monkeypatch.setattr(vllm_config, "HAS_TRITON", True)  # V2 needs it
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", runner == "V2")
    config = EngineArgs(
        model=str(MODEL),
        max_model_len=length,
        max_num_seqs=250,
        speculative_config=drafts,
        additional_config={"kv_policy": {"name": "sink"}},
    ).create_engine_config()
    assert recall_memory._free_bytes(config) == left * 2**30
    assert ("token ids" in warnings.text) is (logged is not None)
    if logged is not None:
        assert f"token ids of --max-num-seqs 250 requests of --max-model-len {length}" in (
            warnings.text
        )
        assert f"takes {logged} at start" in warnings.text


@pytest.mark.parametrize(
    ("given", "ranks", "left"),
    [
        ({"recall_memory": 3.0}, 1, 10),
        ({"recall_memory": 8.0}, 1, 8),
        ({"recall_memory": 8.0, "recall": 0}, 1, 10),
        ({"recall_memory": 8.0, "sessions": 2.0}, 1, 6),
        ({"recall_memory": 8.0, "sessions": 2.0}, 2, 3),
        ({"recall_memory": 8.0, "pool": 10 << 30}, 1, 10),
        ({"recall_memory": 8.0, "blocks": 100}, 1, 10),
        ({"recall_memory": 14.0, "sessions": 2.0}, 1, None),
    ],
)
def test_the_pool_leaves_room(
    given: dict[str, Any], ranks: int, left: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's worker gives the pool its share of the host's memory: here 10 of 16 GiB."""
    monkeypatch.setattr(recall_memory, "available_bytes", lambda: 16 << 30)
    monkeypatch.setattr(CPUWorker, "determine_available_memory", lambda _: 10 << 30)
    given = {"recall": 8, **given}
    sessions, pool, blocks = (given.pop(key, None) for key in ("sessions", "pool", "blocks"))
    policy = {"name": "sink", **resolve({"name": "sink", "unit": 16, **given}).model_dump()}
    own = {} if sessions is None else {"kv_sessions": True, "kv_sessions_memory": sessions}
    worker = object.__new__(CPUKVPolicyWorker)
    worker.cache_config = SimpleNamespace(
        kv_cache_memory_bytes=pool, num_gpu_blocks_override=blocks
    )
    worker.vllm_config = SimpleNamespace(
        additional_config={"kv_policy": policy, **own},
        parallel_config=SimpleNamespace(world_size=ranks, data_parallel_size_local=1),
    )
    if left is None:
        with pytest.raises(KVPolicyError, match="recall_memory and --kv-sessions-memory leave no"):
            worker.determine_available_memory()
    else:
        assert worker.determine_available_memory() == left * 2**30


def bound_of(config: VllmConfig) -> float | None:
    """``recall_memory`` in GiB."""
    policy = policy_of(config.additional_config)
    assert policy is not None
    return policy.recall_memory


@pytest.mark.parametrize("given", [None, 0.01])
def test_free_memory_is_no_part_of_the_key_of_compiled_models(
    given: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every start would compile the model again. What is given stays a setting like others."""
    found = []
    for available in (0.05, 0.06):
        monkeypatch.setattr(recall_memory, "available_bytes", lambda a=available: int(a * 2**30))
        config = created({"name": "sink", "recall_memory": given})
        sent = pickle.loads(pickle.dumps(config))
        for other in (sent, copy(config), replace(config)):  # processes, vLLM's own copies
            assert bound_of(other) == bound_of(config)
        assert config.compute_hash() == sent.compute_hash()
        found.append((config.compute_hash(), bound_of(config)))
    (first, bound), (second, later) = found
    assert first == second
    assert (bound == later) is (given is not None)
    assert (created({"name": "sink"}).compute_hash() == first) is (given is None)


@pytest.mark.parametrize("device_rings", [0.5, 5, 20, 1000])
def test_stores_take_a_quarter_of_the_device_at_most(
    device_rings: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host with much memory does not take that of the model's pages: keys lie on the device."""
    use_cuda_backend(monkeypatch.setattr)
    shape = UnitShape(6, 3, 1, 16, 64, torch.float32, 32768 // 16, 8)
    on_device, on_host = ring_bytes(shape)
    total = int(4 * device_rings * on_device)
    monkeypatch.setattr(recall_memory, "_shape_of_config", lambda *_: (shape, True))
    monkeypatch.setattr(recall_memory, "available_bytes", lambda: 4000 * on_host)
    monkeypatch.setattr(CPU, "memory_bytes", lambda _: total)
    config = created({"name": "sink", "recall": 8})
    bound, kept = bound_of(config), config.cache_config.enable_prefix_caching
    assert bound is not None
    schedule = compiled(resolve({"name": "sink", "recall": 8, "unit": 16}))
    rings = RingMemory(schedule, shape, int(bound * 2**30), 256, kept).capacity
    most = min(max(int(device_rings), 1), 256)
    assert most / 2 < rings <= most


@pytest.mark.parametrize(
    ("window", "disabled", "all_recall"),
    [(512, False, False), (512, True, True), (2048, False, True)],
    ids=["windows", "disabled", "longer than the model's positions"],
)
def test_the_default_has_room_for_all_layers_that_recall(
    window: int, disabled: bool, all_recall: bool, tmp_path: Path
) -> None:
    """Windows that never mask a token are none (``cache/kinds.py``)."""
    found = []
    for kind in ("sliding_attention", "full_attention"):
        layers = {"layer_types": [kind, "full_attention"] * 20, "num_hidden_layers": 40}
        model = AutoConfig.for_model(
            "gemma3_text",
            **layers,
            architectures=["Gemma3ForCausalLM"],
            sliding_window=window,
            max_position_embeddings=1024,
        )
        model.save_pretrained(tmp_path)
        arguments = EngineArgs(
            model=str(tmp_path),
            skip_tokenizer_init=True,
            max_model_len=500,
            max_num_seqs=1,
            disable_sliding_window=disabled,
            additional_config={"kv_policy": {"name": "sink", "budget": 16, "prefill_stride": 16}},
        )
        found.append(bound_of(arguments.create_engine_config()))
    mixed, whole = found
    assert mixed is not None and whole is not None
    assert (mixed == whole) is all_recall and mixed <= whole


def test_errors_are_about_what_the_user_wrote() -> None:
    with pytest.raises(KVPolicyError, match="but the model has 1024; set it to at most 764"):
        resolved({"name": "sink", "budget": 4096})


def test_an_engine_recalls(engine_pool: EnginePool, book_tokens: list[int]) -> None:
    """As a user starts it, with nothing but a policy's name."""
    llm = engine_pool.get(None, additional_config={"kv_policy": "cascade"}, max_model_len=4096)
    prompt = {"prompt_token_ids": book_tokens[:2500]}
    llm.generate([prompt], SamplingParams(max_tokens=20, temperature=0), use_tqdm=False)
    (counters,) = llm.collective_rpc("kv_policy_counters")
    assert counters["recalled_units"] > 0 and counters["evicted_tokens"] > 0
    (worker,) = llm.collective_rpc(lambda worker: bound_of(worker.vllm_config))
    assert worker is not None and worker == bound_of(llm.llm_engine.vllm_config)
    limit = metrics(llm)["recall_memory_limit_bytes"]  # the scheduler's, in whole chunks
    assert limit == pytest.approx(worker * 2**30, rel=0.02)


def test_cuda_has_to_be_asked(
    monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    """All stores of all requests are allocated there at start."""
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(current_platform, "is_cuda", lambda: True)
    monkeypatch.setattr(CUDA, "stock_worker", DEVICES["cpu"].stock_worker)  # this machine's
    policy = resolved({"name": "sink"})
    assert (policy["recall"], policy["unit"]) == (0, 1) and "recall" not in warnings.text
