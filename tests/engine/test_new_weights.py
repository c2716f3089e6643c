# SPDX-License-Identifier: Apache-2.0
"""Weights that change in a running worker: what was read from them is read again.

Models are a few parameters; updates and patches are vLLM's own. ``test_families.py`` and
``test_full_attention.py`` load weights into engines.
"""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.offloader import PrefetchOffloader
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.attention.test_paged import PagedLayer, Shape
from vllm_cascade.engine import worker as worker_module
from vllm_cascade.engine.cpu_worker import CPUKVPolicyWorker
from vllm_cascade.policies.settings import KVPolicyError

QUERIES, KEYS = "query_layernorm.weight", "key_layernorm.weight"
HUNYUAN = SimpleNamespace(hf_text_config=SimpleNamespace(model_type="hunyuan_v1_dense"))


class Model(nn.Module):
    """An attention block with HunYuan's norms and learned sinks, loaded as vLLM's models are."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.query_layernorm, self.key_layernorm = nn.RMSNorm(4), nn.RMSNorm(4)
        self.sinks = nn.Parameter(torch.zeros(heads), requires_grad=False)
        nn.init.constant_(self.query_layernorm.weight, 3.0)
        nn.init.constant_(self.key_layernorm.weight, 2.0)
        record_metadata_for_reloading(self)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        found = set()
        for name, weight in weights:
            param = dict(self.named_parameters())[name]
            getattr(param, "weight_loader", default_weight_loader)(param, weight)
            found.add(name)
        return found

    @property
    def norms(self) -> tuple[list[float], list[float]]:
        """The weights of queries and of keys that a step would use."""
        return self.query_layernorm.weight.tolist(), self.key_layernorm.weight.tolist()


class Watched:
    """A worker that has loaded a model, which may have a drafting model, and one layer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, drafting: Model | None = None) -> None:
        shape = Shape(sinks=True)
        self.model = Model(shape.num_kv_heads * shape.group)
        monkeypatch.setattr(Shape, "sink_logits", self.model.sinks)
        self.impl = PagedLayer(shape, {"name": "sink", "budget": 16}, 2).impl
        layer = SimpleNamespace(impl=self.impl, kv_cache_dtype="auto")
        worker: Any = CPUKVPolicyWorker.__new__(CPUKVPolicyWorker)
        self.worker = worker
        worker.model_config = HUNYUAN
        worker.model_runner = SimpleNamespace(get_model=lambda: self.model)
        drafts = SimpleNamespace(draft_model_config=HUNYUAN, num_speculative_tokens=1)
        worker.vllm_config = SimpleNamespace(speculative_config=drafts, num_speculative_tokens=1)
        drafter = SimpleNamespace(model=drafting, layer_names=set()) if drafting else None
        monkeypatch.setattr(worker, "_drafter", drafter, raising=False)
        monkeypatch.setattr(worker, "_all_layers", lambda: {"layers.0": layer})
        worker._watch_weights()

    @property
    def sinks(self) -> list[float]:
        """Those that kernels read."""
        sinks = self.impl.layer_config.sinks
        assert sinks is not None
        return sinks.flatten().tolist()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update as vLLM's engine for patches has it: nothing happens before and after."""
    for call in ("start_weight_update", "finish_weight_update"):
        monkeypatch.setattr(CPUWorker, call, lambda self: None)


def full(value: float, num: int = 4) -> torch.Tensor:
    return torch.full((num,), value)


@pytest.mark.parametrize("call", ["reload_weights", "finish_weight_update"])
def test_what_is_read_again(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer reads the scales of its owner's rows."""
    order: list[str] = []
    monkeypatch.setattr(CPUWorker, call, lambda self: order.append("vLLM"))
    worker = CPUKVPolicyWorker.__new__(CPUKVPolicyWorker)
    worker._key_norms = [
        SimpleNamespace(restore=lambda: None, move=lambda: order.append("keys"))  # type: ignore[list-item]
    ]
    impl = SimpleNamespace(
        read_sinks=lambda: order.append("sinks"),
        read_scales=lambda scales: order.append(f"scales {scales}"),
    )

    def layer(scale: float, owner: str | None = None) -> SimpleNamespace:
        scales = {"_k_scale": torch.tensor(scale), "_v_scale": torch.tensor(2 * scale)}
        return SimpleNamespace(
            impl=impl, kv_cache_dtype="fp8", kv_sharing_target_layer_name=owner, **scales
        )

    layers = {"layers.0": layer(0.5), "layers.1": layer(4.0, "layers.0")}
    monkeypatch.setattr(worker, "_all_layers", lambda: layers, raising=False)
    getattr(worker, call)()
    assert order == ["vLLM", "keys", "sinks", "sinks", *["scales (0.5, 1.0)"] * 2]


def test_the_model_loads_weights(watched: Watched) -> None:
    """A worker extension, or ``apply_model``, calls the model's method, also tensor by tensor."""
    model, sinks = watched.model, torch.linspace(-2.0, 3.0, 4)
    assert model.norms == ([6.0] * 4, [1.0] * 4)
    assert model.load_weights([("sinks", sinks)]) == {"sinks"}
    assert watched.sinks == sinks.tolist() and model.norms == ([6.0] * 4, [1.0] * 4)
    for name, weight, expected in ((QUERIES, 5.0, 10.0), (KEYS, 4.0, 20.0), (KEYS, 1.0, 5.0)):
        model.load_weights([(name, full(weight))])
        assert model.norms == ([expected] * 4, [1.0] * 4)
    model.load_weights([(KEYS, full(7.0)), (QUERIES, full(11.0))])
    assert model.norms == ([77.0] * 4, [1.0] * 4)


def test_a_load_that_fails(watched: Watched) -> None:
    with pytest.raises(KeyError):
        watched.model.load_weights([(QUERIES, full(5.0)), ("other", full(1.0))])
    assert watched.model.norms == ([10.0] * 4, [1.0] * 4)


@pytest.mark.parametrize("in_update", [True, False])
def test_patches_of_some_elements(in_update: bool, watched: Watched, in_place: None) -> None:
    model = watched.model

    def patch(name: str, index: int, value: float) -> CheckpointWeightPatch:
        where, new = torch.tensor([index]), torch.tensor([value])
        return CheckpointWeightPatch(name, (4,), torch.float32, new, where)

    if in_update:
        watched.worker.start_weight_update()
    patches = [patch(QUERIES, 1, 5.0), patch(KEYS, 2, 7.0), patch("sinks", 3, 0.5)]
    load_checkpoint_weight_patches(model, patches)
    load_checkpoint_weight_patches(model, [patch(QUERIES, 2, 11.0)])
    if in_update:
        watched.worker.finish_weight_update()
    assert model.norms == ([6.0, 10.0, 77.0, 6.0], [1.0] * 4)
    assert watched.sinks == [0.0, 0.0, 0.0, 0.5]


@pytest.mark.parametrize("in_update", [True, False])
def test_layerwise_reload(
    in_update: bool, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters are on the meta device meanwhile. A worker extension may run it by itself."""
    model, worker = watched.model, watched.worker
    both: dict[str, Callable[[], None]] = {
        "start_weight_update": lambda: initialize_layerwise_reload(model),
        "finish_weight_update": lambda: finalize_layerwise_reload(model, None),
    }
    for call, function in both.items():
        monkeypatch.setattr(CPUWorker, call, lambda self, function=function: function())
        both[call] = getattr(worker, call) if in_update else function
    for weights in (
        {KEYS: 7.0, QUERIES: 11.0, "sinks": 0.5},
        {QUERIES: 5.0},  # the others stay
        {KEYS: 2.0, "sinks": -1.0},
    ):
        both["start_weight_update"]()
        assert model.query_layernorm.weight.is_meta
        for name, weight in weights.items():
            model.load_weights([(name, full(weight))])
        both["finish_weight_update"]()
    assert model.norms == ([10.0] * 4, [1.0] * 4)
    assert watched.sinks == [-1.0] * 4


def test_an_update_that_fails(
    watched: Watched, in_place: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM ends it: what comes next is no part of it."""

    def fail(self: Any, info: Any) -> None:
        raise ValueError(info)

    monkeypatch.setattr(CPUWorker, "update_weights", fail)
    watched.worker.start_weight_update()
    assert watched.model.norms == ([3.0] * 4, [2.0] * 4)
    with pytest.raises(ValueError, match="duplicate"):
        watched.worker.update_weights("duplicate indices")
    assert watched.model.norms == ([6.0] * 4, [1.0] * 4)
    watched.model.load_weights([(QUERIES, full(5.0))])
    assert watched.model.norms == ([10.0] * 4, [1.0] * 4)


def test_a_drafting_model(monkeypatch: pytest.MonkeyPatch, in_place: None) -> None:
    """Its cached keys are moved as the model's are, so its norms are, too."""
    monkeypatch.setattr(CPUWorker, "start_draft_weight_update", lambda self: None)
    drafting = Model()
    watched = Watched(monkeypatch, drafting)
    assert drafting.norms == watched.model.norms == ([6.0] * 4, [1.0] * 4)
    watched.worker.start_draft_weight_update()
    drafting.load_weights([(KEYS, full(5.0))])
    watched.worker.finish_weight_update()
    assert drafting.norms == ([15.0] * 4, [1.0] * 4)
    assert watched.model.norms == ([6.0] * 4, [1.0] * 4)


CALLS: dict[str, Callable[[Watched], Any]] = {
    "load_weights": lambda watched: watched.model.load_weights([]),
    "reload_weights": lambda watched: watched.worker.reload_weights(),
    "start_weight_update": lambda watched: watched.worker.start_weight_update(),
    "start_draft_weight_update": lambda watched: watched.worker.start_draft_weight_update(),
}


@pytest.mark.parametrize("call", CALLS)
def test_offloaded_weights_cannot_change(
    call: str, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be written to the buffer that the parameters of several layers are."""
    done: list[str] = []
    if call != "load_weights":
        monkeypatch.setattr(CPUWorker, call, lambda self: done.append(call))
    offloader = PrefetchOffloader.__new__(PrefetchOffloader)
    monkeypatch.setattr(worker_module, "get_offloader", lambda: offloader)
    offloader.module_offloaders = [SimpleNamespace()]  # type: ignore[list-item]
    with pytest.raises(KVPolicyError, match=r"by prefetch.*remove --offload-group-size"):
        CALLS[call](watched)
    assert not done and watched.model.norms == ([6.0] * 4, [1.0] * 4)
    offloader.module_offloaders = []  # of models that vLLM runs by transformers
    CALLS[call](watched)
