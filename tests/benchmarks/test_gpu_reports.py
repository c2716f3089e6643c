# SPDX-License-Identifier: Apache-2.0
"""A card's plain JSON becomes a kept result."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reporting import gpu, results

ATTEND = {"heads": "8/8", "cached": 2048, "batch": 1, "ms": 0.5, "of_copy": 0.75, "over_sdpa": 1.5}
SKIPPED = {"heads": "8/8", "cached": 4096, "batch": 1, "skipped": "out of time"}
LAYER = {"heads": "32/8", "cached": 1024, "batch": 16, "scored": True}
LAYER |= {"attend_us": 22.56, "and_merge_us": 27.5, "and_insert_us": 32.0}
PREFILL = {
    "stride": 512, "tokens": 4096, "us_per_token": 2.0, "full_us_per_token": 0.5,
    "gather_ms": 0.03125, "stride_attention_ms": 0.25, "column_sums_ms": 0.125,
    "insertion_ms": 0.0625, "ms": 8.0,
}  # fmt: skip
CHECK: dict[str, Any] = {
    "checks": [
        {"check": "a", "error": None, "seconds": 1.0},
        {"check": "b", "error": "AssertionError: output", "seconds": 2.0},
        {"check": "c", "error": "AssertionError: output", "seconds": 3.0},
    ],
    "environment": {"gpu": "A card", "torch": "2", "time": "2026-11-25T00:00:00"},
    "seconds": 4.0,  # checks run beside each other
    "copy_gbps": 3000.0,
    "attend": [ATTEND, SKIPPED],
    "layer": [LAYER],
    "prefill": [PREFILL],
}


def test_a_kept_result(tmp_path: Path) -> None:
    (tmp_path / "gpu_check.json").write_text(json.dumps(CHECK))
    found = gpu.result(tmp_path, "0123456789ab")
    assert len(found["tables"]) == 4 and found["command"] == "python -m benchmarks.gpu_check"
    passed, decode, layers, prompts = (one["rows"] for one in found["tables"])
    assert [list(row) for row in passed] == [
        ["passed", "1", ""],
        ["failed", "2", "AssertionError: output"],
    ]
    assert [list(row) for row in decode] == [["8/8", "2,048", "1", "0.500", "75 %", "1.50x"]]
    assert [list(row) for row in layers] == [["32/8", "1,024", "16", "yes", "22.6", "27.5", "32.0"]]
    assert list(prompts[0]) == ["512", "4,096", "2.00", "0.50", "0.031", "0.250", "0.125", "0.062"]
    text = results.section(json.loads(results.as_text(found)))
    assert "A card; torch 2, vLLM not installed, commit 0123456789, 2026-11-25; 4 s." in text


def test_runs_of_some_kinds_are_kept_together(tmp_path: Path) -> None:
    """Each run has its own bandwidth; kinds that no run has get no table."""
    first = CHECK | {"attend": [], "layer": [], "prefill": []}
    second = CHECK | {"checks": [], "copy_gbps": 2000.0, "layer": [], "prefill": []}
    for name, one in (("", first), ("_attend", second)):
        (tmp_path / f"gpu_check{name}.json").write_text(json.dumps(one))
    found = gpu.result(tmp_path, "0123456789ab", "two commands")
    titles = [one["title"] for one in found["tables"]]
    assert titles == ["Kernels against their references", "Decode attention"]
    assert "2,000 GB/s" in found["tables"][1]["note"] and found["command"] == "two commands"


def test_a_kept_result_of_engines(tmp_path: Path) -> None:
    compared = {"what": "identity", "policy": "sink", "equal": True, "max_error": 2e-5}
    compared |= {"evicted": 1691, "reused": 208, "seconds": 55.5}
    failed = {"what": "latent", "policy": "deepseek-v2", "error": "ValueError: None. More; see log"}
    timed = {"what": "speed", "policy": "stock", "model": "8B", "context": 1024, "requests": 4}
    rows = [timed | {"output_tokens_per_s": 1234.5}, timed | {"first_token_s": 1.234}]
    checked = {"what": "check", "policy": "lazy", "comparisons": 19, "largest_error": 0.0078}
    checked |= {"check_s": 12.36}
    for name, some in (("", [compared, failed]), ("_first", [checked]), ("_speed", rows)):
        written = {"environment": CHECK["environment"] | {"vllm": "1"}, "rows": some}
        written["seconds"] = 20.5
        (tmp_path / f"gpu_engine{name}.json").write_text(json.dumps(written))
    found = gpu.result(tmp_path, "0123456789ab")
    engines, first, speed = ([list(row) for row in one["rows"]] for one in found["tables"])
    assert first == [["lazy", "19", "7.8e-03", "12"]]
    assert engines == [
        ["sink", "tiny Llama", "yes", "2.0e-05", "1,691", "208"],
        ["deepseek-v2", "two layers of the family", "no", "ValueError: None", "", ""],
    ]
    assert speed == [
        ["Llama 8B", "stock", "1,024", "", "4", "1,234"],
        ["Llama 8B", "stock", "1,024", "1.23", "4", ""],
    ]
    text = results.section(json.loads(results.as_text(found)))
    assert "A card; torch 2, vLLM 1, commit 0123456789, 2026-11-25; 62 s." in text


def test_a_duration_is_that_of_the_whole_run(tmp_path: Path) -> None:
    """Rows of one engine each have its time, and engines run beside each other."""
    row = {"what": "speed", "policy": "stock", "model": "8B", "seconds": 40.0}
    rows = [row | {"context": context} for context in (1024, 32000)]
    run = {"environment": CHECK["environment"] | {"vllm": "1"}, "rows": rows}
    for spent, said in (({"seconds": 45.0}, "2026-11-25; 45 s."), ({}, "2026-11-25.")):
        write(tmp_path, "gpu_engine.json", run | spent)
        found = gpu.result(tmp_path, "0123456789ab")
        text = results.section(json.loads(results.as_text(found)))
        assert f"commit 0123456789, {said}\n" in text
    write(tmp_path, "gpu_check.json", CHECK)
    assert gpu.result(tmp_path, "0123456789ab")["seconds"] is None, "of one run alone"


def test_an_engine_that_failed_is_kept_with_its_reason(tmp_path: Path) -> None:
    """Also where all of a kind failed, and beside those that were measured."""
    failed = {"error": "its process was ended by SIGALRM; see log", "seconds": 1.0}
    checked = {"what": "check", "policy": "lazy", "comparisons": 19, "largest_error": 0.0078}
    rows = [
        checked | {"check_s": 12.36},
        {"what": "check", "policy": "sink", **failed},
        {"what": "speed", "policy": "stock", "model": "8B", **failed},
    ]
    environment = CHECK["environment"] | {"vllm": "1"}
    write(tmp_path, "gpu_engine.json", {"environment": environment, "rows": rows})
    found = gpu.result(tmp_path, "0123456789ab")
    first, speed = ([list(row) for row in one["rows"]] for one in found["tables"])
    reason = "its process was ended by SIGALRM"
    assert first == [["lazy", "19", "7.8e-03", "12"], ["sink", "", reason, ""]]
    assert speed == [["Llama 8B", "stock", "", reason, "", ""]]


def test_engines_with_drafts_name_their_drafter() -> None:
    """Some draft with n-grams, others with a model."""
    from benchmarks.gpu_engine import COMPARED, ITSELF, NGRAM

    compared = {"what": "drafts", "equal": True, "max_error": 2e-5, "evicted": 1, "reused": 0}
    some = [one for one in COMPARED if one.kind == "drafts"]
    table = gpu.engines([compared | {"policy": one.label} for one in some])
    said = [" ".join(row[:2]) for row in table.rows]
    drafters = [one.engine["speculative_config"] for one in some]
    assert ITSELF in drafters and NGRAM in drafters and all("drafts" in one for one in said)
    assert ["drafting for itself" in one for one in said] == [one == ITSELF for one in drafters]
    assert ["n-grams" in one for one in said] == [one == NGRAM for one in drafters]


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(json.dumps(content))


def test_a_folder_of_both_is_one_result(tmp_path: Path) -> None:
    """A check that failed must not be lost beside engines."""
    speed = {"what": "speed", "policy": "stock", "model": "8B", "context": 1024, "seconds": 4.0}
    environment = CHECK["environment"] | {"vllm": "1"}
    engine = {"environment": environment, "rows": [speed], "seconds": 6.0}
    write(tmp_path, "gpu_engine.json", engine)
    write(tmp_path, "gpu_check.json", CHECK)
    found = gpu.result(tmp_path, "0123456789ab")
    titles = [one["title"] for one in found["tables"]]
    assert titles[0] == "Kernels against their references"
    assert titles[-1] == "Speed of engines"
    assert list(found["tables"][0]["rows"][1]) == ["failed", "2", "AssertionError: output"]
    assert found["command"].split("; ") == [
        f"python -m benchmarks.{name}" for name in ("gpu_check", "gpu_engine")
    ]
    assert found["environment"]["vllm"] == "1" and found["seconds"] == 10.0


def test_cards_and_toy_runs_are_not_mixed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no gpu_check\*.json or gpu_engine\*.json"):
        gpu.result(tmp_path, "0123456789ab")
    write(tmp_path, "gpu_check.json", CHECK)
    other = {"environment": {"gpu": "Another"}, "rows": []}
    write(tmp_path, "gpu_engine.json", other)
    with pytest.raises(ValueError, match=r"gpu_check.json: A card; gpu_engine.json: Another"):
        gpu.result(tmp_path, "0123456789ab")
    (tmp_path / "gpu_engine.json").unlink()
    for name, toy in (
        ("gpu_engine_tiny.json", {**other, "tiny": True}),
        ("gpu_check_interpreted.json", {**CHECK, "interpreted": True}),
    ):
        write(tmp_path, name, toy)
        with pytest.raises(ValueError, match=f"{name}: toy sizes"):
            gpu.result(tmp_path, "0123456789ab")
        (tmp_path / name).unlink()
    assert gpu.result(tmp_path, "0123456789ab")["environment"]["gpu"] == "A card"
