# SPDX-License-Identifier: Apache-2.0
"""Servers and what they count, without an engine: a stand-in speaks HTTP."""

import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import psutil
import pytest

from benchmarks.running import serving
from benchmarks.running.engines import load_tokenizer
from benchmarks.running.serving import Load, Server, ServerError, Watch, plain_words
from tests.conftest import MODEL

METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} %d
vllm:num_requests_running{engine="1"} 1
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} %f
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0"} %d
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",num_gpu_blocks="101"} 1
"""


def test_a_port_is_free_and_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is none of those that a socket gets which asks for any, and none that is in use."""
    with socket.create_server(("127.0.0.1", serving.free_port())) as busy:
        taken = busy.getsockname()[1]
        assert not 32768 <= taken <= 60999
        other = serving.free_port()
        monkeypatch.setattr(serving.DRAW, "sample", lambda ports, count: [taken, other])
        assert serving.free_port() == other
        monkeypatch.setattr(serving.DRAW, "sample", lambda ports, count: [taken])
        with pytest.raises(ServerError, match="ports from 20000 to 32767 are in use"):
            serving.free_port()


def test_ports_do_not_repeat_with_the_seed() -> None:
    """vLLM seeds ``random`` in every process with an engine; the next server there has one of its
    own all the same."""
    ports = set()
    for _ in range(5):
        random.seed(0)
        ports.add(serving.free_port())
    assert len(ports) > 1


@pytest.fixture
def fake() -> Iterator[tuple[Server, dict]]:
    """A server object whose HTTP side is ours; the numbers can be set."""
    state = {"running": 0, "usage": 0.0, "preempted": 3}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write((METRICS % tuple(state.values())).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = Server("model", [])
    http = HTTPServer(("127.0.0.1", server.port), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield server, state
    http.shutdown()
    http.server_close()


def test_peaks_and_preemptions(fake: tuple[Server, dict], monkeypatch: pytest.MonkeyPatch) -> None:
    server, state = fake
    monkeypatch.setattr(serving, "VLLM", [sys.executable, "-c", "import time; time.sleep(60)"])
    server._command = [*serving.VLLM]
    with server:
        assert server.num_pages == 100, "the pool less vLLM's null block"
        assert server.metrics()["vllm:num_requests_running"] == 1, "summed over its labels"
        with Watch(server, every=0.01) as watch:
            for running, usage, preempted in ((4, 0.5, 3), (2, 0.9, 8), (0, 0.0, 8)):
                state.update(running=running, usage=usage, preempted=preempted)
                time.sleep(0.2)
        process = server._process
    assert (watch.peak_running, watch.peak_pages, watch.preemptions) == (5, 90, 5)
    assert process is not None and process.poll() is not None, "it ends with the block"


def test_a_paused_server_takes_no_time_and_still_ends(
    fake: tuple[Server, dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = fake
    script = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
    script += "while True: pass"  # like vLLM, it ends in its own way
    monkeypatch.setattr(serving, "VLLM", [sys.executable, "-c", script])
    server._command = [*serving.VLLM]
    with server:
        process = psutil.Process(server._process.pid)
        server.pause()
        deadline = time.monotonic() + 10
        while process.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline
        before = process.cpu_times().user
        time.sleep(0.3)
        assert process.cpu_times().user == before
        server.resume()
        while process.cpu_times().user == before:
            assert time.monotonic() < deadline
        server.pause()
        begin = time.monotonic()
    assert not process.is_running() and time.monotonic() - begin < 10, "it heard SIGTERM"


def test_a_server_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "print('starting'); raise SystemExit('ValueError: too little KV cache')"
    monkeypatch.setattr(serving, "VLLM", [sys.executable, "-c", script])
    with pytest.raises(ServerError, match="too little KV cache"), Server("model", []):
        pass


def test_load_is_vllms_random_dataset() -> None:
    words = Load(100, 20, 4, 8).arguments(trial=1)
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert given.pop("--seed").isdecimal()
    assert given == {
        "--dataset-name": "random",
        "--random-input-len": "100",
        "--random-output-len": "20",
        "--num-prompts": "8",
        "--max-concurrency": "4",
    }


def test_random_weights_answer_with_words(
    fake: tuple[Server, dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.benchmarks import serve

    words = plain_words(str(MODEL))
    tokenizer = load_tokenizer(str(MODEL))
    assert [tokenizer.decode([word]).strip() for word in words] == ["the", "of"]
    sent = []
    monkeypatch.setattr(serve, "main", lambda args: sent.append(args) or {"completed": 1})
    load = Load(context=8, output_len=2, concurrency=1, num_prompts=1)
    serving.bench_serve(fake[0], load, 0, str(MODEL), words)
    serving.bench_serve(fake[0], load, 0, str(MODEL))
    assert [args.extra_body for args in sent] == [{"allowed_token_ids": words}, None]


def test_children_run_this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    made = serving.environment()
    assert made["PYTHONPATH"].split(":") == [str(serving.ROOT), "/somewhere"]
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in made, "a server has its usual processes"
