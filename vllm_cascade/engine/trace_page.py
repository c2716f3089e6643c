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

from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.registry import policy_of
from vllm_cascade.policies.schedule import compiled
from vllm_cascade.policies.settings import CONFIG_KEY

FRAMES = 100
TEMPLATE = Path(__file__).with_suffix(".html")
PLACE = "/*DATA*/null"
"""Where the template takes the data."""


def write_page(
    out: Path, text: str, model: str, settings: Sequence[dict[str, Any]], layer: int | None = None
) -> None:
    """Run a text under every policy and write the page.

    Args:
        settings: a policy each.
        layer: index among the model's attention layers; None: the middle one.

    Raises:
        KVPolicyError: settings are invalid.
        ValueError: the model has no such layer, or the text is shorter than a stride.
    """
    # One engine after the other: each takes the memory that the settings of vLLM give it.
    runs = [run(text, model, one, layer) for one in settings]
    document = {"model": model, "tokens": runs[0].pop("tokens"), "runs": runs}
    for other in runs[1:]:
        del other["tokens"]
    data = json.dumps(document, separators=(",", ":")).replace("<", "\\u003c")
    out.write_text(TEMPLATE.read_text("utf-8").replace(PLACE, data), "utf-8")


def run(text: str, model: str, settings: dict[str, Any], layer: int | None) -> dict[str, Any]:
    """What one policy does with a text.

    Returns:
        ``tokens``, the text's pieces; ``name``; ``regions``, their names; ``frames``, each
        ``[tokens seen, runs]`` with three numbers a run: the gap before it, its length and its
        region; ``logprobs``, of every token but the first.
    """
    llm = LLM(
        model,
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        additional_config={CONFIG_KEY: {"recall": 0, **settings, "trace": True}},
        max_model_len=len(text.encode()) + 16,  # a token has at least a byte
    )
    try:
        policy = policy_of(llm.llm_engine.vllm_config.additional_config)
        assert policy is not None
        ids, tokens = pieces(llm.get_tokenizer(), text)
        stride = policy.prefill_stride
        every = max(-(-len(ids) // FRAMES // stride), 1) * stride
        if len(ids) < every:
            raise ValueError(f"the text has {len(ids)} tokens, less than a stride of {stride}")
        llm.collective_rpc("kv_policy_trace", args=(every,))
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        kept = llm.collective_rpc("kv_policy_kept")[0]
    finally:
        llm.llm_engine.engine_core.shutdown()
    layers = list(dict.fromkeys(one["layer"] for one in kept))
    if layer is None:
        layer = len(layers) // 2
    if not 0 <= layer < len(layers):
        raise ValueError(f"--layer {layer}: the model has {len(layers)} attention layers")
    names: dict[str, int] = {}
    frames = [
        [one["end"], packed(one["tokens"][0], regions(policy, one), names)]
        for one in kept
        if one["layer"] == layers[layer]
    ]
    assert output.prompt_logprobs is not None, "they were asked for"
    told = [entry for entry in output.prompt_logprobs if entry is not None]  # not the first token
    entries = [next(iter(entry.values())).logprob for entry in told]
    title = " ".join([policy.name, *(f"{k}={v}" for k, v in settings.items() if k != "name")])
    return {
        "tokens": tokens,
        "name": title,
        "layer": layers[layer],
        "regions": list(names),
        "frames": frames,
        "logprobs": [round(value, 3) for value in entries],
    }


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
    """The region of every kept token. Recalled tokens stand behind the sinks."""
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
