# SPDX-License-Identifier: Apache-2.0
"""Layers that attend to the cache of an earlier one.

In Gemma 3n and Gemma 4 E2B and E4B the last layers have no keys of their own. Such a layer must see
the cache as its owner saw it. So the owner attends first, and its rows are inserted only when the
last of these layers has attended. A step then has at most one stride of a request
(``engine/scheduler.py``). In IQuest Loop Coder a layer attends to its own cache again in the second
run, without keys, and inserts then.
"""

from typing import Any, Self

import torch

from vllm_cascade.attention.impl import KVPolicyImpl
from vllm_cascade.attention.layer import NewTokens


class SharingImpl(KVPolicyImpl):
    """A layer whose cache others may share. A device implements the three steps of a wave.

    Attributes:
        owner: the layer whose cache this one attends to; itself if it attends twice; None: its own.
        last: name of the last layer that attends to this layer's cache; empty: no other does.
        waiting: rows of the step that are not inserted yet.
    """

    knows_sharing = True
    owner: Self | None = None
    last: str = ""
    waiting: NewTokens | None = None

    def attend_to(self, owner: Any) -> None:
        self.owner, owner.last = owner, self.name

    def run_shared(self, name: str, metadata: Any, new: NewTokens) -> bool:
        """Run a layer of a shared cache; False: it has a cache alone."""
        if self.owner is not None and (self.owner is not self or new.key is None):
            self._run_as_sharer(self.owner, name, metadata, new)
        elif self.last:
            self._run_as_owner(metadata, new)
        else:
            return False
        return True

    def end_step(self, metadata: Any) -> None:
        """Insert the rows that wait."""
        assert self.waiting is not None, f"{self.name} did not run"
        for wave in metadata.waves:
            self._end_wave(metadata, wave, self.waiting)
        self.waiting = None

    def _run_as_owner(self, metadata: Any, new: NewTokens) -> None:
        """Attend, and keep the step's rows until other layers have attended."""
        assert self.waiting is None, f"{self.last} did not run in the previous step"
        assert len(metadata.waves) <= 1, "a step has several strides of a request"
        for wave in metadata.waves:
            self._select_units(metadata, wave, new)
            self._only_attend(metadata, wave, new)
        # A compiled model may overwrite the rows; attending again overwrites the output.
        query, key, value = (rows.clone() for rows in new[:3])
        self.waiting = NewTokens(query, key, value, torch.empty_like(new.output))

    def _run_as_sharer(self, owner: Self, name: str, metadata: Any, new: NewTokens) -> None:
        """Attend to the owner's cache, and end its step if this is the last layer to do so."""
        waiting = owner.waiting
        assert waiting is not None, f"{owner.name} did not run before {name}"
        shared = new._replace(key=waiting.key, value=waiting.value)
        for wave in metadata.waves:
            self._only_attend(metadata, wave, shared)
        if name == owner.last:
            owner.end_step(metadata)

    def _select_units(self, metadata: Any, wave: Any, new: NewTokens) -> None:
        """Recall the units that the wave's queries select."""
        raise NotImplementedError

    def _only_attend(self, metadata: Any, wave: Any, new: NewTokens) -> None:
        """Write the wave's rows of ``new.output``, and leave the pages as they are."""
        raise NotImplementedError

    def _end_wave(self, metadata: Any, wave: Any, new: NewTokens) -> None:
        """Attend and insert, and store what is evicted; units have been selected."""
        raise NotImplementedError
