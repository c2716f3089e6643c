# SPDX-License-Identifier: Apache-2.0
"""What recall costs: the arms, and a token's time."""

import json
from pathlib import Path
from statistics import mean

import pytest

from benchmarks.recall_cost import (
    PLAIN,
    PLAIN_READS,
    RECALL,
    STOCK,
    main,
    measure,
    of_period,
    parse_args,
    policies,
    settings,
)
from benchmarks.running.stepping import Step
from tests.conftest import MODEL
from vllm_cascade.policies.registry import resolve


def test_both_arms_attend_to_as_many_tokens() -> None:
    args = parse_args(["--attended", "512", "--recall", "8", "--stores", "0", "8192"])
    arms = {name: raw and resolve(raw) for name, raw in policies(args).items()}
    assert arms[STOCK] is None
    assert arms[PLAIN].capacity == arms[RECALL].capacity == 512 + 16
    assert (arms[RECALL].recalled, arms[RECALL].recall_store) == (128, 8192)


def test_pools_have_the_engines_dtype() -> None:
    sizes = []
    for dtype in ("bfloat16", "float32"):
        args = parse_args(["--model", str(MODEL), "--stores", "0", "--dtype", dtype])
        engine = settings(args, None)
        assert engine.dtype == dtype
        sizes.append(engine.memory_bytes)
    assert sizes[1] == 2 * sizes[0]


def test_a_token_is_the_mean_of_a_period() -> None:
    """One step of four is dear; one step in all was disturbed."""
    steps = [9.0, 1.0, 1.0, 1.0] * 3
    steps[5] = 100.0
    assert of_period(steps, 4) == [9.0, 1.0, 1.0, 1.0] and mean(of_period(steps, 4)) == 3.0
    assert of_period([2.0, 4.0], 16) == [2.0, 4.0]


def test_no_room(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--attended", "144"])
    assert "--attended has no room besides --recall units" in capsys.readouterr().err


class Reader:
    """Reads a prompt in chunks of 1,024 tokens; notes when it takes a step."""

    def __init__(self, name: str, order: list[str]) -> None:
        self.name, self.order, self.chunks, self.prompt = name, order, 0, [0]

    def add(self, prompt: list[int], output_len: int) -> None:
        self.prompt, self.chunks = prompt, -(-len(prompt) // 1024)

    @property
    def reading(self) -> bool:
        return self.chunks > 0

    def step(self) -> Step:
        self.chunks -= 1
        self.order.append(self.name)
        return Step(1.0, 0.5)

    def finish(self) -> None:
        assert self.chunks < 0


@pytest.mark.parametrize("num", [512, PLAIN_READS, PLAIN_READS + 1, 100_000])
def test_the_last_chunks_are_read_in_turn(num: int) -> None:
    """Without recall a policy reads the last tokens of a long prompt only."""
    args = parse_args(["--output-len", "17"])
    args.period = 16
    order: list[str] = []
    arms = {name: Reader(name, order) for name in (PLAIN, RECALL)}
    point = measure(arms, num, args)  # type: ignore[arg-type]
    assert arms[PLAIN].prompt == arms[RECALL].prompt[-PLAIN_READS:]
    assert len(arms[RECALL].prompt) == num
    chunks = [-(-min(num, most) // 1024) for most in (PLAIN_READS, num)]
    assert [order.count(name) - 16 for name in arms] == chunks
    alone = chunks[1] - chunks[0]
    assert order[:alone] == [RECALL] * alone
    rest = order[alone:]
    assert all({a, b} == {PLAIN, RECALL} for a, b in zip(rest[::2], rest[1::2], strict=True))
    assert all(len(ms) == min(4, chunks[0]) for ms in point["prompt"].values())


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    sizes = ["--attended", "128", "--recall", "2", "--output-len", "40", "--chunk", "256"]
    main(["--model", str(MODEL), *sizes, "--stores", "0", "256", "--out", str(out)])
    points = json.loads(out.read_text())["data"]["points"]
    assert [point["store"] for point in points] == [0, 256]
    assert points[1]["counters"]["stored_units"] >= 16
    assert {PLAIN, RECALL, STOCK} == set(points[1]["steps"])
