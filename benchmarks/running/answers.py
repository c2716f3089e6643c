# SPDX-License-Identifier: Apache-2.0
"""Greedy answers to prompts, of one engine or server an arm, kept one by one."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from benchmarks.inputs.texts import whole_text
from benchmarks.running import arms, parts
from benchmarks.running.client import stream
from benchmarks.running.serving import Server

TIMEOUT = 3600.0
"""Seconds that a server's answer may take, waiting in the queue included."""
GREEDY: dict[str, Any] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "top_p": 1.0,
    "extra_body": {"repetition_penalty": 1.0, "top_k": 0, "min_p": 0.0},
}
"""Of a request, besides its temperature: a server takes what is left out from the model's
``generation_config.json``, where a penalty would count a prompt's needles. An engine does not."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as tokens (``as_tokens``), and the most tokens of its answer."""

    tokens: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Asking(arms.EngineJob):
    """All prompts for one engine.

    Attributes:
        served: by ``vllm serve``, not in the arm's process.
    """

    prompts: tuple[Prompt, ...] = field(repr=False)
    served: bool = False

    @property
    def keys(self) -> list[str]:
        return [f"{parts.digest_of_tokens(one.tokens)}-{one.max_tokens}" for one in self.prompts]


def as_tokens(tokenizer: Any, text: str, chat: bool, answer: str = "") -> tuple[int, ...]:
    """A prompt, or what the chat template makes of it as the user's turn, up to the answer.

    Args:
        answer: how the answer begins.

    Raises:
        ValueError: ``chat``, but the model has no template.
    """
    if not chat:
        return tuple(whole_text(tokenizer, f"{text} {answer}" if answer else text))
    if not tokenizer.chat_template:
        raise ValueError(
            f"--chat: {tokenizer.name_or_path} has no chat template; leave --chat out, or name an "
            "instruct model with --model"
        )
    turn = [{"role": "user", "content": text}]
    whole = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    return tuple(tokenizer(whole + answer, add_special_tokens=False)["input_ids"])


def ask(job: Asking) -> list[str]:
    """One engine's answers, in this (child) process.

    Raises:
        Refused: the server refused a request; what it said.
    """
    from tqdm import tqdm

    def work(places: list[int]) -> Iterator[dict[int, str]]:
        found = _served(job, places) if job.served else _in_process(job, places)
        shown = {"unit": "prompt", "leave": False, "position": job.bar_line}
        bar = tqdm(found, job.label[:40], len(places), **shown)
        yield from ({place: text} for place, text in bar)

    return arms.fill(job, work)


def _in_process(job: Asking, places: Sequence[int]) -> Iterator[tuple[int, str]]:
    from vllm import SamplingParams

    engine = job.engine.start().llm_engine
    for place in places:
        one = job.prompts[place]
        params = SamplingParams(temperature=0.0, max_tokens=one.max_tokens)
        engine.add_request(str(place), {"prompt_token_ids": list(one.tokens)}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                yield int(output.request_id), output.outputs[0].text


def _served(job: Asking, places: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Answers as they come, of as many requests at a time as the engine takes."""

    def answer(place: int) -> str:
        one = job.prompts[place]
        asked = {"prompt": list(one.tokens), "max_tokens": one.max_tokens, **GREEDY}
        return stream(server, timeout=TIMEOUT, **asked).text

    with (
        Server(job.engine.model, job.engine.flags()) as server,
        ThreadPoolExecutor(job.engine.max_num_seqs) as pool,
    ):
        asked = {pool.submit(answer, place): place for place in places}
        try:
            yield from ((asked[done], done.result()) for done in as_completed(asked))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
