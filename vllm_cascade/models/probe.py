# SPDX-License-Identifier: Apache-2.0
"""Probe for the key rotation of models that vLLM runs through transformers.

transformers' modules do not expose which channels of a head form pairs, how many channels are
rotated, or whether a key changes after the rotation. The probe therefore runs the loaded model on
the same input at several positions and records the queries and keys of every attention layer. A
policy is allowed only if each recorded row equals the row at position 0, rotated by the frequencies
of the model's rotary module. This must hold in every layer and head, in one of the two known
layouts.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_pp_group
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models.interfaces import supports_multimodal
from vllm.model_executor.models.utils import extract_layer_index
from vllm.transformers_utils.config import iter_rope_parameters

from vllm_cascade.models.architectures import frequencies, learns_positions
from vllm_cascade.models.norms import normalises_rotated
from vllm_cascade.models.rotary import Rotary, RotaryModule, find_rotaries, rotate
from vllm_cascade.policies.settings import KVPolicyError

POSITIONS = (0, 1, 7, 93, 700)
TOLERANCES = {torch.float32: 2e-3}
ROUGH = 3e-2
"""Largest allowed error relative to the largest recorded value, for 16-bit dtypes.

``TOLERANCES`` has the value for fp32. Rounding errors are far below these limits; a wrong layout or
a norm after the rotation gives errors far above.
"""

BY_TRANSFORMERS = "vllm.model_executor.models.transformers.base"
Noted = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Recorded queries and keys by layer name, each ``[positions, heads, head_size]``."""


def rotaries_of(
    model: nn.Module, layers: dict[str, Attention | MLAAttention], config: Any
) -> dict[str, Rotary | None]:
    """Find the rotation of every attention layer; None for ALiBi, NoPE and learned positions.

    For transformers models all ranks must call this together, because it runs the model.

    Args:
        config: The text model's configuration.

    Raises:
        KVPolicyError: If a layer's keys cannot be moved to new positions, or its rotation is
            unknown.
    """
    for name, module in model.named_modules():
        rotates = any(isinstance(part, RotaryModule) for part in module.modules())
        if rotates and isinstance(module, MambaBase):
            raise KVPolicyError(
                f"kv_policy: {name} is a recurrent layer that rotates what it adds to its state. A "
                "policy bounds positions, which a state cannot follow; use --kv-policy full for "
                "this model"
            )
    if learns_positions(config):
        return dict.fromkeys(layers)
    if not runs_transformers(model):
        return find_rotaries(model, layers, config)
    if any(rope.get("rope_type") == "longrope" for rope in iter_rope_parameters(config)):
        raise KVPolicyError(
            "kv_policy: transformers changes LongRoPE's frequencies with the length of a step, so "
            "cached keys cannot be moved to new positions; use --kv-policy full for this model"
        )
    noted = ask(model, layers)
    # Queries keep the weights of their norm, which only stand before a rotation in other models.
    first = 1 if normalises_rotated(config) else 0
    return {
        name: rotation(
            name, noted[name][first:], frequencies(model, config, extract_layer_index(name))
        )
        for name in layers
    }


def runs_transformers(model: nn.Module) -> bool:
    """Whether this is a text model whose layers come from transformers."""
    if supports_multimodal(model):
        return False
    return any(kind.__module__ == BY_TRANSFORMERS for kind in type(model).__mro__)


def rotation(
    name: str, both: Sequence[torch.Tensor], inv_freq: torch.Tensor | None
) -> Rotary | None:
    """Infer a layer's rotation from its queries and keys at ``POSITIONS``, or from keys alone.

    Returns:
        The rotation, or None if rows are the same at all positions.

    Raises:
        KVPolicyError: If the rows match neither layout.
    """
    if all(same(rows, rows[:1].float().expand_as(rows)) for rows in both):
        return None
    for is_neox in (True, False):
        if inv_freq is None:
            break
        rotary = Rotary(inv_freq, is_neox)
        if 2 * len(inv_freq) <= both[0].shape[-1] and all(same(x, turned(x, rotary)) for x in both):
            return rotary
    raise KVPolicyError(
        f"kv_policy: the keys of {name} are not what the frequencies of the model's rotary module "
        "make of them (other frequencies or channels, or normalised after they were rotated), so "
        "cached ones cannot be moved to new positions; use --kv-policy full for this model"
    )


def turned(rows: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotate the row at position 0 to each of ``POSITIONS``, in fp32."""
    angle = torch.tensor(POSITIONS)[:, None].double() * rotary.inv_freq.double()
    cos_sin = torch.stack([angle.cos(), angle.sin()], dim=1).float()
    return rotate(rows[:1].float().expand_as(rows), cos_sin[:, None], rotary.is_neox)


def same(rows: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether rows are nonzero, finite and equal to ``expected`` up to rounding."""
    largest = rows.float().abs().max().item()
    error = (rows.float() - expected).abs().max().item()
    return 0 < largest < float("inf") and error <= TOLERANCES.get(rows.dtype, ROUGH) * largest


@contextmanager
def noting(layers: Mapping[str, Attention | MLAAttention], noted: Noted) -> Iterator[None]:
    """Record each layer's queries and keys in ``noted``; attention outputs zeros meanwhile."""

    def replace(name: str, layer: Any) -> None:
        def forward(query: torch.Tensor, key: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            rows = (x.detach().unflatten(-1, (-1, layer.head_size)).cpu() for x in (query, key))
            noted[name] = next(rows), next(rows)
            return torch.zeros_like(query)

        layer.forward = forward

    for name, layer in layers.items():
        replace(name, layer)
    try:
        yield
    finally:
        for layer in layers.values():
            del layer.forward


@torch.inference_mode()
def ask(model: Any, layers: Mapping[str, Attention | MLAAttention]) -> Noted:
    """Run the model on the same input at each of ``POSITIONS`` and record queries and keys."""
    dtype = model.model_config.dtype
    device, num = model.device_config.device, len(POSITIONS)
    generator = torch.Generator().manual_seed(0)

    def same_rows(width: int) -> torch.Tensor:
        row = torch.randn(width, generator=generator)
        return row.to(device=device, dtype=dtype).expand(num, -1).contiguous()

    inputs: dict[str, Any] = {"input_ids": None, "intermediate_tensors": None}
    if get_pp_group().is_first_rank:
        inputs["inputs_embeds"] = same_rows(model.model_config.get_hidden_size())
    else:
        before = model.make_empty_intermediate_tensors(batch_size=num, dtype=dtype, device=device)
        for key, value in before.tensors.items():
            before.tensors[key] = same_rows(value.shape[-1])
        inputs["intermediate_tensors"] = before
    noted: Noted = {}
    with (
        noting(layers, noted),
        set_forward_context(None, model.vllm_config, num_tokens=num, skip_compiled=True),
    ):
        model.forward(positions=torch.tensor(POSITIONS, device=device), **inputs)
    return noted
