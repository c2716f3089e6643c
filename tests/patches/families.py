# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's text models run with a policy: ``python -m tests.patches.families``.

Writes ``docs/MODELS.md`` from vLLM's registry: what the tests run, what is refused and why, as far
as a model's source says it, and what nobody has tried. A new release shows where it differs.
"""

import importlib.util
import inspect
import re
from functools import cache
from pathlib import Path

from vllm_cascade.models.architectures import OWN_ATTENTION, SKIPPING

PAGE = Path(__file__).resolve().parents[2] / "docs/MODELS.md"

LEARNED = "learned positions: streams end where they end"
TESTED = {
    "AfmoeForCausalLM": "experts, windows, NoPE layers, gated",
    "ApertusForCausalLM": "full attention",
    "ArceeForCausalLM": "full attention; vLLM runs it by transformers",
    "AXK1ForCausalLM": "multi-head latent attention, experts",
    "BailingMoeForCausalLM": "experts",
    "BailingMoeV2ForCausalLM": "experts, partial rotary",
    "BloomForCausalLM": "ALiBi",
    "ChatGLMModel": "partial rotary, interleaved",
    "Cohere2ForCausalLM": "windows, NoPE layers",
    "Cohere2MoeForCausalLM": "experts, windows, NoPE layers",
    "CohereForCausalLM": "full attention, interleaved rotary",
    "CwmForCausalLM": "windows; vLLM runs it by transformers",
    "DeepseekForCausalLM": "experts",
    "DeepseekV2ForCausalLM": "multi-head latent attention, experts",
    "DeepseekV3ForCausalLM": "multi-head latent attention, experts; also Kimi K2",
    "Ernie4_5_MoeForCausalLM": "experts, interleaved rotary; on CPUs vLLM routes without biases",
    "Ernie4_5ForCausalLM": "full attention, interleaved rotary",
    "Exaone4ForCausalLM": "windows, NoPE layers",
    "ExaoneForCausalLM": "full attention",
    "ExaoneMoeForCausalLM": "experts, windows, NoPE layers",
    "ExaoneMoEForCausalLM": "experts, windows, NoPE layers",
    "FalconForCausalLM": "full attention",
    "FalconH1ForCausalLM": "recurrent heads (Mamba-2) in every layer",
    "FlexOlmoForCausalLM": "experts; vLLM runs it by transformers",
    "Gemma2ForCausalLM": "windows, soft caps",
    "Gemma3ForCausalLM": "windows, two rotations",
    "Gemma3nForCausalLM": "windows, two rotations, shared caches",
    "Gemma4ForCausalLM": "windows, fewer and larger heads elsewhere; E2B, E4B: shared caches",
    "GemmaForCausalLM": "full attention",
    "Glm4ForCausalLM": "partial rotary, interleaved",
    "Glm4MoeForCausalLM": "experts, partial rotary",
    "Glm4MoeLiteForCausalLM": "multi-head latent attention, experts",
    "GlmForCausalLM": "partial rotary, interleaved; vLLM runs it by transformers",
    "GPT2LMHeadModel": LEARNED,
    "GPTBigCodeForCausalLM": f"{LEARNED}; vLLM runs it by transformers",
    "GPTJForCausalLM": "partial rotary, interleaved",
    "GPTNeoXForCausalLM": "partial rotary; vLLM runs it by transformers",
    "GptOssForCausalLM": "windows, learned sinks",
    "GraniteForCausalLM": "full attention",
    "GraniteMoeForCausalLM": "experts",
    "GraniteMoeHybridForCausalLM": "recurrent layers (Mamba-2), NoPE layers",
    "GraniteMoeSharedForCausalLM": "experts",
    "GraniteMoeSWAForCausalLM": "experts, windows, learned sinks",
    "GraniteSWAForCausalLM": "windows, learned sinks, NoPE layers",
    "HyperCLOVAXForCausalLM": "full attention",
    "HunYuanDenseV1ForCausalLM": "keys normalised after rotation; vLLM runs it by transformers",
    "HunYuanMoEV1ForCausalLM": (
        "experts, keys normalised after rotation; vLLM runs it by transformers"
    ),
    "HYV3ForCausalLM": "experts",
    "InternLM2ForCausalLM": "full attention",
    "InternLM3ForCausalLM": "full attention",
    "IQuestCoderForCausalLM": "full attention",
    "IQuestLoopCoderForCausalLM": "layers run twice: shared caches, windows",
    "Jais2ForCausalLM": "full attention; vLLM runs it by transformers",
    "K2HorizonForCausalLM": (
        "experts, partial rotary; not with quantised weights; on CPUs vLLM cannot run its experts"
    ),
    "LagunaForCausalLM": "windows, two rotations, gated; on CPUs vLLM cannot run its experts",
    "Lfm2ForCausalLM": "recurrent layers (short convolutions)",
    "Lfm2MoeForCausalLM": "recurrent layers (short convolutions), experts",
    "Llama4ForCausalLM": "experts, chunks, NoPE layers",
    "LlamaForCausalLM": "full attention",
    "LLaMAForCausalLM": "full attention",
    "MellumForCausalLM": "experts, windows; vLLM runs it by transformers",
    "MiMoForCausalLM": "full attention",
    "MiniCPM3ForCausalLM": "keys whose last channels rotate",
    "MiniCPMForCausalLM": "full attention",
    "MiniMaxM2ForCausalLM": "partial rotary; on CPUs vLLM cannot run its experts",
    "Ministral3ForCausalLM": "full attention",
    "MistralForCausalLM": "with a window in every layer the policy decides nothing",
    "MistralLarge3ForCausalLM": "multi-head latent attention, experts",
    "MixtralForCausalLM": "experts",
    "MuseGlimmerForCausalLM": "windows, NoPE layers, gated",
    "NanbeigeForCausalLM": "full attention; vLLM runs it by transformers",
    "NemotronForCausalLM": "partial rotary",
    "NemotronHForCausalLM": "recurrent layers (Mamba-2), NoPE layers",
    "Olmo2ForCausalLM": "full attention; vLLM runs it by transformers",
    "Olmo3ForCausalLM": "windows; vLLM runs it by transformers",
    "OlmoeForCausalLM": "experts",
    "OlmoForCausalLM": "full attention; vLLM runs it by transformers",
    "OPTForCausalLM": LEARNED,
    "OrionForCausalLM": "full attention",
    "PanguEmbeddedForCausalLM": "full attention",
    "Phi3ForCausalLM": "LongRoPE",
    "PhiForCausalLM": "partial rotary; vLLM runs it by transformers",
    "PhiMoEForCausalLM": "experts",
    "Plamo3ForCausalLM": "windows, two rotations",
    "Qwen2ForCausalLM": "full attention",
    "Qwen2MoeForCausalLM": "experts",
    "Qwen3_5ForCausalLM": "recurrent layers (gated delta nets), in bfloat16",
    "Qwen3_5MoeForCausalLM": "recurrent layers (gated delta nets), experts, in bfloat16",
    "Qwen3ForCausalLM": "full attention",
    "Qwen3MoeForCausalLM": "experts",
    "Qwen3NextForCausalLM": "recurrent layers (gated delta nets), experts, in bfloat16",
    "Rnj1ForCausalLM": "full attention; layers of chunks (`chunked_attention`) are refused",
    "SarvamMLAForCausalLM": "multi-head latent attention, experts",
    "SarvamMoEForCausalLM": "experts, partial rotary",
    "SeedOssForCausalLM": "full attention; vLLM runs it by transformers",
    "SmolLM3ForCausalLM": "NoPE layers; vLLM runs it by transformers",
    "SolarForCausalLM": "full attention",
    "StableLmForCausalLM": "partial rotary",
    "Step3p5ForCausalLM": (
        "experts, windows, two rotations, gated; on CPUs vLLM cannot run its experts"
    ),
    "Step3TextForCausalLM": "experts, low-rank queries",
    "Starcoder2ForCausalLM": "full attention; vLLM runs it by transformers",
    "TeleChat2ForCausalLM": "full attention",
    "TeleChat3ForCausalLM": "full attention",
    "TeleFLMForCausalLM": "full attention",
    "VaultGemmaForCausalLM": "windows, soft caps; vLLM runs it by transformers",
}
"""Architectures that tests compare with an oracle, and what they have."""

DOWNLOADED = {
    "Qwen 2.5, Qwen 3": ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
    "Qwen 3.5": ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    "Llama 3": ("LlamaForCausalLM",),
    "Gemma 3": ("Gemma3ForCausalLM",),
    "Gemma 4": ("Gemma4ForCausalLM",),
    "gpt-oss": ("GptOssForCausalLM",),
    "DeepSeek V3, R1, Kimi K2": ("DeepseekV3ForCausalLM",),
    "DeepSeek V3.2, V4": ("DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM"),
    "Mistral": ("MistralForCausalLM", "MixtralForCausalLM"),
    "GLM 4": ("Glm4ForCausalLM", "Glm4MoeForCausalLM"),
    "Phi 3, Phi 4": ("Phi3ForCausalLM",),
    "Nemotron": ("NemotronForCausalLM", "NemotronHForCausalLM"),
    "Granite": ("GraniteForCausalLM", "GraniteMoeHybridForCausalLM"),
}
"""The families of 2026 that are downloaded most, and their text architectures."""

REASONS = {
    "all layers are recurrent": r"\bIsAttentionFree\b",
    "recurrent layers that vLLM runs on GPUs only": (
        r"\b(MambaMixer|(Kimi|OlmoHybrid)Gated\w*|BailingMoELinearAttention|\w+KimiDeltaAttention)\b"
    ),
    "prompts attend in both directions": r"\bPrefillPrefixLMAttention\b",
    "ALiBi of square roots, which vLLM runs on GPUs only": r"\buse_alibi_sqrt=True\b",
    "values and keys of two sizes, which vLLM runs on GPUs only": r"(?i)diff_?kv",
    "vLLM 0.32 itself cannot load its experts": r"\bclass DbrxExperts\b",
    "layers choose the tokens that they attend to": (
        r"(?s)\b(kv_lora_rank|compress_ratios)\b.*\bindex_topk\b"
        r"|\bindexer_budget\b|\bsparse_attention_config\b"
    ),
    "relative positions, which vLLM computes on GPUs only": r"\bfa4_rel_attention\b",
}
"""Why a model is refused, and what its source has then."""

OTHER_CLASSES = {"DeepseekForCausalLM", "PanguUltraMoEForCausalLM"}
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


def transformers_source(architecture: str) -> str:
    """The text of the file that has a class of transformers'; empty: it has no such class."""
    import transformers

    found = getattr(transformers, architecture, None)
    return "" if found is None else Path(inspect.getfile(found)).read_text(encoding="utf-8")


def reason(architecture: str, module: str) -> str | None:
    """Why an architecture is refused; None: nothing in its source says that it is."""
    if module in SKIPPING:
        return "which layers have rotary positions is not known here"
    if module.rpartition(".")[2] in OWN_ATTENTION:
        return "layers call attention kernels of their own"
    text = transformers_source(architecture) if module == "transformers" else source(module)
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
            continue  # images and audio
        why = reason(architecture, module)
        if architecture in TESTED:
            found[architecture] = "works", TESTED[architecture]
        elif why is not None:
            found[architecture] = "refused", why
        else:
            found[architecture] = "untested", ""
    return found


def downloaded_rows(found: dict[str, tuple[str, str]]) -> list[str]:
    """Rows of the families that are downloaded most."""
    rows = []
    for family, names in DOWNLOADED.items():
        status = ", ".join(sorted({found[name][0] for name in names}))
        rows.append(f"| {family} | {status} | {', '.join(f'`{name}`' for name in names)} |")
    return rows


def page() -> str:
    """The text of ``docs/MODELS.md``."""
    found = families()
    rows = [f"| `{name}` | {status} | {why} |" for name, (status, why) in found.items()]
    return "\n".join(
        [
            "# Models",
            "",
            "The text models of vLLM 0.32 on a CPU, with a policy. Written by",
            "`python -m tests.patches.families` from vLLM's registry and sources.",
            "",
            "- **works**: tests compare tiny random models of the architecture with an independent",
            "  reference, past budget and windows (in `tests/engine`: `test_full_attention.py`,",
            "  `test_families.py`, `test_recurrent.py`, `test_against_oracle.py`; with recall:",
            "  `test_recall_families.py`).",
            "- **refused**: the engine stops at start and says why.",
            "- **untested**: its source shows no obstacle, but no test compares it. A setting of",
            "  its configuration may still be refused at start. A model that vLLM runs by",
            "  transformers is probed at start, and refused if its keys cannot be re-rotated.",
            "",
            "The most downloaded families (the ATOM report, https://arxiv.org/abs/2604.07190,",
            "and rankings of the Hugging Face Hub of 2026; an R1 distilled into Qwen or Llama is",
            "one of these):",
            "",
            "| family | | |",
            "|---|---|---|",
            *downloaded_rows(found),
            "",
            "A checkpoint that also takes images or audio (`...ForConditionalGeneration`) runs",
            "the text model inside, and what is said of that model holds. Gemma 3 and 4 need",
            "`--language-model-only`, since tokens of an image attend in both directions. With",
            "M-RoPE (Qwen-VL and others) text works; a request with an image, video or audio is",
            "a 400. Tests compare the text of Qwen2.5-VL, Qwen3-VL, Gemma 3 and Gemma 4.",
            "",
            "All architectures:",
            "",
            "| architecture | | |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
