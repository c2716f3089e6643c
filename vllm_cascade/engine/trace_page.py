# SPDX-License-Identifier: Apache-2.0
"""Writes a page that shows which tokens of a text policies keep: ``vllm-cascade trace --html``.

A text runs through an engine for each policy, and one layer's kept tokens are recorded at about
``FRAMES`` stride ends. ``trace_page.html`` holds all of the page but the data.
"""

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.tokenizers import get_tokenizer

from vllm_cascade.cache.kinds import window_policy
from vllm_cascade.models.architectures import learns_positions
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.registry import policy_of
from vllm_cascade.policies.schedule import compiled
from vllm_cascade.policies.settings import CONFIG_KEY

FRAMES = 100
BATCH = 4096
"""Tokens of a step. vLLM's default shrinks with the text, and would shrink the default stride."""
TEMPLATE = Path(__file__).with_suffix(".html")
PLACE = "/*DATA*/null"
"""Where the template takes the data."""


def write_page(
    out: Path, text: str, model: str, settings: Sequence[dict[str, Any]], layer: int | None = None
) -> None:
    """Run a text under every policy and write the page.

    Args:
        settings: a policy each.
        layer: index among the model's attention layers; None: the middle one of those that run
            under the policy.

    Raises:
        KVPolicyError: settings are invalid.
        ValueError: the model has no such layer, or the text is shorter than a stride, or longer
            than learned positions allow.
    """
    ids, tokens = pieces(get_tokenizer(model), text)
    check_length(len(ids), model, settings)
    # One engine after the other: each takes the memory that the settings of vLLM give it.
    runs = [run(ids, model, one, layer) for one in settings]
    document = {"model": model, "tokens": tokens, "runs": runs}
    data = json.dumps(document, separators=(",", ":")).replace("<", "\\u003c")
    out.write_text(TEMPLATE.read_text("utf-8").replace(PLACE, data), "utf-8")


def _arguments(model: str, num_tokens: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments of an engine that runs a text of ``num_tokens`` tokens."""
    return {
        "model": model,
        "max_num_seqs": 1,
        "max_num_batched_tokens": BATCH,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "additional_config": {CONFIG_KEY: {"recall": 0, **settings, "trace": True}},
        "max_model_len": num_tokens + 1,  # vLLM samples at least one
    }


def check_length(num_tokens: int, model: str, settings: Sequence[dict[str, Any]]) -> None:
    """Check before the first engine starts that the text suits the model and the policies.

    Raises:
        KVPolicyError: a policy's settings do not fit the model.
        ValueError: the text is too short or too long.
    """
    native = EngineArgs(model).create_model_config()
    most = native.max_model_len - 1
    if learns_positions(native.hf_text_config) and num_tokens > most:
        raise ValueError(
            f"--text has {num_tokens} tokens, and this model's positions are learned, so a text "
            f"has at most {most}; shorten it"
        )
    for one in settings:
        config = EngineArgs(**_arguments(model, num_tokens, one)).create_engine_config()
        policy = policy_of(config.additional_config)
        assert policy is not None
        if num_tokens < policy.prefill_stride:
            raise ValueError(
                f"--text has {num_tokens} tokens, fewer than a stride of {policy.name}; give a "
                f"longer one, or set prefill_stride ({policy.prefill_stride}) to less"
            )


def run(ids: list[int], model: str, settings: dict[str, Any], layer: int | None) -> dict[str, Any]:
    """What one policy does with the tokens of a text.

    Returns:
        ``name``; ``layer``, ``regions`` and ``frames`` of ``frames_of``; ``logprobs``, of every
        token but the first.
    """
    llm = LLM(**_arguments(model, len(ids), settings))
    try:
        policy = policy_of(llm.llm_engine.vllm_config.additional_config)
        assert policy is not None
        stride = policy.prefill_stride
        every = -(-len(ids) // FRAMES // stride) * stride
        llm.collective_rpc("kv_policy_trace", args=(every,))
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        kept = llm.collective_rpc("kv_policy_kept")[0]
    finally:
        llm.llm_engine.engine_core.shutdown()
    assert output.prompt_logprobs is not None, "they were asked for"
    told = [entry for entry in output.prompt_logprobs if entry is not None]  # not the first token
    entries = [next(iter(entry.values())).logprob for entry in told]
    title = " ".join([policy.name, *(f"{k}={v}" for k, v in settings.items() if k != "name")])
    return {
        "name": title,
        **frames_of(policy, kept, layer),
        "logprobs": [round(value, 3) for value in entries],
    }


def frames_of(policy: Policy, kept: list[dict[str, Any]], layer: int | None) -> dict[str, Any]:
    """What one layer kept.

    Args:
        kept: what the worker's ``kv_policy_kept`` returned.
        layer: as ``write_page``.

    Returns:
        ``layer``, its name; ``regions``, their names; ``frames``, each ``[tokens seen, runs]`` with
        three numbers a run: the gap before it, its length and its region.

    Raises:
        ValueError: the model has no such layer.
    """
    windows = {one["layer"]: one["window"] for one in kept}
    layers = list(windows)
    if layer is None:
        # A model may have no layer without a window.
        layers = [name for name in layers if windows[name] is None] or layers
        layer = len(layers) // 2
    if not 0 <= layer < len(layers):
        raise ValueError(f"--layer {layer}: the model has {len(layers)} attention layers")
    names: dict[str, int] = {}
    frames = [
        [one["end"], packed(one["tokens"][0], regions(policy, one), names)]
        for one in kept
        if one["layer"] == layers[layer]
    ]
    return {"layer": layers[layer], "regions": list(names), "frames": frames}


def pieces(tokenizer: Any, text: str) -> tuple[list[int], list[str]]:
    """Ids of a text's tokens, and the part of the text that each stands for."""
    if not getattr(tokenizer, "is_fast", False):
        ids = tokenizer.encode(text)
        return ids, [tokenizer.decode([one]) for one in ids]
    found = tokenizer(text, return_offsets_mapping=True)
    begins = [begin for begin, _ in found["offset_mapping"]]
    ends = [*begins[1:], len(text)]
    return found["input_ids"], [text[a:b] for a, b in zip(begins, ends, strict=True)]


def regions(policy: Policy, kept: dict[str, Any]) -> list[str]:
    """The region of every kept token. Recalled tokens stand behind the sinks.

    Layers with windows or chunks have policies of their own, which recall nothing.
    """
    if kept["window"] is not None:
        policy = window_policy(policy, kept["window"], kept["chunked"])
    names = compiled(policy).regions(kept["end"])
    sinks = names.count("sink")
    recalled = len(kept["tokens"][0]) - len(names)
    return names[:sinks] + ["recalled"] * recalled + names[sinks:]


def packed(tokens: list[int], regions: list[str], numbers: dict[str, int]) -> list[int]:
    """Runs of neighbours with one region, three numbers each.

    Args:
        numbers: a number for every name so far; new names are added.
    """
    placed = sorted(zip(tokens, regions, strict=True))
    flat, seen = [], 0
    for (_, name), run in groupby(enumerate(placed), key=lambda e: (e[1][0] - e[0], e[1][1])):
        members = [token for _, (token, _) in run]
        flat += [members[0] - seen, len(members), numbers.setdefault(name, len(numbers))]
        seen = members[-1] + 1
    return flat
