# SPDX-License-Identifier: Apache-2.0
"""What is asked of a model: recall prompts, questions, the papers' rows, training sequences."""

import math
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import ablations, caching, generation, harness, recall
from benchmarks.inputs import training_data
from benchmarks.reporting.papers import NOT_OURS, RECOMPUTED, TABLES
from benchmarks.reporting.tables import Table
from benchmarks.running import controls
from benchmarks.train_lm import length_at, rate_at
from benchmarks.train_lm import parse_args as train_args
from vllm_cascade.policies.registry import POLICIES, resolve

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


# --- generation ---------------------------------------------------------------------------------


def test_exact_match_is_squads() -> None:
    example = generation.Example("", ("The Hague", "den haag"))
    assert generation.exact_match(" the hague.\nmore", example)
    assert generation.exact_match("Den Haag, of course", example)
    assert not generation.exact_match("Haag", example)
    assert not generation.exact_match("", example)


def test_an_answer_in_a_sentence_is_found() -> None:
    """In whole words of the first line, which is how a chat model answers."""
    example = generation.Example("", ("The Hague", "114"))
    assert generation.holds_answer("The number of James is 114.", example)
    assert generation.holds_answer("It is The Hague!\nmore", example)
    assert not generation.exact_match("The number of James is 114.", example)
    for wrong in ("The number of James is 1145.", "Well.\n114", "", "hagues"):
        assert not generation.holds_answer(wrong, example)


def test_rouge_and_self_bleu() -> None:
    examples = [generation.Example("", ("a cat sat on the mat",))] * 2
    perfect = generation.rouge(["a cat sat on the mat"] * 2, examples)
    assert perfect == {key: pytest.approx(100) for key in ("rouge1", "rouge2", "rougeL", "mean")}
    half = generation.rouge(["a cat sat on the mat", "nothing alike"], examples)
    assert half["rouge1"] == pytest.approx(50) and half["mean"] == pytest.approx(50)
    assert generation.self_bleu(["one two three four five"] * 3) == pytest.approx(100)
    assert generation.self_bleu(["one two three four five", "six seven eight nine ten"]) < 5


def test_built_in_questions_have_one_right_document() -> None:
    for example in generation.to_answer(None, 4):
        (answer,) = example.answers
        assert example.prompt.count(" The number of ") == generation.DOCUMENTS
        name = example.prompt.rsplit("What is the number of ", 1)[1].split("?")[0]
        assert f"The number of {name} is {answer}." in example.prompt
    for example in generation.to_summarise(None, 3):
        assert len(example.answers[0]) == 250 and example.answers[0] not in example.prompt


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
def test_every_row_of_every_table_resolves(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "vllm_cascade.policies.registry.POLICIES", {**POLICIES, **controls.CONTROLS}
    )
    table = TABLES[key]
    for row in table.rows:
        assert len(row.paper) == len(table.columns), row.name
    budgets = [1024, 512] if table.measure != "rouge" else [300]
    plan = ablations.arms(table, budgets, stride=16)
    for (index, column), settings in plan.items():
        assert (settings is None) == (table.rows[index].policy == RECOMPUTED)
        if settings is not None:
            policy = resolve(settings)
            assert budgets[column] - 160 < policy.budget <= budgets[column]
    runnable = [
        i
        for i, row in enumerate(table.rows)
        if row.policy not in (NOT_OURS, RECOMPUTED)
        and row.policy["name"] in {**POLICIES, **controls.CONTROLS}
    ]
    assert {index for index, column in plan if column == 0} >= set(runnable)


def test_settings_that_follow_from_the_budget() -> None:
    gamma = ablations.settings_at({"name": "cascade", "ema_gamma": 1000}, 512, 8)["ema_gamma"]
    assert gamma == pytest.approx(math.exp(-math.log(1000) / 128))
    comb = ablations.settings_at({"name": "beehive", "stride": 5, "ratio": 4.5}, 220, 8)
    assert (comb["window"], comb["threshold"]) == (40, 180)
    assert ablations.settings_at({"name": "dgc", "share": 60 / 510}, 510, 8)["global_size"] == 60 \
        if "dgc" in POLICIES else True  # fmt: skip
    assert ablations.settings_at({"name": "cascade", "num_subcaches": 8}, 512, 8) is None


def test_our_columns_stand_beside_the_papers() -> None:
    table = TABLES["cascade-9"]
    made = ablations.with_ours(table, ["ours: m, 256"], {(1, 0): "50.0"}, "How.")
    assert isinstance(made, Table)
    assert made.columns == ("", "paper: Llama2-7B, 2,048", "ours: m, 256")
    assert [row[1:] for row in made.rows] == [("6.97", "-"), ("10.95", "50.0")]
    assert made.note.endswith("How.")


def test_the_caching_operation_keeps_the_cache_whole() -> None:
    sizes = caching.Sizes(2, 4, 16, 2, 64, 16, steps=6, warm_up=1)
    assert all(len(times) == 6 for times in caching.concatenation(sizes))
    layer = caching.PagedLayer(4, sizes)
    before = layer.pages.kv.clone()
    for step in range(5):
        (layer.operation if step % 2 else layer.layer)(step)
        for request in layer.table.long():
            rank = layer.pages.rank[request].flatten()
            assert sorted(rank[rank >= 0].tolist()) == list(range(66))
    assert not (before == layer.pages.kv).all(), "nothing was inserted"


# --- training -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("tokenizer")
    text = "The sea was calm, and 42 ships lay at anchor near the old harbour wall. " * 40
    tokenizer = training_data.train_tokenizer([text], 300, folder)
    return np.arange(5000) % 250 + 40, tokenizer, folder


def test_tokenizer_splits_digits_and_loads_again(small) -> None:
    from transformers import AutoTokenizer

    _, tokenizer, folder = small
    again = AutoTokenizer.from_pretrained(folder)
    text = "Ships: 4207, calm\n"
    ids = again(text)["input_ids"]
    assert ids == tokenizer(text)["input_ids"] and again.decode(ids) == text
    assert list(again.tokenize("4207")) == ["4", "2", "0", "7"]


def test_repeats_are_distant_and_marked(small) -> None:
    tokens, tokenizer, _ = small
    rng = np.random.default_rng(0)
    text = rng.permutation(5000)  # every token once, so that copies show
    data = training_data.Sequences(text, tokenizer, 512, shares=(1.0, 0.0), passage=(8, 40))
    batch = data.batch(3, 16)
    assert batch.distant.any(axis=1).all()
    for row, mark in zip(batch.tokens, batch.distant, strict=True):
        for place in np.flatnonzero(mark):
            source = np.flatnonzero(row == row[place])[0]
            assert place - source >= int(0.3 * 512)
            assert row[place - 1] == row[source - 1], "the token before is the same too"
    assert (data.batch(3, 16).tokens == batch.tokens).all(), "a resumed run sees the same"
    assert (data.batch(4, 16).tokens != batch.tokens).any()
    short = data.batch(3, 16, 128)
    assert short.tokens.shape == (16, 128) and short.distant.any(axis=1).all()
    plain = training_data.Sequences(tokens, tokenizer, 512, shares=(0.0, 0.0))
    assert not plain.batch(0, 8).distant.any()


def test_pass_keys_are_told_once_and_asked_for(small) -> None:
    tokens, tokenizer, _ = small
    data = training_data.Sequences(tokens, tokenizer, 256, shares=(0.0, 1.0))
    batch = data.batch(0, 6)
    for row, mark in zip(batch.tokens, batch.distant, strict=True):
        text = tokenizer.decode(row)
        key = tokenizer.decode(row[mark]).replace(" ", "")
        assert len(key) == training_data.DIGITS and key.isdigit()
        assert text.index(f"The pass key is {key}. Remember") < len(text) / 2 + 60
        assert text.rstrip().endswith(f"The pass key is {key}.")


def test_sequences_refuse_what_cannot_be(small) -> None:
    tokens, tokenizer, _ = small
    with pytest.raises(ValueError, match="too few"):
        training_data.Sequences(tokens[:50], tokenizer, 64)
    with pytest.raises(ValueError, match="shares"):
        training_data.Sequences(tokens, tokenizer, 64, shares=(0.9, 0.2))


def test_rate_schedule(tmp_path: Path) -> None:
    args = train_args(["t", "--out", str(tmp_path), "--steps", "300", "--warm-up", "100"])
    rates = [rate_at(step, args, max(step - 100, 0) / 200) for step in range(300)]
    assert rates[0] == pytest.approx(args.rate / 100) and max(rates) == pytest.approx(args.rate)
    assert rates[99:] == sorted(rates[99:], reverse=True)
    assert rates[-1] == pytest.approx(args.rate / 10, rel=0.01)
    assert rate_at(150, args, 1.0) == pytest.approx(args.rate / 10)


def test_sequences_grow_in_equal_parts(tmp_path: Path) -> None:
    options = ["t", "--out", str(tmp_path), "--length", "1024"]
    args = train_args([*options, "--grow-from", "256"])
    shares = [0.0, 0.33, 0.34, 0.66, 0.67, 1.0, 1.2, -0.1]
    assert [length_at(s, args) for s in shares] == [256, 256, 512, 512, 1024, 1024, 1024, 256]
    assert length_at(0.0, train_args(options)) == 1024, "by default they do not grow"
    with pytest.raises(SystemExit):
        train_args([*options, "--grow-from", "300"])
    with pytest.raises(SystemExit):
        train_args([*options[:3], "--length", "768", "--grow-from", "256"])
