# SPDX-License-Identifier: Apache-2.0
"""The estimate of a GPU's times, against cases worked out by hand."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path as File
from types import SimpleNamespace

import pytest

from benchmarks.gpu import terms
from benchmarks.gpu.roofline import (
    LLAMA_8B,
    LLAMA_70B,
    STOCK,
    Assumptions,
    Model,
    Path,
    decode,
    estimates,
    first_token,
    ours,
    pairs,
    reduced,
    requests_of,
    table,
)

ROOT = File(__file__).resolve().parents[2]
CARD = SimpleNamespace(flops=1e6, bandwidth=1e4, memory=1e5, link=1e3)
SMALL = Model("small", 10, 2, 4, 2, 5, 20, 100)
OF = Assumptions(
    matrix_share=0.5,
    bandwidth_share=0.5,
    link_share=0.5,
    link_latency=0.25,
    memory_share=0.5,
    reserve=1e4,
    most_requests=100,
    step_seconds=1.0,
)


def test_sizes_are_the_models_own() -> None:
    # 2 layers of [10, 2 * 4 * 5 + 2 * 2 * 5] and three of [10, 20]
    assert SMALL.matrices == 2 * (10 * (20 + 20 + 10 + 10) + 3 * 10 * 20) == 2400
    assert SMALL.weights == 2400 + 2 * 1000
    assert SMALL.token_bytes == 2 * 2 * (2 * 5) * 2  # K and V, 16 bits, heads, layers
    assert 8.0e9 < LLAMA_8B.weights < 8.1e9 and 70e9 < LLAMA_70B.weights < 71e9
    assert LLAMA_8B.token_bytes == 131072
    assert LLAMA_70B.token_bytes == 40960, "one KV head a rank"


def test_pairs_of_queries_and_keys() -> None:
    assert pairs(4, STOCK) == 1 + 2 + 3 + 4
    bounded = Path("", budget=3, stride=2)
    # strides of 2, 2 and 1 find 0, 2 and 3 cached
    assert pairs(5, bounded) == 3 + (2 * 2 + 3) + (1 * 3 + 1)
    assert pairs(2, bounded) == pairs(2, STOCK)


def test_a_prompt_by_hand() -> None:
    path = Path("", budget=3, stride=2, attention_share=0.25, passes=3, stride_seconds=0.0)
    row = first_token(SMALL, CARD, 5, path, OF)
    assert row["matrices_s"] == pytest.approx((2 * 2400 * 5 + 2 * 1000) / 0.5e6)
    # 3 products of 5 channels for 14 pairs, 4 heads and 2 layers
    assert row["attention_s"] == pytest.approx(2 * 3 * 5 * 14 * 4 * 2 / 0.25e6)
    assert row["reduced_s"] == 0 and row["host_s"] == 0
    assert row["ttft_s"] == row["matrices_s"] + row["attention_s"]
    slow = first_token(SMALL, CARD, 5, replace(path, stride_seconds=7.0), OF)
    assert slow["ttft_s"] == slow["host_s"] == 3 * 2 * 7.0, "three strides in two layers"


def test_an_all_reduce_by_hand() -> None:
    four = replace(SMALL, ranks=4)
    # a ring sends 2 * 3 / 4 of 3 tokens' 10 channels of 2 bytes, twice a layer
    once = 2 * 3 / 4 * 60 / 500 + 0.25
    assert reduced(four, CARD, 3, OF) == pytest.approx(4 * once)
    assert reduced(SMALL, CARD, 3, OF) == 0


def test_decode_by_hand() -> None:
    room = 1e5 * 0.5 - 2 * 4400 - 1e4
    assert requests_of(SMALL, CARD, 10, OF) == int(room // (10 * 80)) == 39
    path = Path("", budget=10, layer_seconds=0.5, bytes_beyond=0.25, kernel_share=0.4)
    row = decode(SMALL, CARD, 1000, path, OF)
    assert row["matrices_s"] == pytest.approx(2 * 3400 / 5e3)
    assert row["attention_s"] == pytest.approx(39 * 10 * 80 * 1.25 / (1e4 * 0.4))
    assert row["small_s"] == 1.0
    assert row["tokens_per_s"] == pytest.approx(39 / (1 + 1.36 + 9.75 + 1.0))
    slow = SimpleNamespace(**{**vars(CARD), "flops": 1e5})
    row = decode(SMALL, slow, 1000, path, OF)
    assert row["matrices_s"] == pytest.approx(2 * 3400 * 39 / 0.5e5), "products, not weights"
    assert decode(SMALL, CARD, 10_000, STOCK, OF)["requests"] == 0, "not one request fits"


def test_every_line_has_its_terms_and_its_assumptions() -> None:
    card = SimpleNamespace(flops=989e12, bandwidth=3.35e12, memory=80e9, link=450e9)
    counts = SimpleNamespace(other_bytes=20.0, kv_bytes=512.0, share=lambda _: 0.9)
    assert ours("", 256, 1e-3, counts, card).kernel_share == 0.9
    rows = list(estimates(card, {4: counts, 8: counts}, Assumptions()))
    assert len(rows) == 2 * 3 * 3
    assert all({"prefill", "decode", "assumed"} <= set(row) for row in rows)
    assert table(rows).startswith("estimates, nothing measured") and json.dumps(rows)
    at_128k = {
        row["path"]: row for row in rows if row["context"] == 131072 and "8B" in row["model"]
    }
    stock, planned = at_128k.pop(STOCK.name), at_128k["strides of 1024"]
    assert planned["prefill"]["ttft_s"] < stock["prefill"]["ttft_s"]
    assert planned["decode"]["requests"] > stock["decode"]["requests"]


@pytest.mark.slow
def test_the_command(tmp_path: File) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu.roofline", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("estimates, nothing measured")
    found = json.loads((tmp_path / "roofline.json").read_text())
    assert found["estimates"] and found["card"]["name"] == "H100 SXM" and len(found["rows"]) == 18


def test_terms_beside_what_was_measured(tmp_path: File, capsys: pytest.CaptureFixture) -> None:
    """Each is in the same unit as the model's, worked out by hand."""
    path = {"budget": 8, "kernel_share": 0.9, "stride": 4}
    prefill = {"attention_s": 6.0, "host_s": 3.0, "strides": 12}
    decoded = {"tokens_per_s": 50.0}
    row = {"model": "Llama 8B", "context": 7, "assumed": path, "prefill": prefill, "of_64": decoded}
    stock = {**row, "assumed": {**path, "budget": 0}, "of_64": {"tokens_per_s": 20.0}}
    assumed = {"bandwidth_share": 0.8}
    model = {"card": {"bandwidth": 2e12}, "assumed": assumed, "rows": [stock, row]}
    check = {
        "attend": [{"batch": 64, "gbps": 1000.0}, {"batch": 1, "gbps": 1.0}],
        "prefill": [{"ms": 2000.0, "tokens": 16, "stride": 4}],
    }
    one = {"what": "speed", "model": "8B", "context": 7, "output_tokens_per_s": 25.0}
    engine = {"rows": [one | {"policy": "stock"}, one | {"policy": "cascade"}, {"what": "other"}]}
    files = {"roofline": model, "gpu_check": check, "gpu_engine": engine}
    for name, found in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    assert terms.main([str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "terms.json").read_text())
    assert [(row["model"], row["card"]) for row in rows] == [
        *((0.8, 0.5), (0.5, 0.5)),  # bytes a second of 2e12; two seconds for four strides
        *((20.0, 25.0), (50.0, 25.0)),
    ]
    assert "card/model" in capsys.readouterr().out


def test_terms_need_the_model(tmp_path: File) -> None:
    with pytest.raises(SystemExit):
        terms.main([str(tmp_path)])
