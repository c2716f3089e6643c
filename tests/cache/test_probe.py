# SPDX-License-Identifier: Apache-2.0
"""How keys are rotated, found by asking: transformers' own models, whose source says the layout."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig

from tests.oracle.families import COMMON, FAMILIES, Family
from tests.oracle.full_attention import BY_TRANSFORMERS, NORMALISED_AFTERWARDS
from vllm_cascade.models import probe
from vllm_cascade.models.architectures import frequencies
from vllm_cascade.models.norms import KeyNorms
from vllm_cascade.models.rotary import Rotary
from vllm_cascade.policies.settings import KVPolicyError

ROTATED = {
    **{
        name: family
        for name, family in BY_TRANSFORMERS.items()
        if not (family.learned or name in NORMALISED_AFTERWARDS)
    },
    **{name: FAMILIES[name] for name in ("smollm3", "olmo3")},
}


def noted(
    family: Family, dtype: torch.dtype = torch.float32, moved: bool = False
) -> tuple[Any, dict[int, Any]]:
    """A model, and queries and keys of one token at ``POSITIONS``, by layer.

    Args:
        moved: whether the weights of key norms after the rotation are moved.
    """
    from transformers import AutoModelForCausalLM  # slow to import

    torch.manual_seed(0)
    config = AutoConfig.for_model(family.model_type, **{**COMMON, **family.own})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, weight in model.named_parameters():
        if weight.dim() == 1 and name.endswith("weight"):
            weight.data += 0.3 * torch.randn_like(weight)
    if moved:
        KeyNorms(model, config).move()
    model.to(dtype)
    seen: dict[int, Any] = {}

    def note(module: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        seen[module.layer_idx] = query[0].transpose(0, 1), key[0].transpose(0, 1)
        return torch.zeros_like(query).transpose(1, 2), None

    AttentionInterface.register("note_both", note)
    AttentionMaskInterface.register("note_both", lambda *args, **kwargs: None)
    model.set_attn_implementation("note_both")
    positions = torch.tensor(probe.POSITIONS)[None]
    with torch.inference_mode():
        model(torch.full_like(positions, 7), position_ids=positions, use_cache=False)
    return model, seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROTATED)
def test_the_layout_is_found(name: str, dtype: torch.dtype) -> None:
    """Halves or neighbours, all channels or some, in layers of both kinds, or nothing."""
    family = ROTATED[name]
    model, seen = noted(family, dtype)
    for index, turns in enumerate(family.rotated):
        inv_freq = frequencies(model, model.config, index)
        assert inv_freq is not None
        found = probe.rotation("a layer", seen[index], inv_freq)
        if not turns:
            assert found is None
            continue
        assert found is not None and found.is_neox == (not family.interleaved)
        rope = model.config.rope_parameters
        share = rope.get("partial_rotary_factor", 1.0)
        assert 2 * len(found.inv_freq) == 32 * share


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_not_the_rotation_alone_is_refused(dtype: torch.dtype) -> None:
    model, seen = noted(BY_TRANSFORMERS["hunyuan"], dtype)
    with pytest.raises(KVPolicyError, match="normalised after they were rotated"):
        probe.rotation("a layer", seen[0], frequencies(model, model.config, 0))
    model, seen = noted(BY_TRANSFORMERS["phi"], dtype)
    inv_freq = frequencies(model, model.config, 0)
    assert inv_freq is not None
    queries, keys = seen[0]
    assert probe.rotation("a layer", (queries, keys), inv_freq) is not None
    for wrong in (inv_freq * 1.01, inv_freq[:-1], inv_freq.repeat(2), inv_freq.repeat(8), None):
        with pytest.raises(KVPolicyError, match="a layer are not what the frequencies"):
            probe.rotation("a layer", (queries, keys), wrong)
    for other in (torch.zeros_like(keys), keys * float("nan"), keys.flip(-1), keys.roll(1, 0)):
        with pytest.raises(KVPolicyError, match="a layer are not what the frequencies"):
            probe.rotation("a layer", (queries, other), inv_freq)
    with pytest.raises(KVPolicyError, match="a layer are not what the frequencies"):
        probe.rotation("a layer", (queries.roll(1, 0), keys), inv_freq)


def products(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Of all queries and keys, by query head."""
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    return torch.einsum("qhd,khd->hqk", queries.float(), keys.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NORMALISED_AFTERWARDS)
def test_weights_of_key_norms_are_moved(name: str, dtype: torch.dtype) -> None:
    """Keys are then the rotation alone, and products with queries as near as they were."""
    family = BY_TRANSFORMERS[name]
    exact, plain = noted(family)[1], noted(family, dtype)[1]
    model, seen = noted(family, dtype, moved=True)
    for index, (_, keys) in seen.items():
        inv_freq = frequencies(model, model.config, index)
        found = probe.rotation("a layer", [keys], inv_freq)
        assert found is not None and found.is_neox
        wanted, before, now = (products(*one[index]) for one in (exact, plain, seen))
        error = (now - wanted).norm() / wanted.norm()
        assert error < 1.2 * (before - wanted).norm() / wanted.norm() + 1e-6


class Attention(nn.Module):
    """Stands in for vLLM's, which needs an engine to exist."""

    head_size = 4

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        raise AssertionError("asked while nobody notes")


def test_layers_are_themselves_again() -> None:
    """Also where the model fails."""
    layer = Attention()
    seen: probe.Noted = {}
    with probe.noting({"a": layer}, seen):
        assert layer(torch.ones(3, 8), torch.ones(3, 4), torch.ones(3, 4)).sum() == 0
    assert [rows.shape for rows in seen["a"]] == [(3, 2, 4), (3, 1, 4)]
    with pytest.raises(ValueError), probe.noting({"a": layer}, seen):
        raise ValueError
    with pytest.raises(AssertionError, match="nobody notes"):
        layer(torch.ones(3, 8), torch.ones(3, 4), torch.ones(3, 4))


def test_who_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text models that vLLM runs by transformers' classes; not with LongRoPE."""
    base = type("Base", (nn.Module,), {"__module__": probe.BY_TRANSFORMERS})
    model = type("Model", (base,), {})()
    assert probe.runs_transformers(model)
    assert not probe.runs_transformers(nn.Module())
    model.supports_multimodal = True
    assert not probe.runs_transformers(model)
    model.supports_multimodal = False
    long = SimpleNamespace(rope_parameters={"rope_type": "longrope"})
    with pytest.raises(KVPolicyError, match="changes LongRoPE's frequencies"):
        probe.rotaries_of(model, {}, long)
    config = SimpleNamespace(rope_parameters={"rope_type": "default"})
    inv_freq = torch.tensor([1.0, 0.5])
    states = torch.randn(1, 2, 4).expand(len(probe.POSITIONS), 2, 4)
    moved = probe.turned(states, Rotary(inv_freq, False))
    monkeypatch.setattr(probe, "ask", lambda *_: {"layers.0.attn": (moved, moved)})
    monkeypatch.setattr(probe, "frequencies", lambda *_: inv_freq)
    found = probe.rotaries_of(model, {"layers.0.attn": Attention()}, config)["layers.0.attn"]
    assert found is not None and found.inv_freq is inv_freq and not found.is_neox
