# SPDX-License-Identifier: Apache-2.0
"""Mixed load with random aborts on a live server: nothing leaks, nothing slows down.

``make soak`` (30 minutes; ``SOAK_MINUTES=5`` for less) or ``python -m tests.soak --minutes 5``.
It fails unless the server's resident memory grows by less than 1 % and the 99th percentile of the
time between tokens by less than 10 %, from the first five minutes (or third) to the last; unless
the pool is empty in the end and nobody was ever preempted; and unless a prompt that is asked again
and again gets the same answer every time. Latencies mean something on a quiet machine only.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import openai
import psutil
from transformers import AutoTokenizer

from tests.conftest import BOOK, MODEL
from tests.engine.server import Server

CLIENTS = 24
FLAGS = ["--kv-policy", "cascade", "--kv-budget", "128", "--kv-policy-config"]
FLAGS += ['{"prefill_stride": 64}', "--max-model-len", "16384", "--block-size", "32"]
FLAGS += ["--max-num-batched-tokens", "256", "--kv-cache-memory-bytes", str(32 << 20)]
FLAGS += ["--num-gpu-blocks-override", str(CLIENTS * 5 // 3 + 1)]  # pages for a third of them
FLAGS += ["--enforce-eager"]
# oneDNN keeps up to 1,024 compiled shapes, and every batch size is another: 200 MB, in stock vLLM
# as with a policy, which take twenty minutes to fill. With fewer of them, what grows is a leak.
ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
WARM_UP = 60.0
MAX_MEMORY_GROWTH, MAX_LATENCY_GROWTH = 0.01, 0.10


@dataclass
class Soak:
    """What was seen; times are seconds since the load began."""

    start: float = field(default_factory=time.monotonic)
    gaps: list[tuple[float, float]] = field(default_factory=list)  # (when, seconds since the last)
    memory: list[tuple[float, int]] = field(default_factory=list)  # (when, bytes of all processes)
    finished: int = 0
    aborted: int = 0
    wrong: int = 0

    @property
    def now(self) -> float:
        return time.monotonic() - self.start

    def p99(self, begin: float, end: float) -> float:
        return float(np.percentile([gap for when, gap in self.gaps if begin <= when < end], 99))

    def resident(self, begin: float, end: float) -> float:
        return float(np.median([size for when, size in self.memory if begin <= when < end]))


async def client(
    index: int, server: Server, api: openai.AsyncOpenAI, book: list[int], soak: Soak, end: float
) -> None:
    """One request after another until ``end``: any length, some sampled, some left alone."""
    rng = random.Random(index)
    while soak.now < end:
        length = int(2 ** rng.uniform(2, 12))
        start = rng.randrange(len(book) - length)
        max_tokens = rng.randint(1, 100)
        leaves_after = rng.choice([None, None, None, rng.randint(0, max_tokens)])
        timeout = rng.uniform(0.05, 1.0) if rng.random() < 0.1 else 600.0
        sampled = rng.random() < 0.5
        try:
            stream = await api.with_options(timeout=timeout).completions.create(
                model=server.model,
                prompt=book[start : start + length],
                max_tokens=max_tokens,
                stream=True,
                temperature=float(sampled),
                seed=rng.randrange(1000) if sampled else None,
                n=rng.choice([1, 1, 1, 2]) if sampled else 1,
                extra_body={"ignore_eos": True},
            )
            last: dict[int, float] = {}
            num = 0
            async for chunk in stream:
                for choice in chunk.choices:
                    if choice.index in last:
                        soak.gaps.append((soak.now, soak.now - last[choice.index]))
                    last[choice.index] = soak.now
                num += 1
                if leaves_after is not None and num > leaves_after:
                    break
            await stream.close()
        except openai.APITimeoutError:
            leaves_after = 0
        soak.finished += leaves_after is None
        soak.aborted += leaves_after is not None


async def observe(server: Server, book: list[int], soak: Soak, end: float) -> None:
    """Sample memory, print a line a minute, and ask the same thing again and again."""
    family = [psutil.Process(server.process.pid)]
    family += family[0].children(recursive=True)
    prompt = book[5000:6500]
    truth = await asyncio.to_thread(server.complete, prompt, 20)
    line = 0
    while soak.now < end:
        sizes = [process.memory_info().rss for process in family]
        soak.memory.append((soak.now, sum(sizes)))
        soak.wrong += await asyncio.to_thread(server.complete, prompt, 20) != truth
        if soak.now >= line * 60:
            line += 1
            waiting = await asyncio.to_thread(server.metric, "vllm:num_requests_waiting")
            usage = await asyncio.to_thread(server.metric, "vllm:kv_cache_usage_perc")
            print(
                f"{soak.now / 60:5.1f} min  {soak.finished} finished, {soak.aborted} aborted, "
                f"{waiting:.0f} waiting, pool {usage:.0%}, resident MiB "
                + " + ".join(f"{size / 2**20:,.0f}" for size in sizes),
                flush=True,
            )
        await asyncio.sleep(2)


async def load(server: Server, soak: Soak, end: float) -> None:
    assert BOOK is not None
    book = AutoTokenizer.from_pretrained(MODEL)(BOOK.read_text())["input_ids"]
    api = openai.AsyncOpenAI(
        base_url=server.client.base_url, api_key="none", max_retries=0, timeout=600
    )
    clients = [client(i, server, api, book, soak, end) for i in range(CLIENTS)]
    await asyncio.gather(observe(server, book, soak, end), *clients)


def verdict(soak: Soak, end: float) -> list[str]:
    """Print the comparison; what is wrong, if anything."""
    window = min(300.0, (end - WARM_UP) / 3)
    first, last = (WARM_UP, WARM_UP + window), (end - window, end)
    memory = soak.resident(*last) / soak.resident(*first) - 1
    slower = soak.p99(*last) / soak.p99(*first) - 1
    print(
        f"first and last {window / 60:.1f} minutes: resident memory "
        f"{soak.resident(*first) / 2**20:,.1f} and {soak.resident(*last) / 2**20:,.1f} MiB "
        f"({memory:+.2%}), p99 between tokens {soak.p99(*first) * 1e3:.1f} and "
        f"{soak.p99(*last) * 1e3:.1f} ms ({slower:+.1%}); {soak.finished} requests finished, "
        f"{soak.aborted} aborted, {len(soak.gaps)} tokens timed"
    )
    wrong = []
    if memory > MAX_MEMORY_GROWTH:
        wrong.append(f"resident memory grew by {memory:.2%}, more than {MAX_MEMORY_GROWTH:.0%}")
    if slower > MAX_LATENCY_GROWTH:
        wrong.append(f"p99 between tokens grew by {slower:.1%}, more than {MAX_LATENCY_GROWTH:.0%}")
    if soak.wrong:
        wrong.append(f"{soak.wrong} answers to the same prompt differ from the first")
    if not soak.finished or not soak.aborted:
        wrong.append("no mixed load: nothing finished or nothing was aborted")
    return wrong


def run(minutes: float) -> list[str]:
    """Soak a server of its own; what is wrong, if anything."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder) / "log", FLAGS, environment=ENVIRONMENT)
        try:
            server.wait()
            soak, end = Soak(), WARM_UP + minutes * 60
            asyncio.run(load(server, soak, end))
            wrong = verdict(soak, end)
            for metric in ("vllm:kv_cache_usage_perc", "vllm:kv_policy_pages"):
                server.wait_until(metric, 0.0, 60)
            if server.metric("vllm:num_preemptions_total"):
                wrong.append("requests were preempted")
            if not server.metric("vllm:kv_policy_evicted_tokens_total"):
                wrong.append("nothing was evicted")
            if "Traceback" in server.log.read_text():
                wrong.append("there is a traceback in the server's log")
        finally:
            server.stop()
        return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    wrong = run(parser.parse_args().minutes)
    print("\n".join(f"FAILED: {line}" for line in wrong) or "all as it should be")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
