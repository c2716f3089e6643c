# SPDX-License-Identifier: Apache-2.0
"""Importance by text alone, and the table it reads, against literal counts."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import MODEL
from tests.oracle.dgc import importance, sentences_of
from vllm_cascade.cli import main
from vllm_cascade.policies import idf, text_importance
from vllm_cascade.policies.idf import SentenceCounter, ends_sentence, sentence_ends
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.policies.text_importance import (
    MAX_SENTENCE,
    RULES,
    IdfTable,
    OwnPast,
    TokenImportance,
)

VOCAB = 12
ENDS = np.arange(VOCAB) >= 10
streams = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=80)
long_streams = st.lists(st.integers(0, VOCAB - 1), min_size=600, max_size=900).map(
    lambda tokens: [token % 10 if i % 400 else token for i, token in enumerate(tokens)]
)


def table_of(corpus: list[int], ends: np.ndarray = ENDS) -> IdfTable:
    counter = SentenceCounter(ends)
    counter.add(corpus)
    counter.close()
    return IdfTable(counter.num_sentences, counter.sentences, counter.counts, ends, "toy")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("with_table", [False, True])
@settings(max_examples=60, deadline=None)
@given(tokens=streams, corpus=streams, lag=st.integers(1, 20), data=st.data())
def test_equals_the_literal_rule(
    rule: str,
    with_table: bool,
    tokens: list[int],
    corpus: list[int],
    lag: int,
    data: st.DataObject,
) -> None:
    """In chunks of any size, also when a stream was lost and is read again."""
    judge = TokenImportance(rule, ENDS, table_of(corpus) if with_table else None)
    known = sentences_of(corpus, ENDS.__getitem__) if with_table else None
    expected = importance(tokens, rule, lag, ENDS.__getitem__, known)
    cuts = sorted({0, len(tokens), *data.draw(st.lists(st.integers(0, len(tokens)), max_size=6))})
    got: list[float] = []
    for begin, end in pairwise(cuts):
        if data.draw(st.booleans()):
            judge.forget("request")
        got += judge.advance("request", np.asarray(tokens), begin, end, lag).tolist()
    assert got[:lag] == [0.0] * len(got[:lag])
    assert got[lag:] == pytest.approx(expected[: max(len(tokens) - lag, 0)], rel=1e-6, abs=1e-9)


def text(num: int, without_ends: bool) -> np.ndarray:
    """Random tokens of a vocabulary of 1,000, of which a tenth or none end a sentence."""
    tokens = np.random.default_rng(3).zipf(1.3, num) % 900
    ends = np.random.default_rng(4).random(num) < (0 if without_ends else 0.1)
    return np.where(ends, 900 + tokens % 100, tokens)


LARGE = np.arange(1000) >= 900
CORPUS = text(3000, without_ends=False).tolist()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("with_table", [False, True])
@pytest.mark.parametrize("without_ends", [False, True])
def test_a_hit_scores_only_what_follows(
    rule: str, with_table: bool, without_ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that begins at a snapshot; with a table, it reads one sentence and the lag."""
    table = table_of(CORPUS, LARGE) if with_table else None
    tokens, begin, lag = text(50_100, without_ends), 50_000, 100
    whole = TokenImportance(rule, LARGE, table)
    whole.advance("a", tokens, 0, begin, lag)
    called: list[int] = []
    own = RULES[rule]
    monkeypatch.setitem(RULES, rule, lambda token, *more: called.append(token) or own(token, *more))
    read: list[int] = []
    sentence_of = TokenImportance._sentence_of

    def counted(self: TokenImportance, stream: Any, token: int) -> Any:
        read.append(token)
        return sentence_of(self, stream, token)

    monkeypatch.setattr(TokenImportance, "_sentence_of", counted)
    judge = TokenImportance(rule, LARGE, table)
    first = judge.advance("a", tokens, begin, begin + 1, lag)
    assert called == [tokens[begin - lag]]
    assert len(read) <= lag + 1 + MAX_SENTENCE if with_table else len(read) == begin + 1
    assert first == whole.advance("a", tokens, begin, begin + 1, lag)
    late, known = (
        [one.advance("a", tokens, t, t + 1, lag)[0] for t in range(begin + 1, len(tokens))]
        for one in (judge, whole)
    )
    assert late == known and any(known), "to the last bit"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("with_table", [False, True])
@settings(max_examples=60, deadline=None)
@given(tokens=streams, lag=st.integers(0, 20), begin=st.integers(0, 79))
def test_a_hit_anywhere_in_a_sentence(
    rule: str, with_table: bool, tokens: list[int], lag: int, begin: int
) -> None:
    """Sentences of at most 7 tokens, so that most are cut."""
    begin %= len(tokens)
    table, ids = table_of(tokens) if with_table else None, np.asarray(tokens)
    whole, late = (TokenImportance(rule, ENDS, table) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_importance, "MAX_SENTENCE", 7)
        whole.advance("a", ids, 0, begin, lag)
        expected = [whole.advance("a", ids, t, t + 1, lag)[0] for t in range(begin, len(ids))]
        assert late.advance("a", ids, begin, len(ids), lag).tolist() == expected


@pytest.mark.parametrize("with_table", [False, True])
@pytest.mark.parametrize("lag", [50, 300])
def test_a_sentences_norm_is_not_added_up_for_every_token(
    with_table: bool, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text without sentence ends: sentences of 256 tokens that grow while they are scored."""
    looked_up: list[int] = []
    for corpus in (IdfTable, OwnPast):
        own = corpus.sentences_with

        def counted(self: Any, token: int, own: Any = own) -> int:
            looked_up.append(token)
            return own(self, token)

        monkeypatch.setattr(corpus, "sentences_with", counted)
    tokens = text(900, without_ends=True)
    judge = TokenImportance("tfidf_sklearn", LARGE, table_of(CORPUS, LARGE) if with_table else None)
    got = [judge.advance("a", tokens, t, t + 1, lag)[0] for t in range(len(tokens))]
    assert len(tokens) - lag <= len(looked_up) <= 4 * len(tokens)
    known = sentences_of(CORPUS, LARGE.__getitem__) if with_table else None
    expected = importance(tokens.tolist(), "tfidf_sklearn", lag, LARGE.__getitem__, known)
    assert got[lag:] == pytest.approx(expected[: len(tokens) - lag], rel=1e-6)


def test_requests_are_judged_apart_and_forgotten() -> None:
    judge = TokenImportance("tfidf", ENDS, None)
    first, second = np.asarray([1, 2, 10, 1, 3]), np.asarray([5, 5, 5, 10, 1])
    alone = [importance(list(x), "tfidf", 1, ENDS.__getitem__) for x in (first, second)]
    parts = [[], []]
    for begin, end in ((0, 2), (2, 5)):
        for name, tokens in enumerate((first, second)):
            parts[name] += judge.advance(str(name), tokens, begin, end, 1).tolist()
    for got, expected in zip(parts, alone, strict=True):
        assert got[1:] == pytest.approx(expected[:-1])
    assert len(judge) == 2
    judge.forget("1")
    judge.forget("unknown")
    assert len(judge) == 1


def test_layers_of_several_shapes_read_a_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each asks for the same tokens, and the stream is not read again from its start."""
    read: list[int] = []
    own = TokenImportance._read

    def counted(self: TokenImportance, stream: Any, tokens: list[int], lag: int) -> list[float]:
        read.append(len(tokens))
        return own(self, stream, tokens, lag)

    monkeypatch.setattr(TokenImportance, "_read", counted)
    tokens, judge = np.arange(40) % 7, TokenImportance("tfidf", ENDS, None)
    for begin, end in ((0, 25), (25, 33), (33, 34)):
        first, second = (judge.advance("a", tokens, begin, end, 2) for _ in range(2))
        assert first.tolist() == second.tolist() and len(first) == end - begin
    assert read == [0, 25, 8, 1]


def test_a_reused_name_is_a_new_stream() -> None:
    judge = TokenImportance("tfidf_sklearn", ENDS, None)
    tokens = np.asarray([1, 2, 3, 10, 4, 5])
    judge.advance("request", np.asarray([7] * 6), 0, 6, 2)
    got = judge.advance("request", tokens, 0, 6, 2)
    expected = importance(list(tokens), "tfidf_sklearn", 2, ENDS.__getitem__)
    assert got[2:].tolist() == pytest.approx(expected[:4])


@settings(max_examples=60, deadline=None)
@given(tokens=st.one_of(streams, long_streams), data=st.data())
def test_counting_in_pieces_is_counting_at_once(tokens: list[int], data: st.DataObject) -> None:
    """Sentences that cross pieces, and runs longer than a sentence may be."""
    counter = SentenceCounter(ENDS)
    cuts = sorted({0, len(tokens), *data.draw(st.lists(st.integers(0, len(tokens)), max_size=6))})
    for begin, end in pairwise(cuts):
        counter.add(tokens[begin:end])
    counter.close()
    sentences = sentences_of(tokens, ENDS.__getitem__, MAX_SENTENCE)
    assert counter.num_sentences == len(sentences)
    assert counter.counts.tolist() == [tokens.count(token) for token in range(VOCAB)]
    assert counter.sentences.tolist() == [
        sum(token in sentence for sentence in sentences) for token in range(VOCAB)
    ]


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        (".", True),
        (' said."', True),
        ("?)", True),
        ("line\n", True),
        ("\n\n", True),
        ("。", True),
        (", ", False),
        ("a.b", False),
        ("", False),
        ('"', False),
    ],
)
def test_what_ends_a_sentence(text: str, ends: bool) -> None:
    assert ends_sentence(text) is ends


def test_blocks_are_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces break at lines, else between words, and lose nothing; one endless word included."""
    monkeypatch.setattr(idf, "BLOCK_CHARACTERS", 16)
    text = "One line.\r\nA line longer than a block is, é.\n" + "x" * 50 + " end"
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode())
    pieces = list(idf.blocks(path))
    assert "".join(piece for piece, _ in pieces) == text
    assert sum(size for _, size in pieces) == path.stat().st_size
    texts = [piece for piece, _ in pieces]
    assert len(texts) > 4
    assert all(a[-1] == "\n" or b[0] == " " or "x" in a for a, b in pairwise(texts))


def test_idf_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    files[0].write_text("The sea was calm. The sea was wide!\n")
    files[1].write_text("A captain came, and the captain\nwent.")
    out = tmp_path / "idf.safetensors"
    command = ["idf", "--tokenizer", str(MODEL), "--out", str(out), "--corpus"]
    main([*command, *map(str, files)])
    table = IdfTable.load(out)
    ends = sentence_ends(tokenizer)
    ids = [tokenizer.encode(file.read_text(), add_special_tokens=False) for file in files]
    sentences = sentences_of(ids[0] + ids[1], ends.__getitem__)
    assert len(sentences) == table.num_sentences == 4
    sea, captain = (tokenizer.encode(word, add_special_tokens=False)[-1] for word in ("sea", "ain"))
    for token in {sea, captain, *ids[0]}:
        assert table.occurrences(token) == max((ids[0] + ids[1]).count(token), 1)
        assert table.sentences_with(token) == max(sum(token in s for s in sentences), 1)
    assert f"{len(ids[0] + ids[1])} tokens, 4 sentences" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, b"no table"])
def test_an_unreadable_table_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "idf.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(KVPolicyError, match=r"idf = .*vllm-cascade idf --tokenizer"):
        IdfTable.load(path)


def test_another_safetensors_file_is_no_table() -> None:
    with pytest.raises(KVPolicyError, match="is not an IDF table"):
        IdfTable.load(MODEL / "model.safetensors")


def test_an_empty_corpus_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text("")
    command = ["idf", "--tokenizer", str(MODEL), "--corpus", str(tmp_path / "empty.txt")]
    with pytest.raises(SystemExit):
        main([*command, "--out", str(tmp_path / "t.safetensors")])
    assert "no text" in capsys.readouterr().err
