# SPDX-License-Identifier: Apache-2.0
"""Every check of every kernel, for ``benchmarks.gpu_check``: over more shapes than tests without a
card have time for. Nothing here needs vLLM or pytest.
"""

import itertools
import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.timings import AVERAGE, Layer
from tests.kernels import checks, recall_checks
from tests.kernels.random_pool import Case, float_bits
from vllm_cascade.kernels.triton.configs import Split
from vllm_cascade.kernels.triton.schedule import ScheduleTables, schedule

Row = dict[str, Any]


LATENT: dict[str, Any] = {
    "num_heads": 1, "head_size": 576, "latent": 512, "rotary_dim": 64, "interleaved": True,
}  # fmt: skip
"""Rows of DeepSeek and Kimi, whose value is their key's end."""


def cases(interpret: bool) -> dict[str, Any]:
    """Shapes to check: every head size and type, group sizes, and all that changes logits."""
    if interpret:
        small = {"head_size": 16, "num_heads": 1, "lengths": (0, 17, None), "strides": (9,)}
        return {"fp32": Case(**small), "bf16": Case(**small, group=1, dtype=torch.bfloat16)}
    base = {"lengths": (0, 1, 15, 16, 17, None, 250, 611), "num_heads": 2, "splits": None}
    base["strides"] = (1, 7, 64, 33, 200)
    found = {}
    for size in (64, 80, 96, 128, 256):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            name = f"{size} {str(dtype).removeprefix('torch.')}"
            found[name] = Case(**base, head_size=size, dtype=dtype)
    found["long"] = Case(**base | {"lengths": (2052, 8197)}, head_size=128, dtype=torch.float16)
    options: dict[str, Row] = {
        "gqa 1": {"group": 1},
        "gqa 4": {"group": 4},
        "gqa 8": {"group": 8},
        "per head": {"per_head": True},
        "block 32": {"block_size": 32},
        "partial": {"rotary_dim": 32},
        "interleaved": {"interleaved": True},
        "alibi": {"alibi": True},
        "soft cap": {"softcap": 2.0},
        "logit scale": {"logit_scale": True},
        "max": {"reduction": "max"},
        "median": {"reduction": "median", "group": 8},
        "resident": {"newest_stays": False},
        "per query": {"per_age": True},
    }
    for name, option in options.items():
        found[name] = Case(**base, **option)
    for group, dtype in ((16, torch.bfloat16), (128, torch.bfloat16), (16, torch.float32)):
        name = f"latent, {group} heads {str(dtype).removeprefix('torch.')}"
        found[name] = Case(**base | LATENT, group=group, dtype=dtype)
    for dtype in ("fp8", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head"):
        of = {"dtype": torch.bfloat16, "cache_dtype": dtype}
        found[f"latent, {dtype}"] = Case(**base | LATENT, group=16, **of)
        found[dtype] = Case(**base, head_size=128, group=4, **of)
        found[f"{dtype}, per head"] = Case(**base, head_size=64, per_head=True, **of)
    return found


def unit_cases(interpret: bool) -> dict[str, Any]:
    """Pages of units; strides begin where units do, so lengths are their multiples."""
    found = {}
    for unit in (16,) if interpret else (8, 16, 32, 64):
        lengths = (unit,) if interpret else (0, unit, None, 5 * unit, 512)
        base = {"unit": unit, "block_size": max(unit, 16), "lengths": lengths, "strides": (9,)}
        if interpret:
            return {"units": Case(**base, head_size=16, num_heads=1)}
        base |= {"num_heads": 2, "splits": None, "strides": (1, 7, 64, 33, 200)}
        options = [{}, {"group": 1}, {"group": 4, "per_head": True}, {"head_size": 128}, LATENT]
        codes: list[Row] = [{"cache_dtype": dtype} for dtype in ("fp8", "int8_per_token_head")]
        options += [LATENT | code for code in codes] + [{"group": 4} | code for code in codes]
        for option in options:
            found[f"units of {unit} {option}"] = Case(**base | option)
    return found


def split_cases(interpret: bool) -> dict[str, tuple[Any, Any]]:
    """Strides whose attention is split over keys, each with its parts: some end in each of them."""
    if interpret:
        small = Case(head_size=16, num_heads=1, group=1, lengths=(0, 17, None), strides=(9,))
        return {"fp32": (small, Split(2, 16))}
    base = {"lengths": (0, 190, None, 250, 611, 2052), "num_heads": 2, "strides": (7, 64, 200)}
    options: dict[str, Row] = {
        f"{size} {str(dtype).removeprefix('torch.')}": {"head_size": size, "dtype": dtype}
        for size in (64, 128, 256)
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
    }
    options["per head"] = {"per_head": True, "alibi": True}
    options["sinks"] = {"sinks": True, "softcap": 2.0, "logit_scale": True, "group": 4}
    options["units"] = {"unit": 16, "lengths": (0, 192, 608), "dtype": torch.bfloat16}
    found = {name: (Case(**base | option), Split(4, 192)) for name, option in options.items()}
    large = {"head_size": 128, "num_heads": 1, "group": 8, "dtype": torch.bfloat16}
    found["a rank of 8"] = Case(**large, lengths=(2052,), strides=(256,)), Split(8, 320)
    return found


def correctness(device: Any, interpret: bool, part: int = 0, parts: int = 1) -> list[Row]:
    """Every kernel against its reference, and a captured step against an eager one.

    Only checks whose number is ``part`` modulo ``parts`` run.
    """
    rows: list[Row] = []
    numbers = itertools.count()

    def check(name: str, call: Any) -> None:
        number = next(numbers)
        if number % parts != part:
            return
        begin = time.monotonic()
        row: Row = {"check": name, "number": number, "error": None}
        try:
            row["largest"] = call()
        except Exception as error:  # a kernel may fail in any way; the others are still worth it
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        row["seconds"] = round(time.monotonic() - begin, 2)
        rows.append(row)

    def insert_strides(name: str, case: Any) -> None:
        check(f"chunks {name}", lambda: checks.check_chunks(case, device))
        check(f"insert strides {name}", lambda: checks.check_insert_strides(case, device))
        case = replace(case, scored=False)
        check(f"given scores {name}", lambda: checks.check_insert_strides(case, device))

    for name, case in cases(interpret).items():
        check(f"decode {name}", lambda c=case: checks.check_decode(c, device))
        check(f"prefill {name}", lambda c=case: checks.check_prefill(c, device))
        every_rule = interpret or name in ("128 float16", "per head", "resident", "per query")
        for variant in range(checks.NUM_RULES) if every_rule else (4,):
            check(
                f"insert {name}, rule {variant}",
                lambda c=case, v=variant: checks.check_insert(c, device, v),
            )
        check(f"assign {name}", lambda c=case: checks.check_assign(c, device))
        check(f"drafts {name}", lambda c=case: checks.check_drafts(c, device, 4))
        insert_strides(name, case)
    for name, case in unit_cases(interpret).items():
        check(f"decode {name}", lambda c=case: checks.check_decode(c, device))
        check(f"prefill {name}", lambda c=case: checks.check_prefill(c, device))
        check(f"insert {name}", lambda c=case: checks.check_insert_units(c, device))
        check(f"drafts {name}", lambda c=case: checks.check_drafts(c, device))
        insert_strides(name, case)
    for name, (case, split) in split_cases(interpret).items():
        check(f"in parts {name}", lambda c=case, s=split: checks.check_split(c, device, s))
    for name, case in unit_cases(interpret).items():
        last = replace(case, lengths=tuple(n and max(n - 1, 0) for n in case.lengths))
        check(f"judge {name}", lambda c=case: recall_checks.check_judge(c, device))
        check(f"judge strides {name}", lambda c=case: recall_checks.check_judge(c, device, 40, 20))
        check(f"recall {name}", lambda c=case: recall_checks.check_recall(c, device))
        check(f"store {name}", lambda c=last: recall_checks.check_store_tokens(c, device))
        check(f"store strides {name}", lambda c=case: recall_checks.check_store_strides(c, device))
    check("schedule", lambda: checks.check_schedule(device))
    check("schedule, units", lambda: checks.check_schedule(device, unit=16))
    check("rotation table", lambda: checks.check_rotation_table(device))
    if not interpret:
        check("CUDA graph", lambda: graph_equals_eager(device))
    return rows


def cascade_schedule(device: torch.device, sinks: int, window: int, levels: int) -> ScheduleTables:
    """Step tables of a full cascade: an eviction at every step, periods of ``2**(levels - 1)``.

    Step ``j`` ends with a contest between the newest token of the first sub-cache that does not
    accept and the one that arrives there, or else drops the oldest token.
    """
    total = sinks + levels * window
    rows = []
    for j in range(2 ** (levels - 1)):
        level = 1 + ((j & -j).bit_length() - 1 if j else levels)  # the first that does not accept
        newest = sinks + (levels - level) * window - 1
        contest = level < levels
        lo, hi = (newest, newest + 2) if contest else (sinks, sinks + 1)
        rows.append([lo, hi, 1, 0, 0, 0, total, total])
    average = [float_bits(value) for value in AVERAGE]
    table, heads = (
        torch.tensor(lines, dtype=torch.int32, device=device)
        for lines in (rows, [[0, 0, len(rows), 0, 1, *average, 0]])
    )
    return ScheduleTables(table, heads)


def two_policies(device: Any, cached: int) -> tuple[Any, Any]:
    """Tables of a full cascade, and of one that deletes four tokens in cells every fourth step.

    Returns:
        The schedule, and the second policy's further rules, int32 ``[1, 4]``.
    """
    one = cascade_schedule(device, 4, 64, 4)
    grow = [[0, 0, 0, 0, 0, 0, cached + j, cached + 3] for j in (1, 2, 3)]
    comb = [100, 103, 2, 3, 0, 1, cached, cached + 3]
    other = torch.tensor([*grow, comb], dtype=torch.int32, device=device)
    head = one.heads.clone()
    head[0, :3] = torch.tensor([len(one.table), 0, 4])
    tables = torch.cat([one.table, other]), torch.cat([one.heads, head])
    rules = torch.tensor([[50, 54, 2, -2]], dtype=torch.int32, device=device)
    return ScheduleTables(*tables), rules


def graph_equals_eager(device: Any) -> float:
    """40 replays of a captured decode step leave the same bytes and outputs as 40 eager steps."""
    torch.manual_seed(0)
    batch, heads, cached = 5, 8, 4 + 4 * 64
    tables, rules = two_policies(device, cached)
    schedule_of = torch.tensor([0, 1, 0, 0, 1], dtype=torch.int32, device=device)
    twins = [Layer.make(device, batch, heads, 128, cached, torch.float16, spare=0)]
    first = twins[0]
    copies = {name: getattr(first, name).clone() for name in ("kv", "rank", "born", "score")}
    twins.append(replace(first, **copies, steps=first.steps.clone()))
    lengths = [torch.full((batch,), cached + 4, dtype=torch.int32, device=device) for _ in twins]
    for seq_lens in lengths:
        seq_lens[3] = 0  # a padded row
    positions = torch.zeros(batch, dtype=torch.int64, device=device)
    query = torch.randn(batch, 4 * heads, 128, dtype=torch.float16, device=device)
    key = torch.randn(batch, heads, 128, dtype=torch.float16, device=device)
    outputs = [torch.empty_like(query) for _ in twins]

    def step(i: int) -> None:
        layer = twins[i]
        lengths[i].add_((lengths[i] > 0).int())
        schedule(lengths[i], layer.table, tables, schedule_of, layer.steps, positions)
        new = layer.attend(query, key, outputs[i])
        layer.insert(key, key, new, rules=rules, has_cells=True)

    step(0)  # compiles; the twin makes the same first step eagerly
    step(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(1)
    for number in range(40):
        query.normal_()
        key.normal_()
        step(0)
        graph.replay()
        for name in copies:
            a, b = getattr(twins[0], name), getattr(twins[1], name)
            assert torch.equal(a, b), f"{name} differs after replay {number}"
        assert torch.equal(*outputs), f"outputs differ at replay {number}"
    return 0.0
