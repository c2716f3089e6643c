# SPDX-License-Identifier: Apache-2.0
"""Chooses a layer's implementation on the CPU: the C++ library or plain PyTorch.

Both compute the same. C++ is the default. PyTorch runs layers that the library does not support,
and machines without a compiler. ``VLLM_CASCADE_CPU`` overrides the choice: ``pytorch`` never uses
the library, ``native`` raises an error if the library cannot run a layer.
"""

import os
from collections.abc import Sequence
from functools import lru_cache

from vllm_cascade.attention.cpu import native
from vllm_cascade.attention.evicted import Evicted
from vllm_cascade.attention.layer import LayerConfig, NewTokens
from vllm_cascade.attention.torch import strides as stride_path
from vllm_cascade.attention.torch import tokens as token_path
from vllm_cascade.attention.torch.drafts import Journal
from vllm_cascade.cache.layout import Pages
from vllm_cascade.kernels.cpp.build import BuildError, cache_folder
from vllm_cascade.kernels.cpp.library import Library, load
from vllm_cascade.log import logger
from vllm_cascade.policies.schedule import Schedule
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.step.inputs import Singles, Stride, Undone

SWITCH = "VLLM_CASCADE_CPU"
CHOICES = ("native", "pytorch")


class PyTorchPath:
    """The PyTorch reference, which needs no compiler.

    Methods read the rows of their tokens from ``new`` and write ``new.output``.
    """

    def __init__(self, layer: LayerConfig, pages: Pages) -> None:
        self._layer = layer
        self._pages = pages
        self._journal: Journal | None = None

    def keep_drafts(self, journal: Journal) -> None:
        """Save in ``journal`` what draft tokens change."""
        self._journal = journal

    def undo(self, undone: Undone) -> None:
        """Undo rejected drafts."""
        assert self._journal is not None
        self._journal.undo(undone)

    def tokens(self, waves: Sequence[Singles], new: NewTokens) -> None:
        """Run one token of many requests, and wave after wave the tokens that follow it."""
        for singles in waves:
            places = singles.places
            attended = token_path.attend_and_insert(
                self._layer, self._pages, singles, *new.at(places), self._journal
            )
            new.output[places] = attended.to(new.output.dtype)

    def stride(self, stride: Stride, new: NewTokens, evicted: Evicted | None = None) -> None:
        """Run several tokens of one request; ``evicted`` receives the evicted units."""
        attended = stride_path.attend_and_insert(
            self._layer, self._pages, stride, *new.at(stride.rows), evicted
        )
        new.output[stride.rows] = attended.to(new.output.dtype)


Path = PyTorchPath | native.NativePath
"""Attention of one layer, which also updates its pages."""


def choose(layer: LayerConfig, pages: Pages, num_heads: int, schedule: Schedule) -> Path:
    """Choose the implementation of a layer with ``num_heads`` query heads.

    The first call in a process, at engine start, compiles the library.

    Raises:
        KVPolicyError: ``VLLM_CASCADE_CPU`` has an unknown value, or is ``native`` and the library
            cannot run the layer.
    """
    wanted = os.environ.get(SWITCH)
    if wanted not in (None, *CHOICES):
        raise KVPolicyError(f"{SWITCH}={wanted}: set it to {' or '.join(CHOICES)}, or not at all")
    if wanted == "pytorch":
        return PyTorchPath(layer, pages)
    library, reason = _library()
    if library is not None:
        reason = native.refusal(layer, pages, num_heads, schedule, library)
        if reason is None:
            return native.NativePath(library, layer, pages, num_heads, schedule)
    if wanted == "native":
        raise KVPolicyError(f"{SWITCH}=native cannot be: {reason}; unset it to run in PyTorch")
    _say_once(reason)
    return PyTorchPath(layer, pages)


@lru_cache(maxsize=1)
def _library() -> tuple[Library | None, str]:
    """The library, or None with the reason; loaded once per process."""
    try:
        library = load()
        logger.info("CPU attention runs in C++ (%s)", library.path)
        if cache_folder() not in library.path.parents:
            logger.warning(
                "%s cannot be used (read-only, or mounted with noexec), so the compiled library "
                "is kept in %s for as long as that lasts; set VLLM_CACHE_ROOT to a folder that can "
                "be written and whose files may be executed",
                cache_folder(),
                library.path.parent,
            )
        return library, ""
    except BuildError as error:
        return None, str(error)


@lru_cache(maxsize=8)
def _say_once(reason: str) -> None:
    logger.warning("CPU attention runs in PyTorch, several times slower than in C++: %s", reason)
