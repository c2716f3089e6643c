# SPDX-License-Identifier: Apache-2.0
"""Checks a policy's kernels on the user's own device, and keeps the verdict.

A verdict is a file in vLLM's cache folder. It holds for one device, driver, PyTorch, Triton and
version of this package, the shape of a model's layers, one policy's settings and a number of
tensor-parallel ranks.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.transformers_utils.config import iter_rope_parameters

from vllm_cascade.attention.selfcheck import Check, Mismatch, Row
from vllm_cascade.attention.selfcheck_layer import LayerShape
from vllm_cascade.cache.quantised import CODES
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.engine.devices import Device
from vllm_cascade.kernels.cpp.build import cache_folder
from vllm_cascade.log import logger
from vllm_cascade.models.rotary import Rotary
from vllm_cascade.policies.arguments import CHECK, FLAGS
from vllm_cascade.policies.policy import Policy
from vllm_cascade.policies.registry import validated
from vllm_cascade.policies.settings import Given, KVPolicyError, Misfit
from vllm_cascade.sessions.files import replacing
from vllm_cascade.step.drafts import most_drafts

MOST_CHECKED = 2048
"""Largest budget, and longest kept prompt, in tokens, that is checked."""


def shapes_of_layers(
    layers: Mapping[str, Any],
    specs: Mapping[str, Any],
    rotaries: Mapping[str, Rotary | None],
    dtype: torch.dtype,
    block_size: int,
) -> tuple[LayerShape, ...]:
    """The different shapes of a loaded model's layers on this rank.

    Args:
        layers: the model's attention layers by name, each with a ``KVPolicyImpl``.
        specs: caches by layer name; other kinds than ``KVPolicySpec`` are left out.
        rotaries: rotations by layer name.
        dtype: of the model's rows, which caches may quantise.
        block_size: tokens of a page.
    """
    found: dict[LayerShape, None] = {}
    for name, spec in specs.items():
        if not isinstance(spec, KVPolicySpec):
            continue
        impl, rotary = layers[name].impl, rotaries[name]
        shape = LayerShape(
            num_heads=impl.num_heads,
            num_kv_heads=impl.num_kv_heads,
            head_size=impl.head_size,
            dtype=dtype,
            block_size=block_size,
            rotary_dim=0 if rotary is None else 2 * len(rotary.inv_freq),
            is_neox=rotary is None or rotary.is_neox,
            slopes=None if impl.alibi_slopes is None else tuple(impl.alibi_slopes.tolist()),
            softcap=impl.softcap,
            sinks=impl.sinks is not None,
            window=spec.window,
            chunked=spec.chunked,
            latent=impl.latent,
            cache_dtype=impl.kv_cache_dtype if impl.kv_cache_dtype in CODES else "auto",
        )
        found[shape] = None
    return tuple(found)


def shape_of(config: VllmConfig) -> LayerShape:
    """The shape of a full-attention layer on one rank, from the model's configuration."""
    model, parallel = config.model_config, config.parallel_config
    heads = model.get_num_attention_heads(parallel)
    hf = model.hf_text_config
    slopes = tuple(2.0 ** (-8 * (i + 1) / heads) for i in range(heads))
    ropes = [vars(hf), *iter_rope_parameters(hf)]
    partial = next(filter(None, (rope.get("partial_rotary_factor") for rope in ropes)), 1.0)
    head_size = model.get_head_size()
    turning = int(head_size * partial) // 2 * 2
    cache_dtype = config.cache_config.cache_dtype
    return LayerShape(
        num_heads=heads,
        num_kv_heads=model.get_num_kv_heads(parallel),
        head_size=head_size,
        dtype=model.dtype,
        block_size=config.cache_config.block_size,
        rotary_dim=hf.qk_rope_head_dim if model.use_mla else turning,
        is_neox=not model.use_mla,
        slopes=slopes if model.uses_alibi else None,
        softcap=float(getattr(hf, "attn_logit_softcapping", None) or 0.0),
        sinks=hf.model_type == "gpt_oss",
        latent=hf.kv_lora_rank if model.use_mla else None,
        cache_dtype=cache_dtype if cache_dtype in CODES else "auto",
    )


def shapes_of(config: VllmConfig) -> tuple[LayerShape, ...]:
    """The shapes that a model's layers may have, where only its configuration is known.

    A configuration does not say how rotated channels pair, so both ways are among them.
    """
    shape, hf = shape_of(config), vars(config.model_config.hf_text_config)
    window, last = hf.get("sliding_window"), hf.get("max_position_embeddings")
    kinds = hf.get("layer_types") or ("sliding_attention",)
    shapes = [shape]
    if shape.rotary is not None and shape.is_neox:
        shapes.append(replace(shape, is_neox=False))
    if window and "sliding_attention" in kinds and not (last is not None and window >= last):
        shapes += [replace(one, window=window) for one in shapes]
    return tuple(shapes)


def small(policy: Policy) -> Policy:
    """The policy with the largest budget that is checked; a smaller one stays as it is.

    Kernels take any number of cached tokens, and PyTorch's time grows with the square of it.
    """
    if max(policy.budget, policy.keep_prompt) <= MOST_CHECKED:
        return policy
    settings = Given({"name": policy.name, **policy.model_dump()})
    settings["keep_prompt"] = min(policy.keep_prompt, MOST_CHECKED // policy.unit * policy.unit)
    step = policy.budget_step(settings)
    most = min(policy.budget, MOST_CHECKED)
    for budget in range(most // step * step, 0, -step):
        with suppress(Misfit, KVPolicyError):
            return validated({**settings, "budget": budget}, settings)
    return policy


def certify(
    policy: Policy,
    shapes: Sequence[LayerShape],
    entry: Device,
    device: torch.device,
    mode: str = "once",
    drafts: int = 0,
    num_ranks: int = 1,
) -> list[Row]:
    """Compare the kernels that a policy uses on this device with PyTorch.

    Args:
        shapes: of the model's kinds of layers. Each has a verdict of its own.
        entry: the device's entry in ``DEVICES``.
        mode: ``off``; ``once``: unless a verdict is kept; ``always``.
        drafts: most drafts of a request in a step (speculative decoding).
        num_ranks: tensor-parallel ranks. None waits for another.

    Returns:
        The comparisons; none where nothing was run.

    Raises:
        KVPolicyError: a kernel differs; names it, the shape, the error and where to report.
    """
    how = drafts, num_ranks
    files = {shape: _verdict_file(policy, shape, entry, *how) for shape in shapes}
    left = [one for one in shapes if mode == "always" or not _is_kept(files[one])]
    if mode == "off" or not left:
        return []
    checked, begin = small(policy), time.monotonic()
    logger.info(
        "KV policy %s: checking its kernels on this device (--kv-policy-check), with a budget of "
        "%d tokens, for layers of %s",
        *(policy.name, checked.budget, "; ".join(map(LayerShape.label, left))),
    )
    rows: dict[LayerShape, list[Row]] = {}
    issue = f"Please report this message with {_facts(entry)} as an issue of vllm-cascade; "
    try:
        backend, repeats = resolve_name(entry.backend), entry.check_repeats
        for shape in left:
            rows[shape] = Check(checked, shape, backend, device, repeats, *how).run()
    except Mismatch as error:
        raise KVPolicyError(
            f"the kernels of this device do not agree with PyTorch, so the engine does not start: "
            f"{error}. {issue}--kv-policy full runs stock vLLM"
        ) from None
    except KVPolicyError:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise KVPolicyError(
            f"there is no memory to check the kernels of this device ({error}); free some, or set "
            f"{FLAGS.name(CHECK)} off"
        ) from error
    except Exception as error:  # a compiler's, a driver's
        raise KVPolicyError(
            f"the kernels of this device cannot be checked, so the engine does not start: "
            f"{type(error).__name__}: {error}. {issue}{FLAGS.name(CHECK)} off leaves the check "
            "out, and --kv-policy full runs stock vLLM"
        ) from error
    seconds = time.monotonic() - begin
    all_rows = [row for found in rows.values() for row in found]
    logger.info(
        "KV policy %s: checked on this device in %.0f s, %d comparisons with PyTorch, largest "
        "relative error %.1e; %s keeps the verdict",
        *(policy.name, seconds, len(all_rows), max(row.error for row in all_rows)),
        files[left[0]].parent,
    )
    for shape, found in rows.items():
        _keep(files[shape], _facts(entry) | {"rows": [vars(row) for row in found]})
    return all_rows


def _is_kept(file: Path) -> bool:
    """Whether there is a verdict, in a folder that this user may read."""
    try:
        return file.is_file()
    except OSError:
        return False


def _keep(file: Path, verdict: dict[str, Any]) -> None:
    """Write a verdict. All ranks do, of one or more machines, and the last one's stays."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as partial:
            partial.write(json.dumps(verdict).encode())
    except OSError as error:
        logger.warning("The check's verdict cannot be kept (%s): the next start repeats it", error)


def certify_layers(
    config: VllmConfig,
    policy: Policy,
    shapes: Callable[[], Sequence[LayerShape]],
    entry: Device,
    device: torch.device,
) -> None:
    """The check at an engine's start, as ``--kv-policy-check`` says.

    Args:
        shapes: of the model's layers. All ranks call it, or none.

    Raises:
        KVPolicyError: see ``certify``.
    """
    assert isinstance(config.additional_config, dict), "the policy was read from it"
    mode = config.additional_config.get(CHECK) or entry.default_check
    if mode != "off":
        how = most_drafts(config), config.parallel_config.tensor_parallel_size
        certify(policy, shapes(), entry, device, mode, *how)


def _facts(entry: Device) -> dict[str, Any]:
    """The device and the versions that a verdict holds for."""
    facts: dict[str, Any] = {"device": entry.backend, "torch": torch.__version__, **entry.facts()}
    # The modules', since names of distributions depend on the build.
    for name in ("triton", "vllm", "vllm_cascade"):
        with suppress(ImportError):  # builds for CPUs may be without Triton
            facts[name] = import_module(name).__version__
    return facts


def _verdict_file(
    policy: Policy, shape: LayerShape, entry: Device, drafts: int, num_ranks: int
) -> Path:
    settings = policy.model_dump(exclude={"recall_memory"})  # depends on the host's free memory
    key = _facts(entry) | {
        "shape": repr(shape),
        "policy": [policy.name, settings],
        "drafts": drafts,
        "ranks": num_ranks,
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()
    return cache_folder() / "checks" / f"{digest[:24]}.json"
