# SPDX-License-Identifier: Apache-2.0
"""What a user of the API may ask for, on a live server whose policy evicts: it works as the oracle
says, or it is a 400 that says why. Requests too large for the pool: ``test_faults.py``."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs

from tests.conftest import MODEL
from tests.engine.pool import EnginePool
from tests.engine.server import FORKED_VLLM, Server
from tests.engine.test_against_oracle import run_oracle

POLICY = {"name": "cascade", "budget": 64, "prefill_stride": 32, "num_subcaches": 2, "recall": 0}
LAYERS, RANK, SCALE = 6, 8, 2.0
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def write_lora(adapter: Path, merged: Path) -> None:
    """A random adapter, and the shipped model with the same change made to its weights."""
    generator = torch.Generator().manual_seed(0)
    weights = load_file(MODEL / "model.safetensors")
    lora = {}
    for layer in range(LAYERS):
        for module in ("self_attn.q_proj", "mlp.down_proj"):
            name = f"model.layers.{layer}.{module}"
            rows, columns = weights[f"{name}.weight"].shape
            a = torch.randn(RANK, columns, generator=generator) * 0.05
            b = torch.randn(rows, RANK, generator=generator) * 0.05
            lora[f"base_model.model.{name}.lora_A.weight"] = a
            lora[f"base_model.model.{name}.lora_B.weight"] = b
            weights[f"{name}.weight"] = weights[f"{name}.weight"].float() + SCALE * b @ a
    adapter.mkdir()
    save_file(lora, adapter / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK, "bias": "none"}
    settings |= {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    shutil.copytree(MODEL, merged)
    save_file(
        {name: weight.float() for name, weight in weights.items()}, merged / "model.safetensors"
    )


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    write_lora(folder / "adapter", folder / "merged")
    return folder / "merged"


@pytest.fixture(scope="module")
def server(merged: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("limits")
    (folder / "chat.jinja").write_text(TEMPLATE)
    flags = ["--kv-policy", "cascade", "--kv-budget", "64", "--block-size", "32"]
    flags += ["--kv-recall", "0"]
    flags += ["--kv-policy-config", '{"prefill_stride": 32, "num_subcaches": 2}']
    flags += ["--max-model-len", "2048", "--max-num-batched-tokens", "128", "--enforce-eager"]
    flags += ["--kv-cache-memory-bytes", str(32 << 20), "--chat-template", folder / "chat.jinja"]
    flags += ["--enable-lora", "--max-lora-rank", str(RANK)]
    flags += ["--lora-modules", f"adapter={merged.parent / 'adapter'}"]
    development = {"VLLM_SERVER_DEV_MODE": "1"}
    server = Server(folder / "log", [str(flag) for flag in flags], FORKED_VLLM, development)
    yield server.wait()
    server.stop()


@pytest.fixture(scope="module")
def prompt(book_tokens: list[int]) -> list[int]:
    """Five strides and a bit, four times the budget."""
    return book_tokens[4000:4270]


def ask(server: Server, prompt: Any, max_tokens: int = 8, **kwargs: Any) -> list[Any]:
    """The answer's choices; unknown keywords are vLLM's own parameters."""
    known = {"n", "logprobs", "stop", "seed", "temperature", "model", "echo"}
    arguments = {"model": server.model, "temperature": 0}
    arguments |= {key: value for key, value in kwargs.items() if key in known}
    own = {key: value for key, value in kwargs.items() if key not in known}
    answer = server.client.completions.create(
        prompt=prompt,
        max_tokens=max_tokens,
        extra_body={"return_token_ids": True, **own},
        **arguments,
    )
    return answer.choices


def oracle_logprobs(tokens: list[int]) -> torch.Tensor:
    return run_oracle(POLICY, tokens).logits_last.log_softmax(-1)


def test_logprobs_and_prompt_logprobs(server: Server, prompt: list[int]) -> None:
    (choice,) = ask(server, prompt, 1, logprobs=5, prompt_logprobs=0)
    truth = run_oracle(POLICY, prompt)
    best = truth.logits_last.log_softmax(-1).topk(5)
    assert choice.token_ids == [best.indices[0].item()]
    given = sorted(choice.logprobs.top_logprobs[0].values(), reverse=True)
    assert given == pytest.approx(best.values.tolist(), abs=2e-4)
    entries = [next(iter(entry.values()))["logprob"] for entry in choice.prompt_logprobs[1:]]
    assert entries == pytest.approx(truth.logprobs, abs=2e-4)
    (echoed,) = ask(server, prompt, 1, logprobs=1, echo=True)
    assert echoed.logprobs.token_logprobs[1:-1] == pytest.approx(truth.logprobs, abs=2e-4)


def test_beam_search(server: Server, prompt: list[int]) -> None:
    """Two steps of three beams; a beam is a prompt to the engine, so strides run through it."""
    width, beams = 3, [([], 0.0)]
    for _ in range(2):
        longer = []
        for tokens, score in beams:
            top = oracle_logprobs(prompt + tokens).topk(2 * width)
            for token, logprob in zip(top.indices.tolist(), top.values.tolist(), strict=True):
                longer.append(([*tokens, token], score + logprob))
        beams = sorted(longer, key=lambda beam: -beam[1])[:width]
    choices = ask(server, prompt, 2, n=width, use_beam_search=True)
    assert [choice.token_ids for choice in choices] == [tokens for tokens, _ in beams]


def test_four_answers(server: Server, prompt: list[int]) -> None:
    with pytest.raises(openai.BadRequestError, match="n must be 1 when using greedy sampling"):
        ask(server, prompt, 8, n=4)
    sampled = ask(server, prompt, 8, n=4, temperature=1.0, seed=7)
    assert len({tuple(choice.token_ids) for choice in sampled}) == 4
    again = ask(server, prompt, 8, n=4, temperature=1.0, seed=7)
    assert [c.token_ids for c in again] == [c.token_ids for c in sampled]


def test_a_seed_does_not_depend_on_the_chunks(
    engine_pool: EnginePool, book_tokens: list[int]
) -> None:
    """vLLM's CPU runner dies of a seeded request whose prompt takes more than one step."""
    answers = []
    for token_budget in (64, 1024):
        llm = engine_pool.get(POLICY, max_model_len=2048, max_num_batched_tokens=token_budget)
        params = [SamplingParams(max_tokens=20, seed=seed, ignore_eos=True) for seed in (1, 1, 2)]
        prompts = [{"prompt_token_ids": book_tokens[:300]}] * 2
        prompts += [{"prompt_token_ids": book_tokens[500:700]}]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answers.append([list(output.outputs[0].token_ids) for output in outputs])
    engine_pool.close()
    assert answers[0] == answers[1]
    assert answers[0][0] == answers[0][1] != answers[0][2]


def test_lengths(server: Server, prompt: list[int], book_tokens: list[int]) -> None:
    (eight,), (one,) = ask(server, prompt, 8), ask(server, prompt, 1)
    assert one.token_ids == eight.token_ids[:1] and one.finish_reason == "length"
    (short,) = ask(server, [5], 3)
    assert short.token_ids[0] == oracle_logprobs([5]).argmax().item()
    (longest,) = ask(server, book_tokens[:2047], 1)
    assert longest.token_ids == [oracle_logprobs(book_tokens[:2047]).argmax().item()]


@pytest.mark.parametrize(
    ("length", "max_tokens", "message"),
    [
        (0, 1, "at least one prompt"),
        (1, 0, "max_tokens must be at least 1"),
        (2049, 1, "maximum context length is 2048"),
        (5000, 1, "maximum context length is 2048"),
    ],
)
def test_refused_lengths(
    length: int, max_tokens: int, message: str, server: Server, book_tokens: list[int]
) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        ask(server, book_tokens[:length], max_tokens)
    with pytest.raises(openai.BadRequestError, match="non-empty"):
        ask(server, "", 1)
    assert server.get("/health") == ""


def test_stop_strings(server: Server, prompt: list[int]) -> None:
    (whole,) = ask(server, prompt, 30)
    stop = whole.text[40:46]
    (stopped,) = ask(server, prompt, 30, stop=[stop])
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole.text[: whole.text.index(stop)]
    (late,) = ask(server, prompt, 30, stop=["t"], min_tokens=20)
    assert len(late.token_ids) >= 20


def test_structured_output(server: Server, prompt: list[int]) -> None:
    names = ["Captain Wentworth", "Anne Elliot"]
    (choice,) = ask(server, prompt, 30, structured_outputs={"choice": names})
    assert choice.text in names
    (choice,) = ask(server, prompt, 40, structured_outputs={"regex": "[a-c]{30}"})
    assert re.fullmatch("[a-c]{30}", choice.text)


def test_chat(server: Server) -> None:
    message = "Anne hoped she had outlived the age of blushing. " * 12
    answer = server.client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": message}],
        max_completion_tokens=10,
        temperature=0,
    )
    (plain,) = ask(server, f"user: {message}\n", 10)
    assert answer.usage.prompt_tokens > 2 * 68
    assert answer.choices[0].message.content == plain.text


def test_lora(server: Server, merged: Path, prompt: list[int]) -> None:
    """An adapter's keys are evicted like others: the oracle has it in its weights."""
    (base,) = ask(server, prompt, 1, prompt_logprobs=0)
    (tuned,) = ask(server, prompt, 1, prompt_logprobs=0, model="adapter")
    given = [next(iter(entry.values()))["logprob"] for entry in tuned.prompt_logprobs[1:]]
    assert given == pytest.approx(run_oracle(POLICY, prompt, merged).logprobs, abs=5e-4)
    other = [next(iter(entry.values()))["logprob"] for entry in base.prompt_logprobs[1:]]
    assert given != pytest.approx(other, abs=0.1)


def test_reset_prefix_cache_while_streaming(server: Server, prompt: list[int]) -> None:
    """Running requests are replayed, and their clients notice nothing."""
    truth = server.complete(prompt, 80)
    preempted = server.metric("vllm:num_preemptions_total")
    tokens: list[int] = []
    with server.client.completions.create(
        model=server.model,
        prompt=prompt,
        max_tokens=80,
        temperature=0,
        stream=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    ) as stream:
        for number, chunk in enumerate(stream):
            tokens += chunk.choices[0].token_ids or []
            if number == 20:
                server.post("/reset_prefix_cache?reset_running_requests=true")
    assert server.metric("vllm:num_preemptions_total") == preempted + 1
    assert tokens == truth
    server.post("/reset_prefix_cache")
    assert server.complete(prompt, 80) == truth


def test_sleep_and_wake_up(server: Server, prompt: list[int]) -> None:
    """A CPU engine frees no memory in its sleep, and says so; it pauses, and goes on as before."""
    truth = server.complete(prompt, 10)
    server.post("/sleep?level=1")
    assert json.loads(server.get("/is_sleeping")) == {"is_sleeping": True}
    with pytest.raises(openai.APITimeoutError):
        impatient = server.client.with_options(timeout=1.0)
        impatient.completions.create(model=server.model, prompt=prompt, max_tokens=1)
    server.post("/wake_up")
    assert server.complete(prompt, 10) == truth
    assert "sleep mode is not supported on CPU" in server.log.read_text()


def test_sleep_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"[Ss]leep mode is not supported"):
        EngineArgs(
            model=str(MODEL), enable_sleep_mode=True, additional_config={"kv_policy": POLICY}
        ).create_engine_config()
