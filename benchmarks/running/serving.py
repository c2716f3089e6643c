# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` and ``vllm bench``, run by a script: servers, load, and what the server counted.

The load and its latencies are vLLM's own (``vllm.benchmarks.serve``); the server's ``/metrics``
add what a client cannot see: running requests, preemptions, pages.
"""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from benchmarks.running.engines import load_tokenizer
from benchmarks.running.environment import ROOT
from benchmarks.running.leash import Leash

VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
RUNNING = "vllm:num_requests_running"
USAGE = "vllm:kv_cache_usage_perc"
PREEMPTIONS = "vllm:num_preemptions_total"
CACHE_CONFIG = "vllm:cache_config_info"
START_TIMEOUT = 600.0
PORTS = range(20000, 32768)
"""Below those that systems give to sockets which ask for any."""
DRAW = random.SystemRandom()
"""Two processes with an engine would draw the same numbers from ``random``, which vLLM seeds."""


class ServerError(RuntimeError):
    """A server that does not come up or fails; carries the last lines that it wrote."""


@dataclass(frozen=True)
class Load:
    """What is sent: vLLM's ``random`` dataset, all at once, at most ``concurrency`` in flight.

    Attributes:
        context: tokens of a prompt.
    """

    context: int
    output_len: int
    concurrency: int
    num_prompts: int

    def arguments(self, trial: int) -> list[str]:
        """For ``vllm bench serve``."""
        # vLLM's random prompts of one seed begin alike, whatever their length: with the same seed
        # for every load, a prefix cache would know the next one's prompts.
        seed = zlib.crc32(repr((trial, self.context, self.concurrency)).encode())
        return [
            *("--dataset-name", "random", "--seed", str(seed)),
            *("--random-input-len", str(self.context)),
            *("--random-output-len", str(self.output_len)),
            *("--num-prompts", str(self.num_prompts)),
            *("--max-concurrency", str(self.concurrency)),
        ]


def free_port() -> int:
    """A port of this machine that a server may take, and that nobody is given until it does."""
    for port in DRAW.sample(PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError(f"a hundred ports from {PORTS.start} to {PORTS.stop - 1} are in use")


def environment() -> dict[str, str]:
    """A child's environment: this checkout's code, quiet, no network."""
    quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    inherited = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    return {**quiet, **inherited, "PYTHONPATH": path}


class Server:
    """A ``vllm serve`` process, up when the ``with`` block begins, gone when it ends.

    Args:
        cores: that it may use; None: all of ours. vLLM binds threads to the first of those that it
            finds, so servers that run at the same time need cores of their own.

    Attributes:
        model: what clients call it.
        num_pages: pages of its KV pool, less vLLM's null block.
    """

    def __init__(
        self, model: str, arguments: Sequence[str], cores: Collection[int] | None = None
    ) -> None:
        self.port = free_port()
        self.model = model
        self.num_pages = 0
        self._cores = set(os.sched_getaffinity(0) if cores is None else cores)
        self._command = [*VLLM, "serve", model, "--host", "127.0.0.1", "--port", str(self.port)]
        self._command += arguments
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the server
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Begin to start; ``wait`` tells when it is up, so several can start at a time."""
        self._process = subprocess.Popen(
            self._command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment(),
            cwd=ROOT,
            text=True,
            start_new_session=True,  # so that its engine process ends with it
            preexec_fn=lambda: os.sched_setaffinity(0, self._cores),
        )
        self._leash = Leash(self._process.pid)

    def wait(self) -> None:
        """Until it answers.

        Raises:
            ServerError: it ended, or did not answer in time.
        """
        assert self._process is not None, "start() first"
        deadline = time.monotonic() + START_TIMEOUT
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
                (pages,) = self.samples(CACHE_CONFIG, "num_gpu_blocks")
                self.num_pages = int(pages) - 1
                return
            time.sleep(0.5)
        tail = self.tail()
        self.stop()
        raise ServerError(tail)

    def __enter__(self) -> Self:
        self.start()
        self.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def pause(self) -> None:
        """Stop its processes where they are: vLLM's workers spin for a second after a request."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, number: int) -> None:
        assert self._process is not None, "start() first"
        os.killpg(self._process.pid, number)

    def stop(self) -> None:
        """End it and its engine."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.resume()  # a paused process would not hear what follows
        for end in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                self._send(end)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
                break
        self._leash.release()
        self._process = None

    def kill(self) -> None:
        """End it and its engine at once, as a crash does."""
        self._send(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def tail(self) -> str:
        """The last lines it wrote: the error, where there is one."""
        self._log.seek(0)
        written = self._log.read().splitlines()
        errors = [line for line in written if "Error" in line and "Traceback" not in line]
        return "\n".join(errors[-3:] or written[-12:])

    def metrics(self) -> dict[str, float]:
        """Every unlabelled-by-us sample of ``/metrics``, summed over its labels."""
        totals: dict[str, float] = {}
        for sample in self._samples():
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals

    def samples(self, name: str, label: str) -> dict[str, float]:
        """A metric's values by one of its labels."""
        return {s.labels[label]: s.value for s in self._samples() if s.name == name}

    def _samples(self) -> Iterator[Any]:
        from prometheus_client.parser import text_string_to_metric_families

        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        for family in text_string_to_metric_families(text):
            yield from family.samples


@dataclass
class Watch:
    """Peaks of a server's gauges while a block runs, and preemptions during it."""

    server: Server
    every: float = 0.2
    peak_running: int = 0
    peak_pages: int = 0
    preemptions: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._before = self.server.metrics()[PREEMPTIONS]
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.preemptions = round(self.server.metrics()[PREEMPTIONS] - self._before)

    def _follow(self) -> None:
        while not self._stop.wait(self.every):
            with contextlib.suppress(OSError):
                now = self.server.metrics()
                self.peak_running = max(self.peak_running, round(now[RUNNING]))
                self.peak_pages = max(self.peak_pages, round(now[USAGE] * self.server.num_pages))


def plain_words(tokenizer: str) -> list[int]:
    """Tokens that are text whatever comes before them.

    A model of random weights answers with parts of characters, or with tokens that its tokenizer
    does not have. For each of those vLLM reads the request again from the prompt's first token, in
    search of text, and a token would take longer the longer the prompt is.
    """
    made = load_tokenizer(tokenizer)
    return [made.encode(text, add_special_tokens=False)[-1] for text in (" the", " of")]


def bench_serve(
    server: Server, load: Load, trial: int, tokenizer: str, allowed: Sequence[int] = ()
) -> dict[str, Any]:
    """One ``vllm bench serve`` run: its own result, and the server's peaks.

    Args:
        trial: each has prompts of its own.
        allowed: the only tokens to answer with; none: all.

    Raises:
        ServerError: a request failed.
    """
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    body = ["--extra-body", json.dumps({"allowed_token_ids": list(allowed)})] if allowed else []
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    args = parser.parse_args(
        [
            *("--backend", "openai", "--base-url", server.url, "--model", server.model),
            *("--tokenizer", tokenizer, "--ignore-eos", "--temperature", "0", "--disable-tqdm"),
            *("--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "50,99"),
            *("--ready-check-timeout-sec", "0", *load.arguments(trial)),
            *body,
        ]
    )
    with Watch(server) as watch, contextlib.redirect_stdout(None):
        result = serve.main(args)
    if result["completed"] != load.num_prompts:
        raise ServerError(f"{result['completed']} of {load.num_prompts} requests were answered")
    return {
        **{key: value for key, value in result.items() if isinstance(value, int | float)},
        "peak_running": watch.peak_running,
        "peak_pages": watch.peak_pages,
        "num_pages": server.num_pages,
        "preemptions": watch.preemptions,
    }
