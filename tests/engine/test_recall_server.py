# SPDX-License-Identifier: Apache-2.0
"""A server's host memory under prompts that never return: bounded, flat, and as the gauge says."""

from pathlib import Path

import psutil
import pytest

from tests.engine.server import Server

BOUND = 0.35  # GiB
FLAGS = ["--kv-policy", "sink", "--kv-budget", "256", "--kv-recall", "4"]
FLAGS += ["--kv-policy-config", f'{{"recall_memory": {BOUND}, "recall_store": 8192}}']
FLAGS += ["--max-model-len", "9000", "--kv-cache-memory-bytes", str(64 << 20)]
FLAGS += ["--max-num-batched-tokens", "1024", "--max-num-seqs", "16", "--enable-prefix-caching"]
PROMPT, ANSWER = 8000, 4


def resident(server: Server) -> int:
    """Bytes of all of the server's processes."""
    parent = psutil.Process(server.process.pid)
    return sum(p.memory_info().rss for p in (parent, *parent.children(recursive=True)))


def gauge(server: Server, name: str) -> float:
    return server.metric(f"vllm:kv_policy_recall_memory_{name}")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_400_prompts(tmp_path: Path, book_tokens: list[int]) -> None:
    """One after another, then 16 at once.

    The system hands out memory when it is first written to. So all of the pool and what a long
    prompt needs have been used, and units have been dropped, before anything is measured.
    """
    prompts = [[5 + i, *book_tokens[137 * i :][: PROMPT - 1]] for i in range(400)]
    assert all(len(prompt) == PROMPT for prompt in prompts)
    dev_mode = {"VLLM_SERVER_DEV_MODE": "1"}
    server = Server(tmp_path / "server", FLAGS, environment=dev_mode).wait()
    try:
        used_once = [(prompt, ANSWER) for prompt in prompts[-48:]]
        server.complete_all(used_once, clients=16)
        server.post("/reset_prefix_cache")
        server.complete(book_tokens[:2000], ANSWER)
        at_start = resident(server) - gauge(server, "bytes")
        alone, used = [], []
        for prompt in prompts[:300]:
            alone.append(server.complete(prompt, ANSWER))
            used.append((resident(server), gauge(server, "bytes")))
        together = server.complete_all([(p, ANSWER) for p in prompts[200:]], clients=16)
        used.append((resident(server), gauge(server, "bytes")))
        assert together[:100] == alone[200:]
        limit = gauge(server, "limit_bytes")
        assert limit <= BOUND * 2**30
        print(f"{used[0][1] / 2**20:.1f} MiB a prompt, limit {limit / 2**20:.0f} MiB")
        for i in (0, 49, 99, 199, 299, 300):
            rss, told = used[i]
            print(f"{i + 1}: resident {rss / 2**20:.0f} MiB, gauge {told / 2**20:.0f} MiB")
        assert 400 * used[0][1] > 5 * limit, "they would not fit"
        assert all(told <= limit for _, told in used)
        assert min(told for _, told in used[100:]) > 0.8 * limit
        assert max(rss for rss, _ in used[99:]) <= 1.02 * used[99][0]
        for rss, told in used[99:]:
            assert rss - at_start == pytest.approx(told, rel=0.1)
    finally:
        server.stop()
