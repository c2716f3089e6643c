# SPDX-License-Identifier: Apache-2.0
"""How a model that vLLM runs by transformers' classes rotates its keys: the model itself is asked.

transformers' modules do not say which channels of a head they pair up, how many they rotate, or
whether they do something to a key afterwards. So the loaded model reads one token at a few
positions, with something in place of its attention that notes queries and keys. A policy runs only
where those of a position are those of position 0, turned by the frequencies of the model's own
rotary module: in every layer, for every head, in one of the two layouts that are known.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_pp_group
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.interfaces import supports_multimodal
from vllm.model_executor.models.utils import extract_layer_index
from vllm.transformers_utils.config import iter_rope_parameters

from vllm_cascade.models.architectures import frequencies
from vllm_cascade.models.rotary import Rotary, find_rotaries, rotate
from vllm_cascade.policies.settings import KVPolicyError

POSITIONS = (0, 1, 7, 93, 700)
TOLERANCES = {torch.float32: 2e-3}
ROUGH = 3e-2
"""Largest error beside the largest number of a key, in fp32 and in types of 16 bits: what rounding
gives is far below, and a wrong layout, or a norm after the rotation, far above."""

BY_TRANSFORMERS = "vllm.model_executor.models.transformers.base"
Noted = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Queries and keys by layer, ``[positions, heads, head size]``."""


def rotaries_of(
    model: nn.Module, layers: dict[str, Attention], config: Any
) -> dict[str, Rotary | None]:
    """The rotation of every attention layer; None where it uses ALiBi, or no positions at all.

    Where modules are transformers' all ranks have to call this together: the model is run.

    Args:
        config: the text model's.

    Raises:
        KVPolicyError: a layer whose keys cannot be moved, or in a way that is not known.
    """
    if not runs_transformers(model):
        return find_rotaries(model, layers, config)
    if any(rope.get("rope_type") == "longrope" for rope in iter_rope_parameters(config)):
        raise KVPolicyError(
            "kv_policy: transformers changes LongRoPE's frequencies with the length of a step, so "
            "cached keys cannot be moved to new positions; use --kv-policy full for this model"
        )
    noted = ask(model, layers)
    return {
        name: rotation(name, *noted[name], frequencies(model, config, extract_layer_index(name)))
        for name in layers
    }


def runs_transformers(model: nn.Module) -> bool:
    """Whether vLLM has a text model's layers from transformers."""
    if supports_multimodal(model):
        return False
    return any(kind.__module__ == BY_TRANSFORMERS for kind in type(model).__mro__)


def rotation(
    name: str, queries: torch.Tensor, keys: torch.Tensor, inv_freq: torch.Tensor | None
) -> Rotary | None:
    """What turns rows at position 0 into those at the others of ``POSITIONS``; None: nothing.

    Raises:
        KVPolicyError: neither layout does.
    """
    both = (queries, keys)
    if all(same(rows, rows[:1].float().expand_as(rows)) for rows in both):
        return None
    for is_neox in (True, False) if inv_freq is not None else ():
        rotary = Rotary(inv_freq, is_neox)
        if 2 * len(inv_freq) <= keys.shape[-1] and all(same(x, turned(x, rotary)) for x in both):
            return rotary
    raise KVPolicyError(
        f"kv_policy: the keys of {name} are not what the frequencies of the model's rotary module "
        "make of them (other frequencies or channels, or normalised after they were rotated), so "
        "cached ones cannot be moved to new positions; use --kv-policy full for this model"
    )


def turned(rows: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """fp32 rows of position 0 where the others are."""
    angle = torch.tensor(POSITIONS)[:, None].double() * rotary.inv_freq.double()
    cos_sin = torch.stack([angle.cos(), angle.sin()], dim=1).float()
    return rotate(rows[:1].float().expand_as(rows), cos_sin[:, None], rotary.is_neox)


def same(rows: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether rows that are not zero are these, up to rounding."""
    largest = rows.float().abs().max().item()
    error = (rows.float() - expected).abs().max().item()
    return 0 < largest < float("inf") and error <= TOLERANCES.get(rows.dtype, ROUGH) * largest


@contextmanager
def noting(layers: dict[str, Attention], noted: Noted) -> Iterator[None]:
    """Layers note what they are given, and find nothing."""

    def replace(name: str, layer: Attention) -> None:
        def forward(query: torch.Tensor, key: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            rows = (x.detach().unflatten(-1, (-1, layer.head_size)).cpu() for x in (query, key))
            noted[name] = tuple(rows)
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
def ask(model: Any, layers: dict[str, Attention]) -> Noted:
    """What every layer is given for the same input at ``POSITIONS``."""
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
