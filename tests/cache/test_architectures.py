# SPDX-License-Identifier: Apache-2.0
"""Which layers have no rotary positions: against transformers' own models, and vLLM's sources."""

import ast
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Cohere2Config,
    Llama4TextConfig,
    LlamaConfig,
)
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.transformers_utils.configs.eagle import EAGLEConfig

from tests.cache.test_positions import Layer, block, rope
from tests.oracle.families import COMMON, FAMILIES, PLAIN
from tests.oracle.full_attention import OWN_MODULES
from vllm_cascade.engine.devices import WITHOUT_CPU_KERNEL
from vllm_cascade.models import architectures, rotary
from vllm_cascade.models.architectures import frequencies, is_unrotated, may_be_unrotated
from vllm_cascade.models.probe import rotaries_of
from vllm_cascade.policies.settings import KVPolicyError

MODELS = Path(vllm.__file__).parent / "model_executor/models"
COHERE2_MOE = OWN_MODULES["cohere2-moe"]
ELSEWHERE = ("step3p5", "muse-glimmer")
"""Families whose configuration in transformers does not say which layers rotate, or otherwise."""
RULES = {
    **FAMILIES,
    **{
        name: family
        for name, family in OWN_MODULES.items()
        if not (all(family.rotated) or family.learned or name in ELSEWHERE)
    },
    "cohere2-moe, its first layers like others": replace(
        COHERE2_MOE,
        own=COHERE2_MOE.own | {"prefix_dense_sliding_window_pattern": 2},
        rotated=(False, *COHERE2_MOE.rotated[1:]),
    ),
}
"""Families by whose own models the rules are checked."""


def model_of(name: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM  # slow to import

    family = RULES[name]
    config = AutoConfig.for_model(family.model_type, **{**COMMON, **family.own})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def keys_at(model: Any, position: int) -> dict[int, torch.Tensor]:
    """What every layer's attention is given as keys, for one token at a position."""
    seen: dict[int, torch.Tensor] = {}

    def note(module: Any, query: Any, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any):
        seen[module.layer_idx] = key.clone()
        return torch.zeros_like(query).transpose(1, 2), None

    AttentionInterface.register("note_keys", note)
    AttentionMaskInterface.register("note_keys", lambda *args, **kwargs: None)
    model.set_attn_implementation("note_keys")
    with torch.inference_mode():
        model(torch.tensor([[7]]), position_ids=torch.tensor([[position]]), use_cache=False)
    return seen


@pytest.mark.parametrize("name", RULES)
def test_layers_that_transformers_does_not_rotate(name: str) -> None:
    """A key is the same at every position where, and only where, its layer has no positions."""
    model = model_of(name)
    zero, far = keys_at(model, 0), keys_at(model, 9)
    unmoved = [torch.equal(zero[index], far[index]) for index in sorted(zero)]
    windowed = [window is not None for window in RULES[name].windows]
    assert (
        [is_unrotated(model.config, index, has) for index, has in enumerate(windowed)]
        == unmoved
        == [not turns for turns in RULES[name].rotated]
    )


def test_only_the_first_dense_layers_of_cohere2_moe_rotate_without_a_window() -> None:
    """As in vLLM; transformers' module rotates later ones, too, which no checkpoint has."""
    config = SimpleNamespace(
        model_type="cohere2_moe",
        mlp_layer_types=["dense", "dense", "sparse", "dense"],
        prefix_dense_sliding_window_pattern=1,
    )
    without = [is_unrotated(config, index, windowed=False) for index in range(4)]
    assert without == [False, False, True, True]
    assert not any(is_unrotated(config, index, windowed=True) for index in range(4))


def test_eagle_heads_follow_the_rule_of_their_type() -> None:
    """vLLM wraps their configuration, whose type it names "eagle"."""
    kinds = ["sliding_attention", "full_attention"]
    head = Cohere2Config(**{**COMMON, "num_hidden_layers": 2, "layer_types": kinds})
    head.architectures = ["Cohere2ForCausalLM"]
    wrapped = EAGLEConfig(head, model_type="eagle")
    assert wrapped.model_type == "eagle" and wrapped.layer_types == kinds
    assert [is_unrotated(wrapped, n, windowed=n == 0) for n in range(2)] == [False, True]
    llama = EAGLEConfig(LlamaConfig(architectures=["LlamaForCausalLM"]), model_type="eagle")
    assert not is_unrotated(llama, 0, windowed=False)


def test_eagle_heads_of_llama4_have_the_list_of_their_own() -> None:
    """vLLM numbers their layers from the model's depth on, and pads the wrapping list only."""
    head = Llama4TextConfig(num_hidden_layers=1, no_rope_layers=[1], moe_layers=[])
    head.architectures = ["Llama4ForCausalLM"]
    wrapped = EAGLEConfig(head, model_type="eagle")
    wrapped.no_rope_layers = [0] * 48 + wrapped.no_rope_layers  # as in vLLM's llama4_eagle.py
    assert not may_be_unrotated(wrapped)
    assert [is_unrotated(wrapped, index, windowed=False) for index in (47, 48)] == [True, False]
    new = LlamaConfig(architectures=["LlamaForCausalLM"], no_rope_layers=[1, 0])
    assert may_be_unrotated(EAGLEConfig(new, model_type="eagle"))


def test_muse_glimmer_has_bases_or_a_list() -> None:
    """Bases in transformers' configuration, which vLLM 0.33 takes; a list in vLLM 0.32's own."""
    from transformers.models.muse_glimmer import modeling_muse_glimmer as muse

    own = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    for bases in ([10000.0, 0], [0, 10000.0]):
        config = muse.MuseGlimmerTextConfig(**{**COMMON, **own, "layer_rope_theta": bases})
        model = muse.MuseGlimmerTextModel(config).eval()
        zero, far = keys_at(model, 0), keys_at(model, 9)
        unmoved = [torch.equal(zero[index], far[index]) for index in range(2)]
        found = [is_unrotated(config, index, windowed=False) for index in range(2)]
        assert found == unmoved == [base == 0 for base in bases]
    listed = SimpleNamespace(model_type="muse_glimmer_text", no_rope_layers=[0, 1])
    assert [is_unrotated(listed, index, windowed=False) for index in range(2)] == [True, False]


def test_types_of_layers_without_rotary_parameters() -> None:
    """Cohere Compass's text layers; transformers has no class of its own for text alone."""
    from transformers.models.cohere_compass import modeling_cohere_compass as compass

    own = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    ropes = {"sliding_attention": {**PLAIN, "mrope_section": [6, 6, 4]}, "full_attention": None}
    config = compass.CohereCompassTextConfig(**{**COMMON, **own, "rope_parameters": ropes})
    model = compass.CohereCompassTextModel(config).eval()
    zero, far = keys_at(model, 0), keys_at(model, 9)
    unmoved = [torch.equal(zero[index], far[index]) for index in range(2)]
    assert [is_unrotated(config, index, False) for index in range(2)] == unmoved == [False, True]
    del config.rope_parameters["full_attention"]
    assert is_unrotated(config, 1, windowed=False)


@pytest.mark.parametrize("name", ["smollm3", "olmo3"])
def test_frequencies_of_transformers_modules(name: str) -> None:
    """A key at position 9 is the one at 0, turned by nine times these frequencies."""
    model = model_of(name)
    zero, far = keys_at(model, 0), keys_at(model, 9)
    for index, turns in enumerate(RULES[name].rotated):
        inv_freq = frequencies(model, model.config, index)
        if turns:
            angle = 9 * inv_freq
            table = torch.stack([angle.cos(), angle.sin()])
            moved = rotary.rotate(zero[index][0, :, 0], table, is_neox=True)
            torch.testing.assert_close(moved, far[index][0, :, 0], atol=1e-5, rtol=1e-5)
    assert frequencies(nn.Module(), model.config, 0) is None


def conditional_calls(path: Path) -> bool:
    """Whether a rotary module of ``self`` is called inside an ``if``."""

    def find(node: ast.AST, within: bool) -> bool:
        for child in ast.iter_child_nodes(node):
            called = isinstance(child, ast.Call) and ast.unparse(child.func) == "self.rotary_emb"
            if called and within:
                return True
            branch = isinstance(node, ast.If) and child is not node.test
            inside = (within or branch) and not isinstance(child, ast.FunctionDef)
            if find(child, inside):
                return True
        return False

    return find(ast.parse(path.read_text(encoding="utf-8")), False)


HARMLESS = {
    "afmoe": "`architectures` knows",
    "cohere2_moe": "`architectures` knows",
    "cohere_compass": "`architectures` knows",
    "commandr": "`architectures` knows",
    "exaone4": "`architectures` knows",
    "exaone_moe": "`architectures` knows",
    "falcon": "layers that do not rotate have ALiBi",
    "gemma3n": "a rotary module without keys is that of a layer that shares another's cache",
    "gemma4": "a rotary module without keys is that of a layer that shares another's cache",
    "granite": "without a base there is no rotary module",
    "granitemoe": "without a base there is no rotary module",
    "granitemoehybrid": "`architectures` knows",
    "hy_v3": "a fused kernel rotates instead",
    "iquest_loopcoder": "it is called in both branches",
    "llama4": "`architectures` knows",
    "muse_glimmer": "`architectures` knows",
    "olmo_hybrid": "without a base there is no rotary module",
    "step3p5": "`architectures` knows",
    "zamba2": "where it is not called there is no rotary module",
}
"""vLLM model files that call a rotary module conditionally, and why this is safe."""


def test_every_model_of_vllm_that_skips_its_rotary_module_is_known() -> None:
    """One that is new in a release must be looked at before a policy runs it."""
    found = {path.stem for path in MODELS.glob("*.py") if conditional_calls(path)}
    known = set(architectures.SKIPPING) | set(HARMLESS)
    newer = {"domyn_edge"}  # from vLLM 0.33 on
    assert found == {name for name in known if (MODELS / f"{name}.py").is_file()}
    assert {name for name in known if not (MODELS / f"{name}.py").is_file()} <= newer


def test_a_model_that_skips_by_an_unknown_rule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "Attention", Layer)
    model = nn.Module()
    model.attention = block(rope("default"))
    model.attention.__class__ = type(
        "DomynEdgeAttention", (nn.Module,), {"__module__": "vllm.model_executor.models.domyn_edge"}
    )
    with pytest.raises(KVPolicyError, match="how DomynEdgeAttention decides that is not known"):
        rotary.find_rotaries(model, {"a": model.attention.attn})


@pytest.mark.parametrize(
    ("file", "own", "expected"),
    [
        ("k2_horizon", {"fold_rope_weights": True}, False),
        ("k2_horizon", {"fold_rope_weights": False}, True),  # quantised weights
        ("k2_horizon", {"fold_rope_weights": False, "rope_head_dim": 32}, False),
        ("llama", {"fold_rope_weights": False}, False),
    ],
)
def test_channels_that_vllm_does_not_reorder_are_refused(
    file: str, own: dict[str, Any], expected: bool
) -> None:
    kind = type("Block", (nn.Module,), {"__module__": f"vllm.model_executor.models.{file}"})
    module = kind()
    for name, value in {"head_dim": 32, "rope_head_dim": 16, **own}.items():
        setattr(module, name, value)
    assert architectures.skips_unknown(module) == expected


def test_step3p5_lists_layers() -> None:
    """Or none, and then all of them rotate."""
    listed = SimpleNamespace(model_type="step3p5", use_rope_layers=[True, False])
    none = SimpleNamespace(model_type="step3p5", use_rope_layers=[])
    assert [is_unrotated(listed, index, True) for index in range(2)] == [False, True]
    assert not is_unrotated(none, 0, True)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "new", "no_rope_layers": [1, 0]}, True),
        ({"model_type": "new", "no_rope_layers": [1, 1]}, False),
        ({"model_type": "new", "no_rope_layer_interval": 4}, True),
        ({"model_type": "new", "use_rope_layers": [True, False]}, True),
        ({"model_type": "new"}, False),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, False),
    ],
)
def test_configurations_that_speak_of_them(config: dict[str, Any], expected: bool) -> None:
    assert may_be_unrotated(SimpleNamespace(**config)) == expected


def test_local_layers_rotate_without_their_windows() -> None:
    """AFMoE's, also under ``--disable-sliding-window``: its layers go by their types."""
    config = SimpleNamespace(
        model_type="afmoe", layer_types=["sliding_attention", "full_attention"]
    )
    for windowed in (True, False):
        assert [is_unrotated(config, index, windowed) for index in range(2)] == [False, True]


class Recurrent(nn.Module, MambaBase):
    """A layer as vLLM's are, of which only the class counts here."""

    mamba_type = "none"

    def get_state_shape(self) -> Any:
        return ()

    def get_state_dtype(self) -> Any:
        return ()


def recurrent_files_that_rotate() -> set[str]:
    """vLLM's files of recurrent layers that make a rotary module."""
    folder = MODELS.parent / "layers/mamba"
    return {path.stem for path in folder.rglob("*.py") if "get_rope(" in path.read_text("utf-8")}


def test_recurrent_layers_that_rotate_are_refused() -> None:
    """Their states hold positions that a policy would bound."""
    assert recurrent_files_that_rotate() == {"bailing_linear_attn"}
    assert "bailing_hybrid" in WITHOUT_CPU_KERNEL
    model = nn.Module()
    model.layer = Recurrent()
    assert rotaries_of(model, {}, SimpleNamespace(model_type="llama")) == {}
    model.layer.rotary_emb = rope("default")
    with pytest.raises(KVPolicyError, match="layer is a recurrent layer that rotates"):
        rotaries_of(model, {}, SimpleNamespace(model_type="llama"))
