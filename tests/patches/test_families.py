# SPDX-License-Identifier: Apache-2.0
"""``docs/MODELS.md`` against vLLM's registry, and against what tests compare."""

from vllm.model_executor.models import registry

from tests.conftest import ROOT
from tests.oracle.families import FAMILIES, model_class
from tests.oracle.full_attention import BY_TRANSFORMERS, OTHER_NAMES, OWN_MODULES
from tests.oracle.recurrent import RECURRENT
from tests.patches import families

# vLLM 0.33 adds them; the transformers that it needs has no modules to compare with.
ADDED_BY_NEXT = {
    "BeamForCausalLM",
    "DoryForCausalLM",
    "Kolibri1ForCausalLM",
}


def test_the_page_is_up_to_date() -> None:
    """A new release of vLLM shows here what it added."""
    text = (ROOT / "docs/MODELS.md").read_text("utf-8")
    assert text == families.page(), "run python -m tests.patches.families"


def test_every_text_architecture_is_listed() -> None:
    listed = set(families.families())
    assert set(registry._TEXT_GENERATION_MODELS) - listed == {
        "ChatGLMForConditionalGeneration",
        "InklingForConditionalGeneration",
    }
    assert {status for status, _ in families.families().values()} == {
        *("works", "refused", "untested")
    }


def test_what_works_is_compared() -> None:
    compared = {
        getattr(family, "architecture", None) or model_class(family.model_type)
        for group in (FAMILIES, OWN_MODULES, OTHER_NAMES, BY_TRANSFORMERS, RECURRENT)
        for family in group.values()
    }
    assert set(families.TESTED) == compared | {"LlamaForCausalLM", "BloomForCausalLM"}


def test_sources_say_why() -> None:
    found = families.families()
    for name, why in (
        ("JambaForCausalLM", "recurrent layers that vLLM runs on GPUs only"),
        ("Mamba2ForCausalLM", "all layers are recurrent"),
        ("DeepseekV32ForCausalLM", "layers choose the tokens that they attend to"),
        ("InklingForCausalLM", "relative positions, which vLLM computes on GPUs only"),
        ("MiniMaxM3SparseForCausalLM", "layers choose the tokens that they attend to"),
        ("Qwen4ExpForCausalLM", "layers choose the tokens that they attend to"),
        ("BailingMoeV3ForCausalLM", "recurrent layers that vLLM runs on GPUs only"),
        ("HrmTextForCausalLM", "prompts attend in both directions"),
        ("Step1ForCausalLM", "ALiBi of square roots, which vLLM runs on GPUs only"),
        ("MiMoV2ForCausalLM", "values and keys of two sizes, which vLLM runs on GPUs only"),
    ):
        assert found[name] == ("refused", why)
    for name in ("Zamba2ForCausalLM", "PanguUltraMoEForCausalLM"):
        assert found[name] == ("untested", "")
    untested = {name for name, (status, _) in found.items() if status == "untested"}
    assert len(untested - ADDED_BY_NEXT) <= 10
