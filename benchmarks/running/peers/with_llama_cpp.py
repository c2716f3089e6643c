# SPDX-License-Identifier: Apache-2.0
"""llama.cpp and its context shift, through its C interface.

Its own programs shift while they generate: when the context is full, they keep the first ``keep``
tokens, drop the next ``discard`` (half of what is left, unless told otherwise) and move the rest
down, keys re-rotated. They refuse a prompt that is longer than the context, so the same two calls
are made here while a text is read.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.running.peers.process import Task
from benchmarks.running.peers.questions import Held, Program

BATCH = 512
"""Tokens a call, llama.cpp's default for what it computes at once."""
BYTES = 2
"""Of a cached number: llama.cpp's default type is float16."""


@llama_cpp.llama_log_callback
def _silent(_level: int, _text: bytes, _data: Any) -> None:
    """llama.cpp logs to the terminal unless it is given a function."""


def load(task: Task) -> Program:
    """The task's GGUF with a context of ``settings["context"]`` tokens.

    ``keep`` and ``discard`` (None: half) say how the context is shifted; without ``keep`` it is
    never shifted.
    """
    return LlamaCpp(task.gguf, task.threads, **task.settings)


class LlamaCpp(Program):
    """One model and one context."""

    def __init__(
        self,
        gguf: str,
        threads: int,
        context: int,
        keep: int | None = None,
        discard: int | None = None,
    ) -> None:
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(gguf.encode(), parameters)
        if not self._model:
            raise OSError(f"llama.cpp cannot load {gguf}")
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._words = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.stops = frozenset(
            word for word in range(self._words) if llama_cpp.llama_vocab_is_eog(vocabulary, word)
        )
        self._context = self._new_context(context, threads)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._size, self._keep, self._discard = context, keep, discard
        self._past, self._most = 0, 0
        self.positions = context if keep is None else None
        if keep is not None and not llama_cpp.llama_memory_can_shift(self._memory):
            raise RuntimeError("llama.cpp says that it cannot shift this model's context")

    def _new_context(self, size: int, threads: int) -> Any:
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = size
        parameters.n_batch = parameters.n_ubatch = BATCH
        parameters.n_threads = parameters.n_threads_batch = threads
        context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not context:
            raise MemoryError(f"llama.cpp cannot make a context of {size} tokens")
        return context

    def begin(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, False)
        self._past = 0

    def read(self, token_ids: Sequence[int], every: bool) -> np.ndarray:
        logits, done = [], 0
        while done < len(token_ids):
            if self._past == self._size:
                self._shift()
            count = min(len(token_ids) - done, self._size - self._past, BATCH)
            logits.append(self._decode(token_ids[done : done + count], every))
            done += count
        return np.concatenate(logits) if every else logits[-1]

    def held(self) -> Held:
        """What was in use; llama.cpp sets aside more, as it rounds a context up to 256 tokens."""
        layers = llama_cpp.llama_model_n_layer(self._model)
        heads = llama_cpp.llama_model_n_head_kv(self._model)
        size = llama_cpp.llama_model_n_embd(self._model)
        size //= llama_cpp.llama_model_n_head(self._model)
        return Held(self._most, self._most * layers * 2 * heads * size * BYTES)

    def _shift(self) -> None:
        """Make room as llama.cpp's server and its completion program do."""
        assert self._keep is not None, "more tokens than the context holds"
        keep, past = self._keep, self._past
        discard = (past - keep) // 2 if self._discard is None else self._discard
        removed = llama_cpp.llama_memory_seq_rm(self._memory, 0, keep, keep + discard)
        assert removed, "llama.cpp could not remove tokens"
        llama_cpp.llama_memory_seq_add(self._memory, 0, keep + discard, past, -discard)
        self._past -= discard

    def _decode(self, token_ids: Sequence[int], every: bool) -> np.ndarray:
        count = len(token_ids)
        batch = llama_cpp.llama_batch_init(count, 0, 1)
        try:
            batch.n_tokens = count
            for place, token in enumerate(token_ids):
                batch.token[place] = token
                batch.pos[place] = self._past + place
                batch.n_seq_id[place] = 1
                batch.seq_id[place][0] = 0
                batch.logits[place] = every or place == count - 1
            status = llama_cpp.llama_decode(self._context, batch)
        finally:
            llama_cpp.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode gave status {status}")
        self._past += count
        self._most = max(self._most, self._past)
        rows = count if every else 1
        logits = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, shape=(rows, self._words)).copy()
