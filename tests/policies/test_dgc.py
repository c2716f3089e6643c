# SPDX-License-Identifier: Apache-2.0
"""Dynamic Global Context: settings, Algorithm 1 by hand, and what an engine makes of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.engine.arg_utils import EngineArgs

from tests.conftest import MODEL
from vllm_cascade.engine.configure import apply_policy
from vllm_cascade.policies.idf import sentence_ends
from vllm_cascade.policies.registry import resolve
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.policies.simulate import simulate
from vllm_cascade.policies.text_importance import IdfTable


def make(**settings: Any) -> Any:
    return resolve({"name": "dgc", "budget": 20, "prefill_stride": 1, **settings})


def test_the_most_important_stay_by_hand() -> None:
    """One sink, two global, two recent; importance of tokens 0..7: the paper's Algorithm 1."""
    policy = make(num_sinks=1, budget=4, global_size=2)
    scores = np.float32([9, 1, 5, 3, 5, 9, 0, 2])
    kept = [step.kept for step in simulate(policy, 8, scores)]
    assert kept[4] == [0, 1, 2, 3, 4]
    assert kept[5] == [0, 2, 3, 4, 5]  # of 1, 2 and 3, token 1 is the least important
    assert kept[6] == [0, 2, 4, 5, 6]  # 3 goes
    assert kept[7] == [0, 4, 5, 6, 7]  # 2 and 4 are equal: the older goes
    regions = list(simulate(policy, 8, scores))[-1].region
    assert regions == ["sink", "global", "global", "recent", "recent"]


def test_sizes() -> None:
    policy = make(budget=100)
    assert (policy.num_global, policy.recent) == (20, 80)
    assert policy.derived() == {"global_size": 20, "recent": 80}
    assert make(budget=100, global_size=99).recent == 1
    assert make(importance="attention").uses_attention and not make().uses_attention
    assert make().score_lag == 16 and make(importance="cluster").token_scores is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"global_size": 20}, "global_size 20 leaves no recent token .* at most 19"),
        ({"budget": 1}, "budget 1 leaves no room"),
        (
            {"idf": "x", "importance": "attention"},
            "idf x is not used with importance attention",
        ),
        ({"order": "importance", "importance": "cluster"}, "no meaning for clusters"),
        ({"importance": "bm25"}, "importance = 'bm25'"),
    ],
)
def test_impossible_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        make(**settings)


def test_by_importance_is_a_permutation_of_the_global_part() -> None:
    policy = make(num_sinks=1, budget=5, global_size=3, order="importance")
    values = torch.tensor([[9.0, 1.0, 3.0, 2.0, 8.0, 7.0], [0.0, 2.0, 2.0, 5.0, 1.0, 1.0]])
    assert policy.arrange(values, 6).tolist() == [[0, 1, 2, 3, 4, 5]] * 2  # nothing deleted yet
    assert policy.arrange(values, 7).tolist() == [[0, 2, 3, 1, 4, 5], [0, 3, 1, 2, 4, 5]]


def test_what_has_no_effect_is_said() -> None:
    assert make(importance="attention", head_reduction="max").remarks() == []
    assert "head_reduction" in make(head_reduction="max").remarks()[0]
    assert "tie" in make(importance="cluster", tie="resident").remarks()[0]


def test_asynchronous_scheduling_is_turned_off_for_token_ids() -> None:
    """The host must know a token's id before the step that scores it."""
    for importance, expected in (("tfidf", False), ("attention", True)):
        config = EngineArgs(model=str(MODEL)).create_engine_config()
        config.scheduler_config.async_scheduling = True
        raw = {"name": "dgc", "budget": 100, "importance": importance}
        apply_policy(config, raw, 1024, 1024)
        assert config.scheduler_config.async_scheduling is expected
        kind = "Async" if expected else ""
        assert config.scheduler_config.scheduler_cls.endswith(f".{kind}KVPolicyScheduler")


def create(idf: str | None, **kwargs: Any) -> None:
    policy = {"name": "dgc", "budget": 100, "prefill_stride": 64, "idf": idf}
    arguments = EngineArgs(model=str(MODEL), additional_config={"kv_policy": policy}, **kwargs)
    arguments.create_engine_config()


def test_errors_before_a_model_is_loaded(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    with pytest.raises(KVPolicyError, match="--skip-tokenizer-init leaves no tokenizer"):
        create(None, skip_tokenizer_init=True)
    with pytest.raises(KVPolicyError, match="cannot be read"):
        create(str(tmp_path / "missing.safetensors"))
    ends = sentence_ends(AutoTokenizer.from_pretrained(MODEL))
    zeros = np.zeros(len(ends), dtype=np.int64)
    path = tmp_path / "other.safetensors"
    IdfTable(1, zeros, zeros, ends, "another").save(path)
    with pytest.raises(KVPolicyError, match="made with another tokenizer"):
        create(str(path))
    create(str(path), skip_tokenizer_init=True)  # a table needs no tokenizer
