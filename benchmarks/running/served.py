# SPDX-License-Identifier: Apache-2.0
"""Answers of a server to prompts: greedy, one ``vllm serve`` an arm, kept one by one."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from benchmarks.running import arms, parts
from benchmarks.running.engines import EngineSettings
from benchmarks.running.serving import Server, ServerError

TIMEOUT = 3600.0
"""Seconds that a request may take, waiting in the queue included."""


@dataclass(frozen=True)
class Request:
    """A prompt as tokens, and the most tokens of its answer."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Served:
    """All requests for one server.

    Attributes:
        arm: where answers are kept; None: nowhere.
    """

    label: str
    engine: EngineSettings
    requests: tuple[Request, ...] = field(repr=False)
    arm: parts.Arm | None = None

    @property
    def keys(self) -> list[str]:
        return [f"{parts.digest_of_tokens(one.prompt)}-{one.max_tokens}" for one in self.requests]

    def determines(self) -> dict[str, Any]:
        return self.engine.determines()

    def result(self, values: list[str]) -> list[str]:
        return values


def ask(job: Served) -> list[str]:
    """One server's answers, in this (child) process; the server ends with it."""

    def work(places: Sequence[int]) -> Iterable[dict[int, str]]:
        with Server(job.engine.model, job.engine.flags()) as server:
            yield from answers(server, job, places)

    return arms.fill(job, work)


def answers(server: Server, job: Served, places: Sequence[int]) -> Iterable[dict[int, str]]:
    """Answers as they come, of as many requests at a time as the engine takes.

    Raises:
        ServerError: the server refused a request; what it said.
    """
    from tqdm import tqdm

    with (
        ThreadPoolExecutor(job.engine.max_num_seqs) as pool,
        tqdm(total=len(places), desc=job.label[:40], unit="prompt", leave=False) as bar,
    ):
        asked = {pool.submit(complete, server, job.requests[place]): place for place in places}
        try:
            for done in as_completed(asked):
                yield {asked[done]: done.result()}
                bar.update()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def complete(server: Server, request: Request) -> str:
    """The greedy answer to one request, by the completions API.

    Raises:
        ServerError: the server refused it; what it said.
    """
    body = {"model": server.model, "prompt": request.prompt, "temperature": 0.0}
    asked = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps({**body, "max_tokens": request.max_tokens}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(asked, timeout=TIMEOUT) as answer:
            return json.load(answer)["choices"][0]["text"]
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")
        raise ServerError(f"HTTP {error.code}: {said}") from error
