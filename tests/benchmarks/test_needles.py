# SPDX-License-Identifier: Apache-2.0
"""What a right answer costs: dictation, and the table."""

import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from vllm import LLM, SamplingParams

from benchmarks.needles import Dictation, Telling, main, table, tell
from benchmarks.running.engines import EngineSettings
from tests.conftest import MODEL


def test_the_table() -> None:
    told = {"sink": [[1.0, 3.0], [4.0]], "recall": [[1.0, 1.0], [3.0]]}
    args = Namespace(base="sink", limit=1, length=4096, capacity=512)
    made = table(told, ["a", "b"], args, {})
    assert made.columns[:4] == ("policy", "a", "b", "all")
    rows = {row[0]: row[1:] for row in made.rows}
    assert rows["sink"] == ("2.000", "4.000", "3.000", "-")
    assert rows["recall"][:3] == ("1.000", "3.000", "2.000")
    assert rows["recall"][3].startswith("-1.0000 (")


def test_dictation(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many nats as the engine gives to the same tokens in a prompt."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    prompt, answer = tuple(range(100, 140)), (7, 300, 41)
    settings = EngineSettings(
        max_model_len=64,
        memory_bytes=1 << 26,
        max_num_seqs=2,
        arguments={"logits_processors": ["benchmarks.needles:Dictated"]},
    )
    engines: list[LLM] = []

    class Noted(EngineSettings):
        def start(self) -> LLM:
            engines.append(super().start())
            return engines[0]

    both = (Dictation("a", prompt, answer), Dictation("b", prompt[5:], answer[::-1]))
    told = tell(Telling("full", Noted(**vars(settings)), both))
    for one, nats in zip(both, told, strict=True):
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        whole = [*one.prompt, *one.answer]
        (output,) = engines[0].generate({"prompt_token_ids": whole}, params, use_tqdm=False)
        last = list(zip(whole, output.prompt_logprobs, strict=True))[-len(one.answer) :]
        assert max(nats) > 1
        np.testing.assert_allclose(nats, [-found[t].logprob for t, found in last], atol=1e-4)


@pytest.mark.slow
def test_a_run(tmp_path: Path) -> None:
    arms = {"sink": {"name": "sink", "unit": 16, "num_sinks": 16}}
    (tmp_path / "arms.json").write_text(json.dumps(arms))
    out = tmp_path / "needles.json"
    argv = ["--model", str(MODEL), "--length", "1024", "--tasks", "niah_single_2", "--limit", "1"]
    main([*argv, "--capacity", "256", "--arms", str(tmp_path / "arms.json"), "--out", str(out)])
    found = json.loads(out.read_text())
    assert [row[0] for row in found["tables"][0]["rows"]] == ["sink", "full"]
    assert all(len(of) == 1 and len(of[0]) > 3 for of in found["data"].values())
