# SPDX-License-Identifier: Apache-2.0
"""What is kept of streams that an engine reads in groups, with a fake engine."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.inputs.texts import Stream
from benchmarks.running import scoring, stream
from benchmarks.running.engines import EngineSettings
from benchmarks.running.parts import Parts

A, B, C = (Stream(f"text {n}", list(range(n, n + 50)), np.ones(49, bool)) for n in range(3))
ENGINE = EngineSettings(policy={"name": "sink", "budget": 16})


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the streams that a fake engine has read, by group; a stream takes it 10 s."""
    read: list[str] = []

    def fake(llm: Any, job: scoring.Job, group: Sequence[Stream]) -> list[scoring.Reading]:
        read.append(" ".join(one.name[-1] for one in group))
        num, counted = len(group), {"evicted_tokens": 34 * len(group)}
        first = scoring.Reading(np.ones(49), 10.0 * num, counted, 3 * num)
        return [first, *(scoring.Reading(np.ones(49)) for _ in group[1:])]

    monkeypatch.setattr(scoring, "_read", fake)
    monkeypatch.setattr(stream, "prepare", lambda *_: None)
    return read


def scored(folder: Path, streams: tuple[Stream, ...], group: int) -> scoring.Scored:
    job = scoring.Job("sink", ENGINE, streams, group=group)
    job = replace(job, arm=Parts(folder).arm(job.label, job.determines()))
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=99))
    llm: Any = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))
    return scoring.run_on(llm, job)


@pytest.mark.parametrize(
    ("streams", "group", "read"),
    [
        ((A, B), 2, []),
        ((A,), 1, ["0"]),
        ((B,), 1, ["1"]),
        ((B, A), 2, ["1 0"]),
        ((A, B, C), 2, ["2"]),
        ((A, B, C), 3, ["0 1 2"]),
        ((C, C), 2, ["2 2"]),
    ],
)
def test_streams_of_a_group_are_kept_together(
    tmp_path: Path, groups: list[str], streams: tuple[Stream, ...], group: int, read: list[str]
) -> None:
    """Their time and counters are those of all of them."""
    scored(tmp_path, (A, B), 2)
    groups.clear()
    for again in (read, []):
        found, num = scored(tmp_path, streams, group), len(streams)
        assert groups == again
        assert found.counters == {"evicted_tokens": 34 * num}
        assert found.tokens_per_second == 50 * num / (10.0 * num)
        assert found.pages_peak == 3 * min(group, num)
        groups.clear()


def test_a_group_that_was_cut_off_is_read_again(tmp_path: Path, groups: list[str]) -> None:
    scored(tmp_path, (A, B), 2)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-4])
    found = scored(tmp_path, (A, B), 2)
    assert groups == ["0 1", "0 1"] and found.seconds == 20
