# SPDX-License-Identifier: Apache-2.0
"""Texts into streams, and differences with their intervals."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.inputs import texts
from benchmarks.reporting import stats
from benchmarks.running.scoring import windows


def words(text: str) -> list[int]:
    """A tokenizer for tests: a beginning (0), then a token a word."""
    return [0, *(len(word) for word in text.split())]


def test_books_are_streams_of_their_own() -> None:
    first, second = texts.streams({"a": "aa b ccc", "b": "dddd"}, words, "books")
    assert (first.name, first.token_ids) == ("a", [0, 2, 1, 3]) and first.scored.all()
    assert (second.name, second.token_ids) == ("b", [0, 4])
    (cut,) = texts.streams({"a": "aa b ccc"}, words, "books", num_tokens=3)
    assert cut.token_ids == [0, 2, 1] and len(cut.scored) == 2


def test_length_ranks_are_by_tokens() -> None:
    made = {"long": "a b c d", "short": "a", "middle": "a b"}
    kept = texts.streams(made, words, "books", ranks=slice(1, 3))
    assert [stream.name for stream in kept] == ["middle", "long"]
    with pytest.raises(ValueError, match="length ranks"):
        texts.streams(made, words, "joined", ranks=slice(1, 3))


def test_joined_is_one_stream() -> None:
    (stream,) = texts.streams({"a": "aa", "b": "b"}, words, "joined")
    assert stream.token_ids == [0, 2, 1] and stream.scored.tolist() == [True, True]


def test_lines_never_score_a_samples_first_token() -> None:
    (stream,) = texts.streams({"a": "aa b\n\n  \nccc", "b": "dddd ee"}, words, "lines")
    assert stream.token_ids == [0, 2, 1, 0, 3, 0, 4, 2]
    # Entry i is token i + 1; tokens 0, 3 and 5 begin samples.
    assert stream.scored.tolist() == [True, True, False, True, False, True, True]


def test_read_files_and_folders(tmp_path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "row"}) + "\n\n")
    assert texts.read(str(tmp_path)) == {"a": "first", "b": "second"}
    assert texts.read(str(tmp_path), 1) == {"a": "first"}
    assert texts.read(str(tmp_path / "rows.jsonl")) == {"rows-0": "row"}
    with pytest.raises(FileNotFoundError, match="nowhere"):
        texts.read(str(tmp_path / "nowhere"))
    (tmp_path / "empty.txt").write_text("  \n")
    with pytest.raises(ValueError, match="no text"):
        texts.read(str(tmp_path / "empty.txt"))


def test_texts_with_one_name_are_all_read(tmp_path) -> None:
    sources = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for file, text in (("test.txt", f"of {folder}"), ("other.txt", f"other {folder}")):
            (tmp_path / folder / file).write_text(text)
        sources.append(str(tmp_path / folder / "test.txt"))
    found = texts.read_all(sources)
    assert list(found.values()) == ["of a", "of b"]
    assert list(found) == ["test", f"test ({sources[1]})"], "the second is named by its source"
    assert len(texts.read_all([str(tmp_path / "a"), str(tmp_path / "b")])) == 4
    assert texts.read_all(sources[:1] * 2) == {"test": "of a"}, "a source twice is one"

    class Characters:
        bos_token_id = None

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [*map(ord, text)]}

    streams = texts.load(sources, Characters())
    assert ["".join(map(chr, stream.token_ids)) for stream in streams] == ["of a", "of b"]


def test_hub_options_and_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fake(name, config, split, limit):
        asked.append((name, config, split, limit))
        return [{"body": "x"}, {"body": "y"}]

    monkeypatch.setattr(texts, "load_dataset", fake)
    found = texts.read("hf:owner/name,config=c,split=train,column=body", 2)
    assert asked == [("owner/name", "c", "train", 2)]
    assert found == {"owner/name-0": "x", "owner/name-1": "y"}
    with pytest.raises(ValueError, match="unknown option colum"):
        texts.read("hf:owner/name,colum=body")


@pytest.mark.parametrize(("num_tokens", "window", "stride"), [(10, 4, 1), (23, 8, 3), (5, 8, 2)])
def test_recomputed_windows_score_every_token_once(num_tokens, window, stride) -> None:
    scored = []
    for begin, end, first in windows(num_tokens, window, stride):
        assert end - begin <= window
        scored += range(first, end)
        if begin:
            assert first - begin >= window - stride, "too little context"
            assert end - first <= stride
    assert scored == list(range(1, num_tokens))
    with pytest.raises(ValueError, match="stride"):
        list(windows(10, 4, 4))


def test_paired_difference_against_a_plain_bootstrap() -> None:
    rng = np.random.default_rng(1)
    sizes = rng.integers(50, 600, 20)
    base = [rng.normal(3, 1, size) for size in sizes]
    ours = [values + rng.normal(0.1, 0.3, len(values)) for values in base]
    found = stats.paired_difference(ours, base)
    sums = np.asarray([(a - b).sum() for a, b in zip(ours, base, strict=True)])
    assert found.units == 20
    assert found.mean == pytest.approx(sums.sum() / sizes.sum())
    # A text's sum and its length are drawn together.
    draws = rng.integers(0, 20, (8000, 20))
    low, high = np.quantile(sums[draws].sum(1) / sizes[draws].sum(1), [0.025, 0.975])
    assert found.low == pytest.approx(low, abs=0.002)
    assert found.high == pytest.approx(high, abs=0.002)
    # Unpaired, the spread of the texts themselves would hide the difference.
    assert found.low > 0.05


def test_few_documents_are_cut_into_blocks_and_weighted_by_tokens() -> None:
    ours = [np.full(1000, 2.0), np.full(250, 1.0)]
    base = [np.full(1000, 1.0), np.full(250, 1.0)]
    found = stats.paired_difference(ours, base, block=100)
    assert found.units == 13
    assert found.mean == pytest.approx(1000 / 1250)
    assert found.low < found.mean < found.high
    one = stats.paired_difference([np.ones(10)], [np.zeros(10)], block=100)
    assert one.units == 1 and np.isnan(one.low) and str(one) == "+1.0000"


def test_difference_needs_the_same_tokens() -> None:
    with pytest.raises(ValueError, match="lengths differ"):
        stats.paired_difference([np.ones(3)], [np.ones(4)])
    with pytest.raises(ValueError, match="no token"):
        stats.paired_difference([np.ones(0)], [np.ones(0)])


def test_two_kinds_of_perplexity() -> None:
    nll = [np.log([2.0, 2.0, 2.0]), np.log([8.0])]
    assert stats.perplexity(nll) == pytest.approx(2 ** (6 / 4))
    assert stats.perplexity_per_document(nll) == pytest.approx(5.0)


def test_bins_of_positions() -> None:
    assert stats.position_bins(160) == [(0, 64), (64, 128), (128, 160)]


class Beginning:
    """A tokenizer of letters; ``adds`` the beginning-of-text token 0, or only ``says`` so."""

    bos_token_id = 0

    def __init__(self, adds: bool, says: bool) -> None:
        self.add_bos_token, self.adds = says, adds

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [0] * self.adds + [ord(letter) for letter in text]}


def test_texts_begin_with_the_tokenizers_first_token(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefgh")
    letters = [ord(letter) for letter in "abcdefgh"]
    for adds, says in ((True, True), (True, False), (False, True)):
        (stream,) = texts.load([str(tmp_path)], Beginning(adds, says))
        assert stream.token_ids == [0, *letters] and len(stream.scored) == 8
        assert stream.part(0, 3) == [0, *letters[:2]] == stream.token_ids[:3]
        assert stream.cut(6).part(2, 5) == [0, *stream.token_ids[3:5]], "a window of its own"
    (stream,) = texts.load([str(tmp_path)], Beginning(False, False))
    assert stream.token_ids == letters, "a token that is only named is not one"
    assert stream.part(2, 5) == letters[2:5]


def test_parts_of_a_text_begin_with_it_too() -> None:
    from benchmarks import recall

    stream = recall.rewound(list(range(1, 100)), 10, burn_in=50, back=20, again=10, head=[0])
    assert stream.token_ids == [0, *range(12, 61), *range(41, 51)]
    args = recall.parse_args(["associative", "--lengths", "64", "--depths", "0", "1"])
    for pair in recall.pairs(args, list(range(1000, 2000)), range(1, 500), [0]):
        assert pair.told.token_ids[0] == pair.untold.token_ids[0] == 0
        assert len(pair.told.token_ids) == 64 and 0 not in pair.told.token_ids[1:]
