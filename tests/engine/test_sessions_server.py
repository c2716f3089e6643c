# SPDX-License-Identifier: Apache-2.0
"""A server that is killed: the next one on the same folder continues its chats."""

import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.engine.server import Server
from tests.engine.test_pipeline_parallel import cores
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.sessions.folder import Folder

FLAGS = ["--kv-policy", "cascade", "--kv-budget", "128", "--kv-recall", "0", "--kv-sessions"]
FLAGS += ["--kv-policy-config", '{"prefill_stride": 64, "num_subcaches": 2}']
FLAGS += ["--max-model-len", "4096", "--kv-cache-memory-bytes", str(32 << 20)]
FLAGS += ["--max-num-batched-tokens", "256", "--max-num-seqs", "4", "--block-size", "32"]
FLAGS += ["--enforce-eager"]
TURNS, NEW, ANSWER = 3, 150, 16


def of(name: str, label: str, value: str) -> str:
    return f'vllm:kv_session{name}(?={{[^}}]*{label}="{value}")'


def kill(server: Server) -> None:
    """SIGKILL to all of a server's processes at once."""
    parent = psutil.Process(server.process.pid)
    for process in [parent, *parent.children(recursive=True)]:
        process.send_signal(signal.SIGKILL)
    server.process.wait(60)


@pytest.mark.slow
def test_killed_and_started_again(tmp_path: Path, book_tokens: list[int]) -> None:
    folder = tmp_path / "sessions"
    flags = [*FLAGS, "--kv-sessions-dir", str(folder)]
    first = Server(tmp_path / "first", flags)
    second = None
    try:
        first.wait()
        history: list[int] = []
        for turn in range(TURNS):
            history += book_tokens[500 * turn : 500 * turn + NEW]
            history += first.complete(history, ANSWER)
        known, history = len(history) - 1, history + book_tokens[9000 : 9000 + NEW]
        deadline = time.monotonic() + 60
        while len(list(folder.glob("[!.]*.session"))) < TURNS:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        truth = first.complete(history, ANSWER)  # not interrupted
        assert first.metric(of("_hits_total", "tier", "memory")) == TURNS
        assert first.metric("vllm:kv_session_kept_total") == TURNS + 1
        kill(first)

        second = Server(tmp_path / "second", flags).wait()
        assert f"{folder}, " in second.log.read_text()
        assert second.metric("vllm:prompt_tokens_total") == 0
        assert second.complete(history, ANSWER) == truth
        second.wait_until(of("_hits_total", "tier", "disk"), 1)
        assert second.metric("vllm:kv_session_hit_tokens_total") == known
        assert second.metric("vllm:kv_session_load_seconds_count") == 1
        # One stride a token of the answer but the last, and those of the new tokens.
        assert second.metric("vllm:kv_policy_strides_total") <= ANSWER - 1 + NEW // 64 + 2
        assert second.metric(of("s", "tier", "memory")) >= 1
        with pytest.raises(KVPolicyError, match="another server uses this folder"):
            Folder(folder).open()
    finally:
        for server in (first, second):
            if server is not None and server.process.poll() is None:
                kill(server)


@pytest.mark.slow
def test_two_engines(tmp_path: Path, book_tokens: list[int]) -> None:
    """Data-parallel engines keep sessions of their own, in folders of their own."""
    folder = tmp_path / "sessions"
    flags = [*FLAGS, "--kv-sessions-dir", str(folder)]
    flags += ["--data-parallel-size", "2", "--api-server-count", "1"]
    first = Server(tmp_path / "first", flags, environment=cores(2))
    second = None

    def complete(server: Server, prompt: list[int], engine: int) -> list[int]:
        header = {"X-data-parallel-rank": str(engine)}
        return server.complete(prompt, ANSWER, extra_headers=header)

    try:
        first.wait(800)
        chats, truth = [], []
        for engine in range(2):
            chat = book_tokens[700 * engine : 700 * engine + NEW]
            chat = chat + complete(first, chat, engine) + book_tokens[9000 : 9000 + NEW]
            truth.append(complete(first, chat, engine))
            chats.append(chat)
        deadline = time.monotonic() + 60
        while min(len(list(path.glob("*.session"))) for path in (folder, folder / "engine-1")) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        kill(first)
        second = Server(tmp_path / "second", flags, environment=cores(2)).wait(800)
        assert [complete(second, chats[n], n) for n in range(2)] == truth
        for engine in range(2):
            label = f'vllm:kv_session_hits_total(?={{[^}}]*engine="{engine}"[^}}]*tier="disk")'
            second.wait_until(label, 1)
    finally:
        for server in (first, second):
            if server is not None and server.process.poll() is None:
                kill(server)
