# SPDX-License-Identifier: Apache-2.0
"""Where texts come from, and the field's protocols for streaming them through a cache.

A source is a text file (one document), a folder of ``.txt`` files (a document each), a ``.jsonl``
file, or a dataset on the Hugging Face Hub: ``hf:NAME``, with options after commas, as in
``hf:Salesforce/wikitext,config=wikitext-2-raw-v1,split=test,column=text``.

A protocol turns texts into streams:

``books``
    Every document is a stream of its own, with a fresh cache (PG19).
``joined``
    All texts, joined by blank lines, are one stream (WikiText as most papers score it).
``lines``
    Every non-empty line is a sample. All go through one cache that is never reset, each with the
    tokenizer's own beginning, and no sample's first token is scored (StreamingLLM, DGC).
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

DATASETS = {
    "pg19": ("hf:emozilla/pg19-test,split=test,column=text", "books"),
    "wikitext2": (
        "hf:Salesforce/wikitext,config=wikitext-2-raw-v1,split=test,column=text",
        "joined",
    ),
    "wikitext103": (
        "hf:Salesforce/wikitext,config=wikitext-103-raw-v1,split=test,column=text",
        "joined",
    ),
    "bookcorpus": ("hf:bookcorpus/bookcorpus,split=train,column=text", "lines"),
}
"""Short names: a source and its protocol."""
PROTOCOLS = ("books", "joined", "lines")
Tokenize = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Stream:
    """Tokens that go through one cache.

    Attributes:
        token_ids: the tokens.
        scored: bool ``[len(token_ids) - 1]``: whether tokens 1, 2, ... count.
        beginning: of the tokens, the first so many are what the tokenizer puts before any text.
            A part of the stream that is read alone needs them, too.
    """

    name: str
    token_ids: list[int]
    scored: np.ndarray
    beginning: int = 0

    def part(self, begin: int, end: int) -> list[int]:
        """Tokens ``begin .. end - 1`` as a text of its own, its first tokens the beginning's."""
        return self.token_ids[: self.beginning] + self.token_ids[begin + self.beginning : end]

    def cut(self, num_tokens: int | None) -> "Stream":
        """The first ``num_tokens`` tokens; None: all."""
        if num_tokens is None or num_tokens >= len(self.token_ids):
            return self
        tokens, scored = self.token_ids[:num_tokens], self.scored[: num_tokens - 1]
        return Stream(self.name, tokens, scored, self.beginning)


def read(source: str, limit: int | None = None) -> dict[str, str]:
    """Documents by name; ``limit`` stops after so many.

    Raises:
        FileNotFoundError: no such file or folder.
        ValueError: an unknown option of a dataset, or nothing in a source.
    """
    path = Path(source)
    if source.startswith("hf:"):
        name, *options = source.removeprefix("hf:").split(",")
        chosen = {"config": None, "split": "test", "column": "text"}
        own = dict(option.split("=", 1) for option in options)
        if unknown := set(own) - set(chosen):
            raise ValueError(f"{source}: unknown option {', '.join(sorted(unknown))}")
        chosen |= own
        rows = load_dataset(name, chosen["config"], chosen["split"], limit)
        found = {f"{name}-{index}": row[chosen["column"]] for index, row in enumerate(rows)}
    elif path.is_dir():
        found = {file.stem: file.read_text("utf-8") for file in sorted(path.glob("*.txt"))}
    elif not path.is_file():
        raise FileNotFoundError(f"{path}: no such file or folder")
    elif path.suffix == ".jsonl":
        lines = path.read_text("utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        found = {f"{path.stem}-{index}": row["text"] for index, row in enumerate(rows)}
    else:
        found = {path.stem: path.read_text("utf-8")}
    texts = {name: text for name, text in list(found.items())[:limit] if text.strip()}
    if not texts:
        raise ValueError(f"{source}: no text in it")
    return texts


def read_all(sources: Sequence[str], limit: int | None = None) -> dict[str, str]:
    """Documents of several sources. Of two with one name the second is named by its source, too."""
    found: dict[str, str] = {}
    for source in dict.fromkeys(sources):
        for name, text in read(source, limit).items():
            found[f"{name} ({source})" if name in found else name] = text
    return found


def load_dataset(
    name: str, config: str | None, split: str, limit: int | None = None
) -> list[dict[str, Any]]:
    """Rows of a dataset on the Hub, streamed, so that a few rows need no whole download.

    Raises:
        RuntimeError: the package is not installed, or the Hub cannot be reached.
    """
    try:
        import datasets
    except ImportError as error:
        raise RuntimeError('datasets by name need the extra: pip install -e ".[bench]"') from error
    try:
        rows = datasets.load_dataset(name, config, split=split, streaming=True)
        return list(rows if limit is None else rows.take(limit))
    except (OSError, ConnectionError) as error:
        raise RuntimeError(
            f"the dataset {name} cannot be loaded ({type(error).__name__}): with a network, unset "
            "HF_HUB_OFFLINE; without, pass a local file or folder"
        ) from error


def beginning(tokenizer: Any) -> list[int]:
    """The beginning-of-text token, if the tokenizer puts it before a text or says that it does.

    Some converted tokenizers only say it. A token that is merely named so is not one.
    """
    first = tokenizer.bos_token_id
    adds = getattr(tokenizer, "add_bos_token", False)
    adds = adds or (first is not None and tokenizer("")["input_ids"][:1] == [first])
    return [first] if adds and first is not None else []


def whole_text(tokenizer: Any, text: str) -> list[int]:
    """A text's tokens, after its ``beginning``."""
    found, first = list(tokenizer(text)["input_ids"]), beginning(tokenizer)
    return found if found[: len(first)] == first else first + found


def load(
    sources: Sequence[str],
    tokenizer: Any,
    protocol: str | None = None,
    *,
    documents: int | None = None,
    num_tokens: int | None = None,
    ranks: str | None = None,
) -> list[Stream]:
    """The streams of some sources, also of names in ``DATASETS``.

    Args:
        protocol: None: the data set's own, or ``books``.
        documents: stop after so many of a source.
        num_tokens, ranks: see ``streams``; ``ranks`` as in ``19:44``.
    """
    known = [DATASETS.get(source, (source, "books")) for source in sources]
    for _, own in known:
        protocol = protocol or own
    found = read_all([source for source, _ in known], documents)
    chosen = slice(*(int(part) if part else None for part in ranks.split(":"))) if ranks else None

    return streams(
        found,
        lambda text: whole_text(tokenizer, text),
        protocol or "books",
        num_tokens=num_tokens,
        ranks=chosen,
        beginning=len(beginning(tokenizer)),
    )


def streams(
    texts: dict[str, str],
    tokenize: Tokenize,
    protocol: str,
    *,
    num_tokens: int | None = None,
    ranks: slice | None = None,
    beginning: int = 0,
) -> list[Stream]:
    """Streams of some texts under a protocol.

    Args:
        num_tokens: cut every stream here.
        ranks: keep only these documents of ``books``, by length, shortest first. The cascade
            paper scores ranks 19 to 43 of PG19's test books.
        beginning: tokens that ``tokenize`` puts before every text.

    Raises:
        ValueError: an unknown protocol, or ``ranks`` for another one than ``books``.
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"unknown protocol {protocol!r}: choose from {', '.join(PROTOCOLS)}")
    if ranks is not None and protocol != "books":
        raise ValueError("length ranks are for the protocol `books`")
    if protocol == "books":
        made = [_whole(name, list(tokenize(text)), beginning) for name, text in texts.items()]
        if ranks is not None:
            made = sorted(made, key=lambda stream: len(stream.token_ids))[ranks]
    elif protocol == "joined":
        made = [_whole("joined", list(tokenize("\n\n".join(texts.values()))), beginning)]
    else:
        made = [_lines(texts, tokenize)]
    return [s for stream in made if len((s := stream.cut(num_tokens)).token_ids) > 1]


def _whole(name: str, token_ids: list[int], beginning: int) -> Stream:
    return Stream(name, token_ids, np.ones(max(len(token_ids) - 1, 0), dtype=bool), beginning)


def _lines(texts: dict[str, str], tokenize: Tokenize) -> Stream:
    lines = [line for text in texts.values() for line in text.splitlines() if line.strip()]
    samples = [sample for line in lines if (sample := list(tokenize(line)))]
    token_ids = [token for sample in samples for token in sample]
    scored = np.ones(len(token_ids), dtype=bool)
    scored[np.cumsum([0, *map(len, samples)])[:-1]] = False
    return Stream("lines", token_ids, scored[1:])


def passages(text: str, tokenizer: Any, size: int) -> Iterator[str]:
    """A text in parts of at most ``size`` tokens that end where sentences do."""
    words = text.split()
    ends = [place for place, word in enumerate(words, 1) if word.rstrip("\"')_”’")[-1:] in ".!?"]
    lengths = [len(ids) for ids in tokenizer([f" {word}" for word in words])["input_ids"]]
    begin = last = held = 0
    for start, end in pairwise([0, *ends, len(words)]):
        more = sum(lengths[start:end])
        if held + more > size and last > begin:
            yield " ".join(words[begin:last])
            begin, held = last, 0
        last, held = end, held + more
    yield " ".join(words[begin:])


def after_sentence(token_ids: Sequence[int], tokenizer: Any, after: int) -> int:
    """The index, from ``after`` on, of the first token that follows the end of a sentence."""
    for place in range(after, len(token_ids)):
        if tokenizer.decode(token_ids[place - 1 : place]).strip() in (".", "!", "?"):
            return place
    raise ValueError(f"no sentence ends in the text's tokens from {after} on")
