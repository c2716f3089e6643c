# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's kvpress on transformers.

A press bounds the cache once, after the prompt, which is read with full attention. While it
decodes, ``DecodingPress`` bounds it again and again; only a press that scores single tokens can be
used there. Positions are as in kvpress' own pipeline: a token keeps the one that it has in the
text, and only ``KeyRerotationPress`` closes the gaps.
"""

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import kvpress
import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.running.peers.process import Task
from benchmarks.running.peers.questions import Held, Program, removed_share


def load(task: Task) -> Program:
    """The task's model, with the press that its settings name (see ``KVPress``)."""
    torch.set_num_threads(task.threads)
    return KVPress(task.model, **task.settings)


class KVPress(Program):
    """A model, and a press over it.

    Args:
        press: name of a class of kvpress; None: full attention, transformers alone.
        options: its arguments.
        rerotated: close the gaps between positions after the prompt.
        decoding: bound the cache after the prompt, too: after every ``interval`` tokens, ``kept``
            stay.
        decoding_options: the press's other arguments there.
        step: tokens read at a time after the prompt, where more than one is known.
        attention: transformers' implementation; a press that needs the weights needs ``eager``.
    """

    def __init__(
        self,
        model: str,
        press: str | None = None,
        options: dict[str, Any] | None = None,
        kept: int = 0,
        interval: int = 0,
        step: int = 1,
        rerotated: bool = False,
        decoding: bool = False,
        decoding_options: dict[str, Any] | None = None,
        attention: str = "sdpa",
    ) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16, attn_implementation=attention
        ).eval()
        self._kept, self._interval, self._step = kept, interval, step
        self._prompt_press = self._decoding_press = None
        if press is not None:
            made = getattr(kvpress, press)
            self._prompt_press = made(**(options or {}))
            if rerotated:
                self._prompt_press = kvpress.KeyRerotationPress(self._prompt_press)
            if decoding:
                chosen = made(**{**(options or {}), **(decoding_options or {})})
                self._decoding_press = kvpress.DecodingPress(chosen, target_size=kept)
        self._rerotated = rerotated
        if not self._decoding_press:
            self.positions = self._model.config.max_position_embeddings
        ends = self._model.generation_config.eos_token_id
        self.stops = frozenset(ends if isinstance(ends, list) else [ends])
        self._most = Held(0, 0)
        self._decoding = ExitStack()
        self.begin()

    def begin(self) -> None:
        self._decoding.close()
        self._cache, self._position, self._reading = DynamicCache(), 0, False

    def read(self, token_ids: Sequence[int], every: bool) -> np.ndarray:
        if not self._reading:
            return self._prompt(token_ids, every)
        step = self._pace(len(token_ids))
        parts = [token_ids[at : at + step] for at in range(0, len(token_ids), step)]
        logits = [self._forward(part, every) for part in parts]
        return np.concatenate(logits) if every else logits[-1]

    def _pace(self, num_tokens: int) -> int:
        """Tokens to read at a time; the press counts times, not tokens."""
        if self._decoding_press is None:
            return num_tokens
        step = min(self._step, num_tokens)
        self._decoding_press.compression_interval = -(-self._interval // step)
        return step

    def held(self) -> Held:
        return self._most

    def _prompt(self, token_ids: Sequence[int], every: bool) -> np.ndarray:
        press = self._prompt_press
        if press is not None:
            press.compression_ratio = removed_share(len(token_ids), self._kept)
        with press(self._model) if press else nullcontext():
            logits = self._forward(token_ids, every)
        length = self._cache.get_seq_length()
        expected = min(len(token_ids), self._kept) if press else len(token_ids)
        assert length == expected, f"{length} tokens are left of {len(token_ids)}, not {expected}"
        if self._rerotated:
            self._position = length
        if self._decoding_press:
            self._decoding.enter_context(self._decoding_press(self._model))
        self._reading = True
        return logits

    @torch.inference_mode()
    def _forward(self, token_ids: Sequence[int], every: bool) -> np.ndarray:
        count, before = len(token_ids), self._cache.get_seq_length()
        positions = torch.arange(self._position, self._position + count)[None]
        output = self._model(
            input_ids=torch.tensor([list(token_ids)]),
            past_key_values=self._cache,
            position_ids=positions,
            logits_to_keep=0 if every else 1,
        )
        self._position += count
        self._note(before + count)
        return output.logits[0].float().numpy()

    def _note(self, in_a_layer: int) -> None:
        """One layer held all tokens; those before it were bounded as soon as they had been read."""
        stored = [layer.keys.nbytes + layer.values.nbytes for layer in self._cache.layers]
        keys = self._cache.layers[-1].keys
        whole = in_a_layer * (stored[-1] // keys.shape[2])
        found = sum(stored[:-1]) + whole
        self._most = Held(max(self._most.tokens, in_a_layer), max(self._most.bytes, found))
