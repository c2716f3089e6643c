# SPDX-License-Identifier: Apache-2.0
"""``tools.compare`` reports every kind of result that differs, and its arms are runnable jobs."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tools.compare import arms
from tools.compare.differences import counters_of_one, differences


def found(**changed: Any) -> dict[str, Any]:
    kept = [{"layer": "layers.0", "first_page": 3, "end": 32, "tokens": [[0, 1, 5], [0, 2, 5]]}]
    return {
        "logprobs": [-1.5, -0.25, -3.0],
        "tokens": [7, 8],
        "cached": [0],
        "kept": kept,
        "pages": [[b"", b"one"], [b"two", b""]],
        "counters": {"evicted_tokens": 9, "steps": 2},
        **changed,
    }


def test_equal_results() -> None:
    assert differences(found(), found()) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"logprobs": [-1.5, math.nextafter(-0.25, 0), -3.0]},
            "log-probabilities: 1 of 3 differ, by at most 2.8e-17; the first is number 1",
        ),
        ({"logprobs": [-1.5]}, "log-probabilities: 3 and 1"),
        ({"tokens": [7, 9]}, "generated tokens: 1 of 2 differ; the first is number 1: 8 and 9"),
        ({"cached": [32]}, "requests' cached prompt tokens: 1 of 1 differ; the first is number 0: "
         "0 and 32"),
        (
            {"kept": [{**found()["kept"][0], "tokens": [[0, 1, 5], [0, 3, 5]]}]},
            "kept sets: 1 of 1 differ; the first is layers.0 after 32 tokens, in 2 tokens",
        ),
        ({"kept": []}, "kept sets: 1 and 0"),
        (
            {"pages": [[b"", b"one"], [b"other", b""]]},
            "pages: 1 of 4 differ; the first is number 2",
        ),
        ({"counters": {"evicted_tokens": 9, "steps": 3}}, "counter steps: 2 and 3"),
    ],
)  # fmt: skip
def test_different_results(changed: dict[str, Any], message: str) -> None:
    assert differences(found(), found(**changed)) == [message]


def test_a_counter_that_one_checkout_lacks_is_named_and_no_difference() -> None:
    ours, theirs = found(), found(counters={"evicted_tokens": 9})
    assert differences(ours, theirs) == []
    assert counters_of_one(ours, theirs) == {"steps"}


def test_an_arm_that_fails_in_both_checkouts_is_no_success() -> None:
    failed = {"error": "AssertionError\n"}
    assert differences(failed, failed) == [
        "fails in the first checkout: AssertionError",
        "fails in the second checkout: AssertionError",
    ]


def test_jobs(tmp_path: Path) -> None:
    """A child reads them as JSON; only the second and third request have policies of their own."""
    chosen = {name: arms.ARMS[name] for name in ("policies/own", "families/llama")}
    jobs = json.loads(json.dumps(arms.jobs_of(chosen, tmp_path)))
    (own,), rounds = jobs["policies/own"]["rounds"], jobs["families/llama"]["rounds"]
    assert [len(request["prompt"]) for request in own] == [700, 110, 301]
    assert [request["extra_args"] for request in own] == [
        None,
        {"kv_budget": 32},
        {"kv_policy": "sink", "kv_budget": 48},
    ]
    (first, _), (again, _) = rounds
    assert again["prompt"][: len(first["prompt"])] == first["prompt"] != again["prompt"]
    assert (Path(jobs["families/llama"]["engine"]["model"]) / "config.json").is_file()
