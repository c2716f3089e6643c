# SPDX-License-Identifier: Apache-2.0
"""A plain sliding window: the baseline without attention sinks."""

from typing import Any, ClassVar

from pydantic import Field

from vllm_cascade.policies.sink import Sink


class Window(Sink):
    """A plain sliding window of ``budget`` tokens."""

    name: ClassVar[str] = "window"
    paper: ClassVar[str] = "baseline (window attention in https://arxiv.org/abs/2309.17453)"

    num_sinks: int = Field(0, ge=0, le=0, description="always 0: use `sink` to keep sinks")

    @classmethod
    def unit_defaults(cls, unit: int) -> dict[str, Any]:
        """No changes, because there are no sinks."""
        return {}
