# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` in a process of its own, as a user runs it."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil

from benchmarks.running.serving import VLLM, free_port
from tests.conftest import MODEL, ROOT

ASYNC_VLLM = [sys.executable, str(Path(__file__).with_name("async_cpu.py"))]
FORKED_VLLM = [sys.executable, str(Path(__file__).with_name("forked_cpu.py"))]


class Server:
    """A server in fp32 on a free port.

    Args:
        log: where its output goes.
        flags: after ``vllm serve MODEL``.
        command: what is run as ``vllm``.
        environment: variables besides the test's own.
    """

    def __init__(
        self,
        log: Path,
        flags: Sequence[str],
        command: Sequence[str] = VLLM,
        environment: dict[str, str] | None = None,
        model: Path = MODEL,
    ) -> None:
        self.port = free_port()
        self.log, self.model = log, str(model)
        own = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        own["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        address = ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32"]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [*command, "serve", str(model), *address, *flags],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **own, **(environment or {})},
            )
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1",
            api_key="none",
            timeout=600,
            max_retries=0,
        )

    def wait(self, seconds: int = 400) -> "Server":
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                self.get("/health")
                return self
            except OSError:
                time.sleep(0.5)
        raise TimeoutError(self.log.read_text()[-3000:])

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return answer.read().decode()

    def post(self, path: str) -> str:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()

    def metric(self, name: str) -> float:
        (value,) = re.findall(rf"^{name}{{.*}} (\S+)$", self.get("/metrics"), re.MULTILINE)
        return float(value)

    def complete(self, prompt: Any, max_tokens: int, **kwargs: Any) -> list[int]:
        """Greedy, not stopped by the end of text; the answer's token ids, streamed."""
        tokens: list[int] = []
        with self.client.completions.create(
            model=self.model,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            extra_body={"return_token_ids": True, "ignore_eos": True},
            **kwargs,
        ) as stream:
            for chunk in stream:
                for choice in chunk.choices:
                    tokens += choice.token_ids or []
        return tokens

    def complete_all(
        self, requests: Sequence[tuple[list[int], int]], clients: int
    ) -> list[list[int]]:
        with ThreadPoolExecutor(clients) as pool:
            return list(pool.map(lambda request: self.complete(*request), requests))

    def wait_until(self, metric: str, wanted: float, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while self.metric(metric) != wanted:
            assert time.monotonic() < deadline, f"{metric} is {self.metric(metric)}, not {wanted}"
            time.sleep(0.2)

    def workers(self) -> list[psutil.Process]:
        """The processes that run the model."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if "Worker" in " ".join(child.cmdline())]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
            self.process.kill()
            raise
