# SPDX-License-Identifier: Apache-2.0
"""Rows in fewer bits as an engine in this process writes them, for an oracle that judges each."""

import re
from typing import Any
from unittest.mock import patch

import torch

from tests.oracle.quantised import Stored
from vllm_cascade.attention.recorder import Recorder
from vllm_cascade.cache.layout import Pages


class StoredRows:
    """Copies, at every end of a stride, the codes and scales of tokens that it has not seen yet.

    Needs the policy setting ``trace: true`` and recording of every end.

    Args:
        tokens: of the one request that runs.
        dtype: of codes; bits where they have no numbers of their own.

    Attributes:
        layers: what was seen.
    """

    def __init__(self, llm: Any, tokens: int, dtype: torch.dtype = torch.uint8) -> None:
        config = llm.llm_engine.vllm_config
        model, parallel = config.model_config, config.parallel_config
        sizes = model.get_head_size(), None
        if model.use_mla:
            sizes = model.hf_text_config.qk_rope_head_dim, model.hf_text_config.kv_lora_rank
        heads = 1 if model.use_mla else model.get_num_kv_heads(parallel)
        self.layers = [
            Stored.none(heads, tokens, sizes[0], dtype, sizes[1])
            for _ in range(model.get_num_layers(parallel))
        ]

    def __enter__(self) -> "StoredRows":
        add = Recorder.add

        def add_and_copy(
            recorder: Recorder,
            layer: str,
            pages: Pages,
            blocks: torch.Tensor,
            num_slots: int,
            end: int,
        ) -> None:
            add(recorder, layer, pages, blocks, num_slots, end)
            (index,) = re.findall(r"layers\.(\d+)\.", layer)
            self._copy(self.layers[int(index)], pages, blocks, num_slots, end)

        self._patch = patch.object(Recorder, "add", add_and_copy)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()

    def _copy(
        self, stored: Stored, pages: Pages, blocks: torch.Tensor, num_slots: int, end: int
    ) -> None:
        """A head's slots are those of its set, or of the only one."""
        unit, num_units = pages.unit, num_slots // pages.unit
        rank, token = (
            words[blocks].transpose(0, 1).flatten(1)[:, :num_units]
            for words in (pages.rank, pages.token)
        )
        of_unit = torch.arange(unit)
        for head, there in enumerate(stored.there):
            head_set = head if len(rank) > 1 else 0
            units = (rank[head_set] >= 0).nonzero()
            slots = (units * unit + of_unit).flatten()
            tokens = (token[head_set][units] + of_unit).flatten()
            new = (tokens < end) & ~there[tokens.clamp_max(end - 1)]
            slots, tokens = slots[new], tokens[new]
            block, offset = blocks[slots // pages.block_size], slots % pages.block_size
            stored.codes[head, tokens] = pages.kv[block, head, offset].view(stored.codes.dtype)
            if pages.scale is not None:
                stored.scales[head, tokens] = pages.scale[block, head, offset]
            there[tokens] = True
