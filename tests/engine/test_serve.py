# SPDX-License-Identifier: Apache-2.0
"""``vllm serve --kv-policy cascade`` as a user runs it, with vLLM's default compilation."""

import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from benchmarks.demo import PLAIN_CHAT
from tests.conftest import MODEL
from tests.engine.server import VLLM, Server
from tests.engine.test_against_oracle import run_oracle

POLICY = {"name": "cascade", "budget": 128, "prefill_stride": 64, "num_subcaches": 2}
POLICY |= {"recall": 8, "unit": 16}  # the defaults
FLAGS = ["--kv-policy", "cascade", "--kv-budget", "128"]
FLAGS += ["--kv-policy-config", '{"prefill_stride": 64, "num_subcaches": 2}']
FLAGS += ["--max-model-len", "8192", "--kv-cache-memory-bytes", str(32 << 20)]
FLAGS += ["--max-num-batched-tokens", "300", "--max-num-seqs", "8", "--block-size", "32"]
FLAGS += ["--chat-template", PLAIN_CHAT]
COMMAND = [*VLLM, "serve", str(MODEL)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}  # for ``background``
    server = Server(tmp_path_factory.mktemp("serve") / "log", FLAGS, environment=environment)
    yield server.wait()
    server.stop()


def test_the_log_says_what_runs(server: Server) -> None:
    text = server.log.read_text()
    assert (
        len(re.findall(r"KV policy cascade: budget=128, .*recall=8, .*num_subcaches=2", text)) == 1
    )
    # 16 sinks, 128 recalled, 128 of the budget and a unit that fills are 9 pages of 32; stock vLLM
    # would need 256 pages for 8,192 tokens.
    (concurrency,) = re.findall(r"Maximum concurrency for 8,192 tokens .*: ([\d.,]+)x", text)
    (blocks,) = re.findall(r"CPU KV cache size: ([\d,]+) tokens", text)
    pages = int(blocks.replace(",", "")) / 8192 * 9
    assert float(concurrency.replace(",", "")) == pytest.approx(pages / 9, rel=0.01)
    page_bytes = 6 * 32 * 2 * 2 * 64 * 4  # and a few bytes for each unit
    assert pages == pytest.approx((32 << 20) // page_bytes, abs=2)


def test_a_stream_longer_than_the_positions(server: Server, book_tokens: list[int]) -> None:
    """3,149 tokens through 1,024 positions: the next token is the oracle's, as it streams."""
    tokens = book_tokens[: 3 * 1024 + 77]
    with server.client.completions.create(
        model=str(MODEL), prompt=tokens, max_tokens=8, temperature=0, stream=True, logprobs=1
    ) as stream:
        pieces = [chunk.choices[0] for chunk in stream if chunk.choices]
    # A piece is what was ready when the server wrote: on a busy machine, several tokens.
    logprobs = [
        value for piece in pieces if piece.logprobs for value in piece.logprobs.token_logprobs
    ]
    assert len(logprobs) == 8
    truth = run_oracle(POLICY, tokens)
    best = truth.logits_last.log_softmax(-1).max().item()
    assert logprobs[0] == pytest.approx(best, abs=2e-4)
    server.wait_until("vllm:kv_cache_usage_perc", 0.0)
    assert server.metric("vllm:num_preemptions_total") == 0.0


def test_a_request_with_a_budget_of_its_own(server: Server, book_tokens: list[int]) -> None:
    tokens = book_tokens[5000:5700]
    answer = server.client.completions.create(
        model=str(MODEL),
        prompt=tokens,
        max_tokens=1,
        temperature=0,
        logprobs=1,
        extra_body={"vllm_xargs": {"kv_budget": 64}},
    )
    best = run_oracle({**POLICY, "budget": 64}, tokens).logits_last.log_softmax(-1).max().item()
    assert answer.choices[0].logprobs.token_logprobs[0] == pytest.approx(best, abs=2e-4)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"kv_budget": 256}, "kv_budget 256 is more than the server's .*; set it to at most 128"),
        ({"kv_policy": "no"}, "unknown policy 'no', choose from window, sink, cascade"),
        ({"kv_buget": 64}, "did you mean 'kv_budget'"),
    ],
)
def test_what_a_request_may_not_ask_for_is_a_400(asked: dict, message: str, server: Server) -> None:
    ask: dict = {"max_tokens": 2, "extra_body": {"vllm_xargs": asked}}
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        server.client.completions.create(model=str(MODEL), prompt=[1, 2, 3], **ask)
    assert caught.value.status_code == 400
    assert next(iter(asked)) in str(caught.value)


@pytest.mark.parametrize("way", ["stream", "background"])
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"kv_budget": 256}, "kv_budget 256 is more than the server's .*; set it to at most 128"),
        ({"kv_recall": 99}, "kv_recall 99 is more than the server's"),
    ],
)
def test_a_response_that_is_refused_does_not_begin(
    asked: dict, message: str, way: str, server: Server
) -> None:
    ask: dict = {way: True, "extra_body": {"vllm_xargs": asked}}
    with pytest.raises(openai.BadRequestError, match=message):
        server.client.responses.create(model=str(MODEL), input="Who is there?", **ask)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"kv_budget": 64}, 'not read at this place .*"vllm_xargs": {"kv_budget": 64}'),
        (
            {"extra_body": {"vllm_xargs": {"kv_budget": 64}}},
            "argument of OpenAI's Python client",
        ),
        ({"vllm_xargs": {"kv_budget": True}}, "kv_budget = True: Input should be a valid integer"),
        ({"vllm_xargs": {"KV_BUDGET": 64}}, "did you mean 'kv_budget'"),
    ],
)
def test_keys_that_nobody_would_read_are_a_400(asked: dict, message: str, server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        server.client.completions.create(
            model=str(MODEL), prompt=[1, 2, 3], max_tokens=2, extra_body=asked
        )
    assert caught.value.status_code == 400


def test_many_clients_and_one_that_leaves(server: Server, book_tokens: list[int]) -> None:
    def ask(index: int) -> str:
        prompt = book_tokens[index * 500 : index * 500 + 30 + 100 * index]
        answer = server.client.completions.create(
            model=str(MODEL), prompt=prompt, max_tokens=20, temperature=0
        )
        return answer.choices[0].text

    alone = [ask(index) for index in range(4)]
    stream = server.client.completions.create(
        model=str(MODEL), prompt=book_tokens[:50], max_tokens=5000, temperature=0, stream=True
    )
    next(iter(stream))
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, [index % 4 for index in range(12)]))
    stream.close()  # a client that goes away in the middle
    assert together == [alone[index % 4] for index in range(12)]
    server.wait_until("vllm:kv_cache_usage_perc", 0.0)


@pytest.mark.slow
def test_without_the_plugin_the_flag_is_unknown() -> None:
    """Never a silent stock run: vLLM only logs a plugin that does not load."""
    run = subprocess.run(
        [*COMMAND, "--kv-policy", "cascade"],
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_PLUGINS": ""},
    )
    assert run.returncode == 2
    assert "unrecognized arguments: --kv-policy cascade" in run.stderr


@pytest.mark.slow
def test_a_bad_setting_stops_the_server_early() -> None:
    run = subprocess.run(
        [*COMMAND, "--kv-policy", "cascade", "--kv-budget", "1000"], capture_output=True, text=True
    )
    assert run.returncode != 0
    output = run.stdout + run.stderr
    assert "--kv-budget 1000 does not fit 4 sub-caches of base 2" in output
    assert "Loading" not in output
