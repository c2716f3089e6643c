# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's text models run with a policy: ``python -m vllm_cascade.patches.hooks.models``.

Writes ``docs/MODELS.md`` from vLLM's registry: what the tests run, what is refused and why, as far
as a model's source says it, and what nobody has tried. A new release shows where it differs.
"""

import importlib.util
import re
from functools import cache
from pathlib import Path

from vllm_cascade.cache.architectures import ELSEWHERE, IN_HALVES, SKIPPING

PAGE = Path(__file__).resolve().parents[2] / "docs/MODELS.md"

TESTED = {
    "BloomForCausalLM": "ALiBi",
    "Cohere2ForCausalLM": "windows, unrotated layers",
    "Exaone4ForCausalLM": "windows, unrotated layers",
    "FalconH1ForCausalLM": "recurrent heads (Mamba-2) in every layer",
    "Gemma2ForCausalLM": "windows, soft caps",
    "Gemma3ForCausalLM": "windows, two rotations",
    "GptOssForCausalLM": "windows, learned sinks",
    "GraniteMoeHybridForCausalLM": "recurrent layers (Mamba-2), unrotated layers",
    "Lfm2ForCausalLM": "recurrent layers (short convolutions)",
    "LlamaForCausalLM": "full attention",
    "MistralForCausalLM": "a window in every layer: the policy decides nothing",
    "NemotronHForCausalLM": "recurrent layers (Mamba-2), unrotated layers",
    "Olmo3ForCausalLM": "windows; vLLM runs it by transformers",
    "Phi3ForCausalLM": "LongRoPE",
    "SmolLM3ForCausalLM": "unrotated layers; vLLM runs it by transformers",
}
"""Architectures that tests compare with an oracle, and what they have."""

REASONS = {
    "all layers are recurrent": r"\bIsAttentionFree\b",
    "recurrent layers that vLLM runs on GPUs only": r"\b(MambaMixer|(Kimi|OlmoHybrid)Gated\w*)\b",
    "multi-head latent attention": r"\b(\w*MLAAttention|MLAModules|DeepseekV[23]ForCausalLM)\b",
    "layers that attend within chunks": r"\bChunkedLocalAttention\b",
    "caches shared between layers": r"\bkv_sharing_target_layer_name=(?!None)",
    "positions that are added to inputs": r"\b(wpe|embed_positions)\b",
}
"""Why a model is refused, and what its source has then."""

OTHER_CLASSES = {"DeepseekForCausalLM"}
"""Architectures without what other models of their file are refused for."""


@cache
def source(module: str) -> str:
    """The text of a model's file, or of all files of its package."""
    name = module if module.startswith("vllm.") else f"vllm.model_executor.models.{module}"
    found = importlib.util.find_spec(name)
    assert found is not None and found.origin is not None, name
    path = Path(found.origin)
    files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def by_transformers(architecture: str) -> bool:
    """Whether a model that vLLM runs by transformers' classes has rotations that are known."""
    return architecture.removesuffix("ForCausalLM").lower() in IN_HALVES


def reason(architecture: str, module: str) -> str | None:
    """Why an architecture is refused; None: nothing in its source says that it is."""
    if module == "transformers":
        known = by_transformers(architecture)
        return None if known else "how transformers rotates its keys is not known here"
    if module in SKIPPING:
        return "which layers have rotary positions is not known here"
    if module in ELSEWHERE:
        return "rotates other channels of a head than the first ones"
    text = source(module)
    for why, pattern in REASONS.items():
        if re.search(pattern, text) and architecture not in OTHER_CLASSES:
            return why
    return None


def families() -> dict[str, tuple[str, str]]:
    """Every text architecture of vLLM: ``works``, ``refused`` or ``untested``, and why."""
    from vllm.model_executor.models import registry

    models = {**registry._TEXT_GENERATION_MODELS, **registry._TRANSFORMERS_SUPPORTED_MODELS}
    found = {}
    for architecture, (module, _) in sorted(models.items(), key=lambda item: item[0].lower()):
        if not architecture.endswith(("ForCausalLM", "LMHeadModel", "Model")):
            continue  # pictures and sounds
        why = reason(architecture, module)
        if architecture in TESTED:
            found[architecture] = "works", TESTED[architecture]
        elif why is not None:
            found[architecture] = "refused", why
        else:
            found[architecture] = "untested", ""
    return found


def page() -> str:
    """The text of ``docs/MODELS.md``."""
    rows = [f"| `{name}` | {status} | {why} |" for name, (status, why) in families().items()]
    return "\n".join(
        [
            "# Models",
            "",
            "The text models of vLLM 0.32 and what a policy does with them on a CPU. Written by",
            "`python -m vllm_cascade.patches.hooks.models` from vLLM's registry and sources.",
            "",
            "- **works**: a test compares tiny random models of the architecture with an",
            "  independent reference, past budget and windows (`tests/engine/test_families.py`,",
            "  `tests/engine/test_against_oracle.py`);",
            "- **refused**: an engine stops at start and says why;",
            "- **untested**: nothing in its source stands against it, and nobody has compared it.",
            "  What its configuration asks for may still be refused at start.",
            "",
            "| architecture | | |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
