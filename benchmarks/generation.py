# SPDX-License-Identifier: Apache-2.0
"""Generated text under every policy: ``python -m benchmarks.generation TASK``.

``summarise``
    ROUGE-1, ROUGE-2 and ROUGE-L of the answers, and their self-BLEU (how alike one policy's answers
    are). ``--data xsum`` is BUZZ's setting; a ``.jsonl`` file has ``document`` and ``summary``.
``qa``
    Ten documents in the prompt: exact match, and whether the answer holds what is right, the
    measure of "Lost in the Middle" (Liu et al., section 2.2). A ``.jsonl`` file is as that paper's:
    ``question``, ``answers`` and ``ctxs`` (each with ``title`` and ``text``).

Without ``--data`` the documents are passages of the shipped book, whose next sentences stand in for
a summary, and made-up facts for the questions: that proves the path, not a model.
"""

import argparse
import json
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.inputs.texts import load_dataset, read
from benchmarks.perplexity import policies
from benchmarks.reporting import results
from benchmarks.reporting.tables import Table, failure_rows, number
from benchmarks.running.answers import Asking, as_tokens, ask_all
from benchmarks.running.arms import Outcome
from benchmarks.running.engines import (
    BOOK,
    MODEL,
    EngineSettings,
    load_tokenizer,
    native_positions,
    quiet,
    settle_dtype,
)

ROUGE = ("rouge1", "rouge2", "rougeL")
DATASETS = {
    "xsum": ("EdinburghNLP/xsum", None, "validation", "document", "summary"),
    "cnn": ("abisee/cnn_dailymail", "3.0.0", "validation", "article", "highlights"),
}
SUMMARISE = "{document}\n\nSummary:"
ANSWER = (
    "Answer the question with the help of the documents.\n\n{documents}\n\n"
    "Question: {question}\nAnswer:"
)
NAMES = (
    *("Anne", "Mary", "Frederick", "Charles", "Louisa"),
    *("Henrietta", "James", "Sophia", "William", "Penelope"),
)
DOCUMENTS = 10


@dataclass(frozen=True)
class Example:
    """A prompt, and the texts that would be right."""

    prompt: str
    answers: tuple[str, ...]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.generation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("task", choices=("summarise", "qa"))
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--data", help=f"{', '.join(DATASETS)}, or a .jsonl file")
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, help="default: 64 to summarise, 16 to answer")
    parser.add_argument("--capacity", type=int, default=260, help="most tokens cached, with sinks")
    parser.add_argument("--num-sinks", type=int, default=4)
    parser.add_argument("--stride", type=int, default=64, help="prompt tokens between evictions")
    parser.add_argument("--policies", nargs="+", help="default: all, and the random control")
    parser.add_argument("--policy-config", type=json.loads, default={})
    parser.add_argument("--base", default="sink")
    parser.add_argument("--chat", action="store_true", help="use the model's chat template")
    results.add_engine_arguments(parser)
    results.add_arguments(parser, "generation")
    args = parser.parse_args(argv)
    if args.max_tokens is None:
        args.max_tokens = 64 if args.task == "summarise" else 16
    return args


# --- examples -----------------------------------------------------------------------------------


def to_summarise(data: str | None, samples: int) -> list[Example]:
    """Documents and their summaries.

    Raises:
        FileNotFoundError: no such file.
    """
    if data is None:
        pairs = _passages(samples)
    elif data in DATASETS:
        name, config, split, document, summary = DATASETS[data]
        rows = load_dataset(name, config, split, samples)
        pairs = [(row[document], row[summary]) for row in rows]
    else:
        rows = [json.loads(line) for line in Path(data).read_text("utf-8").splitlines() if line]
        pairs = [(row["document"], row["summary"]) for row in rows[:samples]]
    return [Example(SUMMARISE.format(document=d), (s,)) for d, s in pairs]


def _passages(samples: int, characters: int = 2800) -> list[tuple[str, str]]:
    text = re.sub(r"\s+", " ", next(iter(read(str(BOOK)).values())))
    starts = np.linspace(0, len(text) - characters - 400, samples).astype(int).tolist()
    return [(text[s : s + characters], text[s + characters : s + characters + 250]) for s in starts]


def to_answer(data: str | None, samples: int) -> list[Example]:
    """Questions with ten documents each.

    Raises:
        FileNotFoundError: no such file.
    """
    if data is None:
        return _facts(samples)
    rows = [json.loads(line) for line in Path(data).read_text("utf-8").splitlines() if line]
    made = []
    for row in rows[:samples]:
        documents = "\n".join(f"[{d['title']}] {d['text']}" for d in row["ctxs"][:DOCUMENTS])
        prompt = ANSWER.format(documents=documents, question=row["question"])
        made.append(Example(prompt, tuple(row["answers"])))
    return made


def _facts(samples: int) -> list[Example]:
    """Ten passages of the book, each ending in a made-up fact; one of them is asked for."""
    rng = np.random.default_rng(0)
    passages = [document for document, _ in _passages(samples * DOCUMENTS, 260)]
    made = []
    for index in range(samples):
        numbers = rng.integers(100, 1000, DOCUMENTS).tolist()
        part = passages[index * DOCUMENTS : (index + 1) * DOCUMENTS]
        documents = "\n".join(
            f"[{name}] {text} The number of {name} is {n}."
            for name, text, n in zip(NAMES, part, numbers, strict=True)
        )
        asked = int(rng.integers(DOCUMENTS))
        question = f"What is the number of {NAMES[asked]}?"
        prompt = ANSWER.format(documents=documents, question=question)
        made.append(Example(prompt, (str(numbers[asked]),)))
    return made


# --- measures -----------------------------------------------------------------------------------


def rouge(answers: Sequence[str], examples: Sequence[Example]) -> dict[str, float]:
    """Mean F measures, in percent, and the geometric mean of the three (BUZZ's "mean ROUGE")."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(ROUGE, use_stemmer=True)
    scores = [
        scorer.score_multi(example.answers, answer)
        for answer, example in zip(answers, examples, strict=True)
    ]
    means = {kind: 100 * float(np.mean([s[kind].fmeasure for s in scores])) for kind in ROUGE}
    return {**means, "mean": float(np.prod(list(means.values())) ** (1 / len(means)))}


def self_bleu(answers: Sequence[str]) -> float:
    """Mean BLEU of every answer against all others, in percent; high: the answers are alike."""
    from sacrebleu import sentence_bleu

    others = [[*answers[:i], *answers[i + 1 :]] for i in range(len(answers))]
    return float(np.mean([sentence_bleu(a, o).score for a, o in zip(answers, others, strict=True)]))


def normalise(answer: str) -> str:
    """SQuAD's: lower case, no punctuation, no articles, single spaces."""
    lowered = "".join(c for c in answer.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", lowered).split())


def exact_match(answer: str, example: Example) -> bool:
    """Whether the answer's first line is one of the right ones, or begins with it."""
    given, right = _first_line(answer, example)
    return any(f"{given} ".startswith(f"{text} ") for text in right)


def holds_answer(answer: str, example: Example) -> bool:
    """Whether one of the right ones is somewhere in the answer's first line, in whole words."""
    given, right = _first_line(answer, example)
    return any(f" {text} " in f" {given} " for text in right)


def _first_line(answer: str, example: Example) -> tuple[str, list[str]]:
    """What is compared: the answer's first line, and the right ones."""
    right = [normalise(text) for text in example.answers]
    return normalise(answer.strip().split("\n")[0]), [text for text in right if text]


# --- runs ---------------------------------------------------------------------------------------


def answers_of(
    settings: dict[str, dict[str, Any] | None],
    examples: Sequence[Example],
    args: argparse.Namespace,
) -> Outcome[list[str]]:
    """Every arm's answers; None is stock vLLM, left out where the prompts do not fit it."""
    tokenizer = load_tokenizer(args.model)
    prompts = tuple(as_tokens(tokenizer, example.prompt, args.chat) for example in examples)
    longest = max(map(len, prompts)) + args.max_tokens
    fits = longest <= native_positions(args.model)
    engine = EngineSettings(
        model=args.model, dtype=args.dtype, max_model_len=longest, max_num_seqs=16
    )
    jobs = [
        Asking(label, replace(engine, policy=policy), prompts, args.max_tokens)
        for label, policy in settings.items()
        if policy or fits
    ]
    return ask_all(jobs, args.engines, results.parts_of(args))


def main(argv: Sequence[str] | None = None) -> None:
    """Run a task."""
    args = parse_args(argv)
    quiet()
    args.dtype = settle_dtype(args.dtype, args.model)
    make = to_summarise if args.task == "summarise" else to_answer
    examples = make(args.data, args.samples)
    settings: dict[str, dict[str, Any] | None] = {**policies(args, args.stride), "full": None}
    found = answers_of(settings, examples, args)
    built_in = "" if args.data else " Built-in texts: the path, not the model, is what this shows."
    size = f"{len(examples)} prompts, at most {args.capacity:,} tokens cached.{built_in}"
    if args.task == "summarise":
        title = "Summaries"
        rows = [
            (arm, *(number(v) for v in rouge(texts, examples).values()), number(self_bleu(texts)))
            for arm, texts in found.done.items()
        ]
        columns = ("policy", "ROUGE-1", "ROUGE-2", "ROUGE-L", "geometric mean", "self-BLEU")
    else:
        title = f"Questions with {DOCUMENTS} documents"
        columns = ("policy", "exact match", "holds the answer")
        rows = []
        for arm, texts in found.done.items():
            pairs = list(zip(texts, examples, strict=True))
            shares = [np.mean([m(*pair) for pair in pairs]) for m in (exact_match, holds_answer)]
            rows.append((arm, *(f"{share:.1%}" for share in shares)))
    rows += failure_rows(found.failed, len(columns))
    data = {"answers": found.done, **results.failures(found.failed)}
    results.save(args.out, [Table(title, columns, tuple(rows), size)], data, vars(args), argv)
    results.end(found.failed)


if __name__ == "__main__":
    main()
