# SPDX-License-Identifier: Apache-2.0
"""vLLM's other ways in: its commands, prompts of embeddings, input that goes on, priorities."""

import asyncio
import json
import os
import re
import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.conftest import MODEL, ROOT
from tests.engine.pool import EnginePool, generated
from tests.engine.server import VLLM
from tests.engine.test_against_oracle import run_oracle
from tests.engine.test_faults import FLAGS, POLICY
from tests.engine.test_prefix_caching import ask
from tests.engine.test_refusals import LLAMA

pytestmark = pytest.mark.slow

PLAIN_CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
ENGINE = ["--dtype", "float32", *FLAGS]


def run(*words: str) -> str:
    """A command's output, which must end well and say which policy ran."""
    done = subprocess.run(
        [*VLLM, *words], capture_output=True, text=True, timeout=500, cwd=ROOT, env=environment()
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    assert re.search(r"KV policy cascade: budget=128", said), said[-3000:]
    return said


def environment() -> dict[str, str]:
    return {**os.environ, "VLLM_LOGGING_LEVEL": "INFO", "PYTHONPATH": str(ROOT)}


def test_bench_latency(tmp_path: Path) -> None:
    """Its prompts are random numbers up to 10,000, which the small model has no tokens for."""
    model, out = tmp_path / "model", tmp_path / "latency.json"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 10_240}))
    sizes = ["--input-len", "400", "--output-len", "8", "--batch-size", "2", "--disable-detokenize"]
    turns = ["--num-iters-warmup", "1", "--num-iters", "2", "--output-json", str(out)]
    bare = ["--load-format", "dummy", "--skip-tokenizer-init"]
    run("bench", "latency", "--model", str(model), *bare, *sizes, *turns, *ENGINE)
    assert len(json.loads(out.read_text())["latencies"]) == 2


def test_bench_throughput(tmp_path: Path) -> None:
    """Prompts longer than the model's positions, which stock vLLM would refuse."""
    out = tmp_path / "throughput.json"
    load = ["--dataset-name", "random", "--random-input-len", "1500", "--random-output-len", "8"]
    load += ["--num-prompts", "3", "--output-json", str(out)]
    run("bench", "throughput", "--backend", "vllm", "--model", str(MODEL), *load, *ENGINE)
    found = json.loads(out.read_text())
    assert found["num_requests"] == 3 and found["total_num_tokens"] >= 3 * 1500


def test_run_batch(tmp_path: Path, book_tokens: list[int]) -> None:
    """One answer is the oracle's; one request that cannot be honoured does not stop the other."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = tokenizer.decode(book_tokens[3000:3400])
    body = {
        "model": str(MODEL),
        "messages": [{"role": "user", "content": text}],
        "max_completion_tokens": 4,
        "temperature": 0,
        "logprobs": True,
    }
    asks = [body, {**body, "vllm_xargs": {"kv_budget": 999}}]
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": ask}
        for i, ask in enumerate(asks)
    ]
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    chat = ["--chat-template", PLAIN_CHAT]
    run("run-batch", "-i", str(given), "-o", str(out), "--model", str(MODEL), *chat, *ENGINE)
    good, bad = map(json.loads, out.read_text().splitlines())
    assert "kv_budget 999 is more than the server's" in json.dumps(bad)
    choice = good["response"]["body"]["choices"][0]
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert good["response"]["body"]["usage"]["prompt_tokens"] == len(prompt)
    best = run_oracle(POLICY, prompt).logits_last.log_softmax(-1).max().item()
    assert choice["logprobs"]["content"][0]["logprob"] == pytest.approx(best, abs=2e-4)


def test_embeddings_are_their_tokens(engine_pool: EnginePool, book_tokens: list[int]) -> None:
    tokens = book_tokens[500:1200]
    llm = engine_pool.get(POLICY, max_model_len=8192, enable_prompt_embeds=True)
    ((_, wanted, logprobs),) = ask(llm, [tokens])
    table = load_file(MODEL / "model.safetensors")["model.embed_tokens.weight"]
    params = SamplingParams(max_tokens=20, temperature=0.0, logprobs=0, ignore_eos=True)
    before = llm.llm_engine.collective_rpc("kv_policy_counters")[0]["evicted_tokens"]
    embeds = table[torch.tensor(tokens)].float()
    (answer,) = llm.generate([{"prompt_embeds": embeds}], params, use_tqdm=False)
    after = llm.llm_engine.collective_rpc("kv_policy_counters")[0]["evicted_tokens"]
    tokens, found = generated(answer)
    assert tokens == wanted
    assert found == pytest.approx(logprobs, abs=1e-4)
    assert after - before == 700 + 19 - 132


def test_priorities(engine_pool: EnginePool, book_tokens: list[int]) -> None:
    """Whoever matters more goes first, nobody is preempted, and answers are those of requests
    that are alone."""
    llm = engine_pool.get(
        POLICY, max_model_len=8192, scheduling_policy="priority", num_gpu_blocks_override=12
    )
    prompts = [book_tokens[900 * i : 900 * i + 600] for i in range(6)]
    alone = [ask(llm, [prompt])[0] for prompt in prompts]
    engine = llm.llm_engine
    params = SamplingParams(max_tokens=20, temperature=0.0, logprobs=0, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add_request(f"p{i}", {"prompt_token_ids": prompt}, params, priority=-i)
    ended: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        ended.update({out.request_id: out for out in engine.step() if out.finished})
    assert list(ended)[:2] == ["p5", "p4"] or list(ended)[:2] == ["p4", "p5"]
    for i, (_, tokens, logprobs) in enumerate(alone):
        found, values = generated(ended[f"p{i}"])
        assert found == tokens
        assert values == pytest.approx(logprobs, abs=1e-4)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    assert metrics["vllm:num_preemptions"].value == 0


def test_input_that_goes_on(book_tokens: list[int]) -> None:
    """A prompt that comes in three pieces is answered as one that came whole, where strides are
    cut alike: pieces of whole strides."""
    from vllm import AsyncEngineArgs
    from vllm.engine.protocol import StreamingInput
    from vllm.v1.engine.async_llm import AsyncLLM

    pieces = [book_tokens[:640], book_tokens[640:1280], book_tokens[1280:1320]]
    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        logprobs=0,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )

    async def feed() -> AsyncGenerator[StreamingInput, None]:
        for piece in pieces:
            yield StreamingInput(prompt={"prompt_token_ids": piece}, sampling_params=params)

    async def ask_for_it() -> list[Any]:
        args = AsyncEngineArgs(
            model=str(MODEL),
            dtype="float32",
            enforce_eager=True,
            max_model_len=8192,
            block_size=32,
            max_num_batched_tokens=512,
            kv_cache_memory_bytes=32 << 20,
            additional_config={"kv_policy": POLICY},
        )
        engine = AsyncLLM.from_engine_args(args)
        try:
            return [out async for out in engine.generate(feed(), params, request_id="stream")]
        finally:
            engine.shutdown()

    outputs = asyncio.run(ask_for_it())
    assert outputs[-1].finished
    values = [value for out in outputs for value in generated(out)[1]]
    # What a piece's answer was is not part of the stream: the next piece follows the prompt.
    ends = [640, 1280, 1320]
    for value, end in zip(values, ends, strict=True):
        best = run_oracle(POLICY, book_tokens[:end]).logits_last.log_softmax(-1).max().item()
        assert value == pytest.approx(best, abs=2e-4), end
