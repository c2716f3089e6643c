# SPDX-License-Identifier: Apache-2.0
"""Nothing that a step sends to a GPU waits for it. No GPU is at hand, so calls are looked at."""

import ast
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from vllm_cascade.cache.transfer import sent
from vllm_cascade.step.positions import CachePositions

PACKAGE = ROOT / "vllm_cascade"
STEPS = [
    *sorted((PACKAGE / "attention" / "cuda").glob("*.py")),
    *sorted((PACKAGE / "step").glob("*.py")),
    PACKAGE / "cache" / "transfer.py",
]
COPIES = {"to", "copy_", "cuda"}


def waiting(source: str) -> list[str]:
    """Copies that may block, as the code has them: to a device, and not ``non_blocking``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr not in COPIES:
            continue
        given = " ".join(ast.unparse(argument) for argument in node.args)
        to_a_device = node.func.attr != "to" or "device" in given
        if to_a_device and not any(word.arg == "non_blocking" for word in node.keywords):
            found.append(ast.unparse(node))
    return found


def test_what_would_wait_is_found() -> None:
    source = "a.to(device)\nb.copy_(c)\nd.to(x.device, non_blocking=True)\ne.to(torch.int32)"
    assert waiting(source) == ["a.to(device)", "b.copy_(c)"]


@pytest.mark.parametrize("path", STEPS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_copy_of_a_step_waits(path: Path) -> None:
    allowed = {
        # a model's slopes, once
        "slopes.to(device)",
        # units of policies whose strides run in PyTorch, into the host's memory
        "place.to(self._rows.device)",
        "gone.rows[:, last].to(self._rows.device)",
        # what ranks have exchanged, from the device to itself
        "values.copy_(over_ranks(values, reduction))",
        "found.copy_(exchange(reach, sums))",
    }
    assert set(waiting(path.read_text())) <= allowed


def test_a_gpu_is_sent_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    tensor = torch.arange(3)

    def pinned(self: torch.Tensor) -> torch.Tensor:
        calls.append("pinned")
        return self

    def to(self: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        calls.append((device.type, non_blocking))
        return self

    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(torch.Tensor, "to", to)
    sent(tensor, torch.device("cuda"))
    assert calls == ["pinned", ("cuda", True)]


def test_where_the_host_is_the_device_nothing_is_copied() -> None:
    tensor = torch.arange(3)
    assert sent(tensor, torch.device("cpu")) is tensor
    positions = CachePositions(5, torch.device("cpu"))
    positions.fill(tensor)
    assert positions.buffer.tolist() == [0, 1, 2, 0, 0]
