# SPDX-License-Identifier: Apache-2.0
"""The model's terms beside what a card measured: which assumption is wrong, and by how much.

    python -m benchmarks.gpu.terms results/

Reads ``roofline.json``, ``gpu_check.json`` and ``gpu_engine.json``, as far as they are there.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path as File
from statistics import median
from typing import Any

Row = dict[str, Any]


def kernel_terms(model: Row, check: Row) -> Iterator[Row]:
    """Decode attention's share of bandwidth, and seconds of a stride of one layer."""
    card = model["card"]
    ours = next(row for row in model["rows"] if row["assumed"]["budget"])
    share = min(ours["assumed"]["kernel_share"], model["assumed"]["bandwidth_share"])
    found = [row for row in check["attend"] if row.get("batch", 0) >= 64 and "gbps" in row]
    if found:
        measured = median(row["gbps"] for row in found) * 1e9 / card["bandwidth"]
        yield {"term": "decode attention, share of bandwidth", "model": share, "card": measured}
    for row in check["prefill"]:
        if "ms" in row:
            each = row["ms"] / 1e3 / (row["tokens"] / row["stride"])
            name = f"stride of {row['stride']}, seconds a layer"
            planned = [
                one["prefill"]
                for one in model["rows"]
                if one["assumed"]["stride"] == row["stride"] and one["assumed"]["budget"]
            ]
            if planned:
                longest = max(planned, key=lambda one: one["attention_s"])
                strides = longest["strides"]
                parts = max(longest["attention_s"], longest["host_s"])
                yield {"term": name, "model": parts / strides, "card": each}


def engine_terms(model: Row, engine: Row) -> Iterator[Row]:
    """Output tokens a second of stock and of a cascade, of as many requests as were measured."""
    for row in engine["rows"]:
        if row.get("what") != "speed" or "error" in row or row["model"] != "8B":
            continue
        for one in model["rows"]:
            stock = not one["assumed"]["budget"]
            if stock != (row["policy"] == "stock") or row["policy"] not in ("stock", "cascade"):
                continue
            if "8B" not in one["model"] or one["context"] != row["context"]:
                continue
            found = one["of_64"]["tokens_per_s"]
            name = f"{row['policy']}, context {row['context']}, output tokens/s"
            yield {"term": name, "model": found, "card": row["output_tokens_per_s"]}
            break


def table(rows: list[Row]) -> str:
    lines = [f"{'term':44} {'model':>12} {'card':>12} {'card/model':>10}"]
    for row in rows:
        ratio = row["card"] / row["model"] if row["model"] else float("nan")
        lines.append(f"{row['term']:44} {row['model']:12.4g} {row['card']:12.4g} {ratio:10.2f}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=File, help="folder with the three files")
    folder = parser.parse_args(arguments).out
    if not (folder / "roofline.json").exists():
        parser.error(f"{folder} has no roofline.json: python -m benchmarks.gpu.roofline --out")
    model = json.loads((folder / "roofline.json").read_text())
    rows: list[Row] = []
    for name, terms in (("gpu_check", kernel_terms), ("gpu_engine", engine_terms)):
        file = folder / f"{name}.json"
        if file.exists():
            rows += terms(model, json.loads(file.read_text()))
        else:
            print(f"{file} is not there: python -m benchmarks.{name} --out {folder}")
    print(table(rows))
    (folder / "terms.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
