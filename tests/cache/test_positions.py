# SPDX-License-Identifier: Apache-2.0
"""Rotation by ``rank - born`` against vLLM's own rotary classes, and what the model is given."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from vllm_cascade.kernels.rotation_table import rotation_table
from vllm_cascade.models.rotary import find_rotaries, rotary_of, rotate
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.step.positions import CachePositions

HEAD, LENGTH = 32, 512
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "alpha": {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0},
}


def rope(kind: str, *, partial: float = 1.0, is_neox: bool = True, head: int = HEAD) -> Any:
    parameters = {"rope_type": kind, "rope_theta": 10000.0, "partial_rotary_factor": partial}
    own = ROPES.get(kind, {"factor": 2.0})
    with set_current_vllm_config(VllmConfig()):
        return get_rope(head, LENGTH, is_neox, {**parameters, **own}, torch.float32)


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_moving_a_key_equals_writing_it_there(kind: str, is_neox: bool, partial: float) -> None:
    """Also far from zero, where drift would show, and with YaRN's magnitude."""
    module = rope(kind, partial=partial, is_neox=is_neox)
    rotary = rotary_of(module)
    assert 2 * rotary.inv_freq.numel() == HEAD * partial and rotary.is_neox == is_neox
    torch.manual_seed(0)
    key = torch.randn(200, 1, HEAD)
    born = torch.randint(0, LENGTH, (200,))
    rank = (born * torch.rand(200)).long()
    written, _ = module.forward_native(born, key.clone(), key.clone())
    wanted, _ = module.forward_native(rank, key.clone(), key.clone())
    table = rotation_table(rotary.inv_freq, LENGTH, "cpu")
    moved = rotate(written.view(200, HEAD), table[born - rank], is_neox)
    torch.testing.assert_close(moved, wanted.view(200, HEAD), atol=2e-4, rtol=2e-4)
    assert torch.equal(moved[..., int(HEAD * partial) :], key[:, 0, int(HEAD * partial) :])


def test_table_in_fp64() -> None:
    rotary = rotary_of(rope("default"))
    table = rotation_table(rotary.inv_freq, 100_000, "cpu")
    angle = -99_999 * rotary.inv_freq.double()
    assert torch.equal(table[99_999], torch.stack([angle.cos(), angle.sin()]).float())


def test_unknown_variants_are_refused() -> None:
    with pytest.raises(KVPolicyError, match=r"DynamicNTKScaling.*no single frequency table"):
        rotary_of(rope("dynamic"))


def test_a_changed_cache_is_noticed() -> None:
    module = rope("default")
    cache = module.cos_sin_cache
    module.cos_sin_cache = cache.roll(1, dims=0)
    try:
        with pytest.raises(KVPolicyError, match="is not that of its frequencies"):
            rotary_of(module)
    finally:
        module.cos_sin_cache = cache


class Layer(nn.Module):
    """Stands in for vLLM's Attention, which needs a whole engine to exist."""

    def __init__(self, slopes: Any = None) -> None:
        super().__init__()
        self.impl, self.head_size = SimpleNamespace(alibi_slopes=slopes), HEAD


@pytest.fixture
def fake_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_cascade.models.rotary.Attention", Layer)


def block(*rotaries: nn.Module, slopes: Any = None) -> nn.Module:
    module = nn.Module()
    module.attn = Layer(slopes)
    for index, rotary in enumerate(rotaries):
        module.add_module(f"rotary{index}", rotary)
    return module


def test_each_layer_gets_its_own_rotary(fake_attention: None) -> None:
    near, far = rope("default"), rope("linear")
    model = nn.Module()
    model.layers = nn.ModuleList([block(near), block(far), block(slopes=torch.ones(2))])
    layers = {str(i): layer.attn for i, layer in enumerate(model.layers)}
    found = find_rotaries(model, layers)
    assert torch.equal(found["0"].inv_freq, rotary_of(near).inv_freq)
    assert torch.equal(found["1"].inv_freq, rotary_of(far).inv_freq)
    assert found["2"] is None


def test_layers_without_movable_positions_are_refused(fake_attention: None) -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([block()])
    with pytest.raises(KVPolicyError, match="neither rotary embeddings of vLLM's nor ALiBi"):
        find_rotaries(model, {"a": model.layers[0].attn})
    model.layers = nn.ModuleList([block(rope("default"), rope("linear"))])
    with pytest.raises(KVPolicyError, match="more than one rotary"):
        find_rotaries(model, {"a": model.layers[0].attn})


def test_a_rotary_module_of_smaller_heads_is_refused(fake_attention: None) -> None:
    """It turns every piece of a head (Param2 with a ``partial_rotary_factor`` below 1)."""
    module, model = rope("default", head=HEAD // 2), nn.Module()
    key = torch.randn(1, HEAD)
    turned, _ = module.forward_native(torch.tensor([5]), key.clone(), key.clone())
    assert not torch.equal(turned[:, HEAD // 2 :], key[:, HEAD // 2 :]), "as vLLM has it"
    model.layers = nn.ModuleList([block(module)])
    with pytest.raises(KVPolicyError, match=r"heads of 16 channels.*32.*--kv-policy full"):
        find_rotaries(model, {"a": model.layers[0].attn})


def test_a_rotary_module_of_a_heads_last_channels(fake_attention: None) -> None:
    """MiniCPM3's."""
    model = nn.Module()
    model.block = block(rope("default", head=8))
    model.block.qk_nope_head_dim = HEAD - 8
    found = find_rotaries(model, {"a": model.block.attn})["a"]
    assert found is not None and (found.begin, len(found.inv_freq)) == (HEAD - 8, 4)


def test_another_layers_rotary_is_none_of_ones_own(fake_attention: None) -> None:
    """Granite's layers without a base have no rotary module, and the others share one."""
    shared, model = rope("default"), nn.Module()
    model.layers = nn.ModuleList([block(shared), block(), block(shared)])
    with pytest.raises(KVPolicyError, match="b has neither rotary embeddings of vLLM's nor ALiBi"):
        find_rotaries(model, {"b": model.layers[1].attn})


def test_a_rotary_module_for_all_layers(fake_attention: None) -> None:
    model = nn.Module()
    model.layers, model.rotary = nn.ModuleList([block(), block()]), rope("default")
    found = find_rotaries(model, {str(i): layer.attn for i, layer in enumerate(model.layers)})
    assert len(found) == 2 and all(rotary is not None for rotary in found.values())


class Model(nn.Module):
    def forward(self, input_ids: Any = None, positions: Any = None) -> torch.Tensor:
        return positions + 0


class CompiledAsAWhole(Model):
    """vLLM calls the compiled function of such a model from here, past all hooks."""

    compiled = 0

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.compiled += 1
        return self.forward(*args, **kwargs)


@pytest.mark.parametrize("kind", [Model, CompiledAsAWhole])
def test_the_model_sees_our_buffer_and_vllms_stays(kind: type[Model]) -> None:
    model = kind()
    ours = CachePositions(16, torch.device("cpu"))
    ours.install(model)
    ours.fill(torch.tensor([5, 6, 2]))
    vllms = torch.arange(3)
    assert model(positions=vllms).tolist() == [5, 6, 2]
    assert vllms.tolist() == [0, 1, 2], "the sampler reads vLLM's buffer afterwards"
    assert getattr(model, "compiled", 1) == 1, "by the way that the model is called without us"
    assert isinstance(model, kind) and type(model).__name__ == kind.__name__
    assert kind()(positions=vllms).tolist() == [0, 1, 2], "others of its class are not touched"
    first = ours.buffer.data_ptr()
    ours.fill(torch.tensor([1]))
    assert ours.buffer.data_ptr() == first, "a captured graph reads the same memory"
