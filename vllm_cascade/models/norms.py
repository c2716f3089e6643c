# SPDX-License-Identifier: Apache-2.0
"""Key norms that follow the rotation (HunYuan): their weights move to the norm of queries.

Such a key is ``w * R(k) / rms(k)``, with a learned weight ``w`` per channel. A rotation leaves the
RMS as it is, but does not commute with ``w``, so a cached key could not be rotated to another
position. In a product with a query, ``w`` can stand on either side, and queries are normalised
likewise: the weights of their norm become ``w_q * w`` and those of keys become 1.
"""

from typing import Any

import torch
from torch import nn

AFTER_ROTATION = {
    "hunyuan_v1_dense": ("query_layernorm", "key_layernorm"),
    "hunyuan_v1_moe": ("query_layernorm", "key_layernorm"),
}
"""Norms of queries and of keys in an attention block, by ``model_type``. Others are refused by
``probe.py``."""


def normalises_rotated(config: Any) -> bool:
    """Whether a norm follows the rotation in the model of a configuration."""
    return getattr(config, "model_type", "") in AFTER_ROTATION


@torch.no_grad()
def move_key_weights(model: nn.Module, config: Any) -> None:
    """Move them in every attention block; called after weights are loaded, and changes them.

    Args:
        config: the text model's configuration.
    """
    if not normalises_rotated(config):
        return
    names = AFTER_ROTATION[config.model_type]
    for block in model.modules():
        of_queries, of_keys = (getattr(block, name, None) for name in names)
        if of_queries is not None and of_keys is not None:
            of_queries.weight.mul_(of_keys.weight)
            of_keys.weight.fill_(1)
