# SPDX-License-Identifier: Apache-2.0
"""Tests of the tasks that benchmarks give a model: recall, the harness, papers' tables."""

import math
from argparse import Namespace
from collections import Counter

import numpy as np
import pytest
import torch

from benchmarks import harness, papers, recall
from benchmarks.cpu_attention import Ours
from benchmarks.papers import TABLES
from benchmarks.running import controls
from vllm_cascade.policies.registry import resolve

# --- recall -------------------------------------------------------------------------------------


def test_a_pair_differs_only_in_the_value() -> None:
    args = recall.parse_args(["associative", "--lengths", "64", "--depths", "0", "0.5", "1"])
    made = recall.pairs(args, list(range(1000, 2000)), range(500))
    assert len(made) == 3 * args.samples
    for pair in made:
        told, untold = np.asarray(pair.told.token_ids), np.asarray(pair.untold.token_ids)
        assert len(told) == len(untold) == 64
        differs = np.flatnonzero(told != untold)
        place = int(pair.depth * 32) + 8
        assert differs.tolist() == list(range(place, place + 8))
        assert (told[place - 8 : place + 8] == told[-16:]).all(), "key and value, as at the end"
        assert pair.told.scored.sum() == 8 and pair.told.scored[-8:].all()
    with pytest.raises(ValueError, match="length 30"):
        recall.pairs(recall.parse_args(["associative", "--lengths", "30"]), [1] * 99, range(99))


def test_rewound_text() -> None:
    stream = recall.rewound(list(range(100)), 10, burn_in=50, back=20, again=10)
    assert stream.token_ids == [*range(10, 60), *range(40, 50)]
    scored = [stream.token_ids[i + 1] for i in np.flatnonzero(stream.scored)]
    assert scored == list(range(41, 50))
    args = Namespace(burn_in=50, back=20, again=10)
    first = recall._first_reading(stream, args)
    again = [first.token_ids[i + 1] for i in np.flatnonzero(first.scored)]
    assert again == scored, "the same tokens, where they stand for the first time"
    with pytest.raises(ValueError, match="100 tokens"):
        recall.rewound(list(range(100)), 60, 50, 20, 10)


def test_harness_metrics_and_suites() -> None:
    found = {"alias": "x", "acc,none": 0.25, "acc_stderr,none": 0.1, "ppl,none": 3, "sample_len": 4}
    assert harness.metrics(found) == {"acc": (0.25, 0.1), "ppl": (3.0, None)}
    table = harness.table({"sink": {"task": found}, "full": {"task": found}}, 260)
    assert table.columns == ("policy", "task acc", "task ppl")
    assert table.rows[0] == ("sink", "0.2500 ± 0.1000", "3.0000")
    args = harness.parse_args(["--suite", "mmlu-stem", "--policies", "cascade"])
    assert (args.num_fewshot, args.capacity) == (20, 1028)
    jobs = {job.label: job for job in harness.evaluations(args)}
    assert jobs["cascade"].engine.policy["num_subcaches"] == 2
    assert jobs["cascade"].engine.policy["budget"] == 1024 and jobs["full"].engine.policy is None


# --- the papers' tables -------------------------------------------------------------------------


@pytest.mark.parametrize("key", TABLES)
def test_every_row_of_every_table_resolves(key: str) -> None:
    controls.register()
    table = TABLES[key]
    assert table.measure in papers.MEASURES
    for row in table.rows:
        assert len(row.paper) == len(table.columns), row.name
    budgets = [1024, 512] if table.measure != "rouge" else [300]
    plan = papers.plan_of(table, budgets, stride=16)
    for (index, column), settings in plan.items():
        assert (settings is None) == (table.rows[index].arm == papers.RECOMPUTED)
        if settings is not None:
            policy = resolve(settings)
            assert budgets[column] - 160 < policy.budget <= budgets[column]
    runnable = {index for index, row in enumerate(table.rows) if row.arm is not None}
    assert {index for index, column in plan if column == 0} == runnable


def test_the_papers_tables_are_all_there() -> None:
    by_measure = Counter(table.measure for table in TABLES.values())
    assert by_measure == {"perplexity": 8, "harness": 1, "rouge": 3, "timing": 3}


def test_settings_that_follow_from_the_budget() -> None:
    gamma = papers.settings_at({"name": "cascade", "ema_gamma": 1000}, 512, 8)["ema_gamma"]
    assert gamma == pytest.approx(math.exp(-math.log(1000) / 128))
    comb = papers.settings_at({"name": "beehive", "stride": 5, "ratio": 4.5}, 220, 8)
    assert (comb["window"], comb["threshold"]) == (40, 180)
    assert papers.settings_at({"name": "dgc", "share": "60/510"}, 510, 8)["global_size"] == 60
    assert papers.settings_at({"name": "cascade", "num_subcaches": 8}, 512, 8) is None


def test_no_engine_of_a_papers_table_starts_from_a_snapshot() -> None:
    """A trial reads the prompt that the one before it has read, and the time of that is wanted."""
    args = papers.parse_args(["lazy-1"])
    args.dtype = "float32"
    for policy in ({"name": "sink", "budget": 64}, None):
        engine, window = papers.engine_for(args, 1090, policy, 64)
        assert engine.llm_arguments()["enable_prefix_caching"] is False
        assert (window is None) == (policy is not None)


def test_our_columns_stand_beside_the_papers() -> None:
    table = TABLES["cascade-9"]
    made = papers.with_ours(table, ["m, 256"], {(1, 0): "50.0"}, "How.")
    assert made.columns == ("", "paper: Llama2-7B, 2,048", "ours: m, 256")
    assert [row[1:] for row in made.rows] == [("6.97", "-"), ("10.95", "50.0")]
    assert made.note.endswith("How.")


def test_a_layers_step_keeps_the_cache_whole() -> None:
    """Of the layer that ``cpu_attention`` times: every step evicts a token and inserts another."""
    policy = {"name": "cascade", "budget": 64, "num_sinks": 2, "prefill_stride": 1}
    layer = Ours(policy, torch.float32, 16, 2, 1, heads=(4, 4), steps=6)
    new, before = torch.randn(2, 4, 16), layer.view.clone()
    pages = layer.pages.rank.shape[0] // 2
    for _ in range(5):
        layer(new, new, new)
        for first in (1, 1 + pages):
            rank = layer.pages.rank[first : first + pages].flatten()
            assert sorted(rank[rank >= 0].tolist()) == list(range(66))
    assert not (before == layer.view).all(), "nothing was inserted"


def test_rouge_scores() -> None:
    examples = [("", "a cat sat on the mat")] * 2
    perfect = papers.rouge_scores(["a cat sat on the mat"] * 2, examples)
    assert perfect == {key: pytest.approx(100) for key in ("rouge1", "rouge2", "rougeL", "mean")}
    half = papers.rouge_scores(["a cat sat on the mat", "nothing alike"], examples)
    assert half["rouge1"] == pytest.approx(50) and half["mean"] == pytest.approx(50)
    for prompt, summary in papers.examples_of(None, 3):
        assert len(summary) == 250 and summary not in prompt
