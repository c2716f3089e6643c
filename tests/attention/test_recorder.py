# SPDX-License-Identifier: Apache-2.0
"""What a trace records, and what it forgets when drafts are rejected."""

from typing import Any

import pytest
import torch

from vllm_cascade.attention.recorder import Kept, Recorder, kept_tokens
from vllm_cascade.cache.layout import Pages


def test_only_a_requests_own_tokens_are_forgotten() -> None:
    """A request that ended had the same first page, and another layer and request have theirs."""
    recorder = Recorder()
    ended = [Kept("a", 7, end, []) for end in range(1, 31)]
    others = [Kept("b", 7, 25, []), Kept("a", 9, 25, [])]
    own = [Kept("a", 7, end, []) for end in range(1, 24)]
    recorder.kept = [*ended, *own[:21], *others, *own[21:]]
    recorder.forget("a", 7, 20)
    assert recorder.kept == [*ended, *own[:20], *others]


def test_tokens_are_numbered_on_the_pages_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch adds no CPU tensor of several numbers to one of a card."""
    devices: list[Any] = []
    plain = torch.arange

    def arange(*arguments: Any, device: Any = None) -> torch.Tensor:
        devices.append(device)
        return plain(*arguments, device=device)

    monkeypatch.setattr(torch, "arange", arange)
    words = {"rank": [1, -1, 0], "born": [0] * 3, "token": [8, 0, 2]}
    tensors = {name: torch.tensor([[word]], dtype=torch.int32) for name, word in words.items()}
    pages = Pages(kv=torch.zeros(1, 1, 6, 4), score=torch.zeros(1, 1, 3), **tensors)
    assert kept_tokens(pages, torch.tensor([0]), 6, 10) == [[2, 3, 8, 9]]
    assert devices and set(devices) == {torch.device("cpu")}
