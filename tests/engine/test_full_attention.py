# SPDX-License-Identifier: Apache-2.0
"""Families whose layers all attend to everything, and those that vLLM runs through transformers.

Like ``test_families.py``: tiny random models of the real architectures against transformers'
modules around explicit token lists, 1,000 tokens in strides and 60 more, far past the budget and
the model's 512 positions; and the same alone, among others and from a snapshot.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

from tests.engine.pool import EnginePool
from tests.engine.test_against_oracle import PYTORCH
from tests.engine.test_families import (
    POLICIES,
    cases,
    check,
    check_company,
    engine,
    other_checkpoint,
    random_tokens,
)
from tests.engine.test_prefix_caching import ask
from tests.oracle.families import model_class, write_family
from tests.oracle.full_attention import (
    ALPHA,
    BY_TRANSFORMERS,
    IMAGES,
    NOT_LOADED,
    OTHER_NAMES,
    OWN_MODULES,
    full,
)

ALL = {**OWN_MODULES, **OTHER_NAMES, **BY_TRANSFORMERS}
FAST = [
    ("deepseek-v3", "cascade-heads", {}),
    ("ernie4_5", "sink", {}),  # compiled as a whole
    ("granite-swa", "cascade-heads", {}),  # a layer without a rotary module beside one that has it
]
HOW = [("cascade-heads", {}), ("sink", {}), ("cascade", dict(PYTORCH))]
SLOW = [
    (name, *how)
    for name in ALL
    for how in (HOW[:1] if name in OTHER_NAMES else HOW)
    if (name, *how) not in FAST
]


def written(name: str, made: pytest.TempPathFactory, known: dict[str, Path]) -> Path:
    """The folder of a family's model; two of one type can be of two architectures."""
    if name not in known:
        known[name] = write_family(made.mktemp(name), ALL[name])
    return known[name]


@pytest.fixture(autouse=True)
def experts_in_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's router for CPUs takes sigmoids and biases for groups of experts only: all are one."""
    made = CPURouter.__init__

    def init(router: CPURouter, *args: Any, **kwargs: Any) -> None:
        made(router, *args, **kwargs)
        biased = router.scoring_func == "sigmoid" or router.e_score_correction_bias is not None
        if biased and not router.use_grouped_topk:
            router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1

    monkeypatch.setattr(CPURouter, "__init__", init)


@pytest.fixture(scope="module")
def folders() -> dict[str, Path]:
    """Of the models that tests have asked for."""
    return {}


@pytest.mark.parametrize(("name", "policy", "env"), cases(FAST, SLOW))
def test_family(
    name: str,
    policy: str,
    env: dict[str, str],
    engine_pool: EnginePool,
    tmp_path_factory: pytest.TempPathFactory,
    folders: dict[str, Path],
) -> None:
    family, settings = ALL[name], POLICIES[policy]
    if name in IMAGES:
        pytest.importorskip("torchvision", reason="vLLM's models that see images import it")
    path = written(name, tmp_path_factory, folders)
    llm = engine(engine_pool, path, settings, env)
    named = family.architecture or model_class(family.model_type)
    assert llm.llm_engine.vllm_config.model_config.architectures == [named]
    check(llm, path, (name, family), settings, native=not env)
    if policy == "cascade-heads":
        check_company(llm, settings["prefill_stride"])


@pytest.mark.slow
def test_key_norms_of_weights_that_are_loaded_again(
    engine_pool: EnginePool,
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    folders: dict[str, Path],
) -> None:
    """Their weights are moved again: answers stay what they were, or are another checkpoint's."""
    path, settings = written("hunyuan", tmp_path_factory, folders), POLICIES["cascade-heads"]
    llm = engine(engine_pool, path, settings, {})
    before = ask(llm, [random_tokens(1, 200)])[0]
    llm.collective_rpc("reload_weights")
    llm.reset_prefix_cache()
    after = ask(llm, [random_tokens(1, 200)])[0]
    assert after[1] == before[1]
    np.testing.assert_allclose(after[2], before[2], atol=1e-5)
    other, norms = other_checkpoint(path, tmp_path, "y_layernorm.weight")
    for one in norms.items():  # by the model's own method, one tensor at a time
        llm.apply_model(lambda model, one=one: model.load_weights([one]))
    llm.reset_prefix_cache()
    check(llm, other, ("hunyuan", ALL["hunyuan"]), settings)
    engine_pool.close()  # no other test expects these weights


@pytest.mark.slow
def test_dynamic_rotary_parameters_with_alpha(engine_pool: EnginePool, tmp_path: Path) -> None:
    """In vLLM's own modules they are one base, also past the budget; stock vLLM says the same."""
    path = write_family(tmp_path / "alpha", full("qwen2", **ALPHA))
    base = {"rope_type": "default", "rope_theta": 10000.0 * 1000.0 ** (32 / 30)}
    same = write_family(tmp_path / "base", full("qwen2", **{**ALPHA, "rope_parameters": base}))
    prompts = [random_tokens(1, 40), random_tokens(2, 300)]

    def answers(policy: dict[str, Any] | None, model: Path) -> list[Any]:
        llm = engine_pool.get(policy, model, max_model_len=1024, skip_tokenizer_init=True)
        return ask(llm, prompts)

    short, long = answers(POLICIES["cascade-heads"], path)
    stock, _ = answers(None, path)
    _, of_base = answers(POLICIES["cascade-heads"], same)
    for found, expected in ((short, stock), (long, of_base)):
        assert found[1] == expected[1]
        np.testing.assert_allclose(found[2], expected[2], atol=1e-4)


@pytest.mark.slow
def test_vllm_does_not_load_dbrx(engine_pool: EnginePool, tmp_path: Path) -> None:
    """Without a policy, either: a release that does is to be tested here."""
    path = write_family(tmp_path, NOT_LOADED["dbrx"])
    with pytest.raises(KeyError, match=r"experts\.w13_weight"):
        engine_pool.get(None, path, max_model_len=512, skip_tokenizer_init=True)
