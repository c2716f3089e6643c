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


class KeyNorms:
    """A model's norms of queries and keys, whose weights ``move`` changes in place.

    Loaders must find the weights of the checkpoint: one may bring a single tensor, or some elements
    of it, and keep the rest. So ``restore`` comes before a load and ``move`` after it.
    """

    def __init__(self, model: nn.Module, config: Any) -> None:
        """Find the norms of every attention block.

        Args:
            model: its weights are loaded.
            config: the text model's configuration.
        """
        names = AFTER_ROTATION.get(getattr(config, "model_type", ""))
        # Parameters: vLLM's reload puts others into the modules until it has filled these.
        self._weights: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._loaded: list[tuple[nn.Parameter, torch.Tensor]] = []
        if names is None:
            return
        for block in model.modules():
            of_queries, of_keys = (getattr(block, name, None) for name in names)
            if of_queries is not None and of_keys is not None:
                self._weights.append((of_queries.weight, of_keys.weight))

    @torch.no_grad()
    def move(self) -> None:
        """Move the weights of keys to queries; no effect on weights that are moved."""
        if self._loaded:
            return
        for queries, keys in self._weights:
            self._loaded += [(queries, queries.clone()), (keys, keys.clone())]
            queries.mul_(keys)
            keys.fill_(1)

    @torch.no_grad()
    def restore(self) -> None:
        """Write the weights as they were loaded; no effect on weights that are not moved."""
        for weight, loaded in self._loaded:
            weight.copy_(loaded)
        self._loaded = []
