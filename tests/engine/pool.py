# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines for tests: started on demand, one alive at a time.

They run in the test's own process, which saves most of the 30 s that an engine with processes of
its own takes to start; ``test_processes.py`` covers those.
"""

import gc
import json
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.conftest import MODEL


class EnginePool:
    """Keeps the last engine; tests that ask for the same one in a row share it."""

    def __init__(self) -> None:
        self._key: str | None = None
        self._llm: Any = None
        shorten_starts()

    def get(
        self,
        policy: dict[str, Any] | None,
        model: Path = MODEL,
        env: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """An ``LLM`` in fp32 with this policy (None: stock vLLM), started in this environment."""
        from vllm import LLM
        from vllm.envs import disable_envs_cache

        settings = {
            "model": str(model),
            "dtype": "float32",
            "enforce_eager": True,
            "kv_cache_memory_bytes": 64 << 20,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 512,
            "block_size": 32,
            "additional_config": {} if policy is None else {"kv_policy": plain(policy)},
            "disable_log_stats": False,
            "distributed_executor_backend": "uni",
            **kwargs,
        }
        key = json.dumps([settings, env or {}], sort_keys=True, default=repr)
        if key != self._key:
            self.close()
            # An engine that somebody else left in this process has frozen vLLM's view of it.
            disable_envs_cache()
            try:
                with patch.dict(os.environ, env or {}), patch.object(gc, "collect"):
                    self._llm = LLM(**settings)
            except Exception:
                clean_up()  # what it has begun is not what the next one needs
                raise
            self._key = key
        return self._llm

    def close(self) -> None:
        if self._llm is None:
            return
        with patch.object(gc, "collect"):
            self._llm.llm_engine.engine_core.shutdown()
        self._llm = self._key = None
        clean_up()


def plain(policy: dict[str, Any]) -> dict[str, Any]:
    """The policy without recall, if it says nothing about it (``test_default_recall.py``)."""
    return policy if policy["name"] == "full" else {"recall": 0, **policy}


@cache
def shorten_starts() -> None:
    """Leave out of an engine's start and end what only repeats, for the rest of this process.

    vLLM runs nine full garbage collections for an engine, each over all that was ever imported,
    looks through all modules for kernels that it has replaced already, and starts a process to
    look at a model's class. Here an engine's end has one collection, over what is newer than the
    first engine, the modules are looked through once, and this process looks at classes.
    """
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform

    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None
    look_for_kernels = cache(CpuPlatform.register_triton_kernel_overrides)
    CpuPlatform.register_triton_kernel_overrides = staticmethod(look_for_kernels)
    registry._run_in_subprocess = lambda function: function()


def clean_up() -> None:
    """Forget the process groups and the memory of an engine in this process."""
    from vllm.distributed import cleanup_dist_env_and_memory

    with patch.object(gc, "collect"):
        cleanup_dist_env_and_memory()
    gc.collect()


def prompt_logprobs(output: Any) -> list[float]:
    """Log-probability of every prompt token but the first, from ``prompt_logprobs=0``."""
    return [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]


def generated(output: Any) -> tuple[list[int], list[float]]:
    """A finished request's tokens and their log-probabilities, from ``logprobs=0``."""
    (one,) = output.outputs
    return list(one.token_ids), [next(iter(entry.values())).logprob for entry in one.logprobs]


def preempted(
    llm: Any,
    prompt: list[int],
    params: Any,
    at: Sequence[int] = (20, 45),
    each_step: Callable[[int], None] = lambda step: None,
) -> Any:
    """The output of a request that loses its pages after each of these steps, and begins again."""
    engine = llm.llm_engine
    engine.add_request("again", {"prompt_token_ids": prompt}, params)
    steps, outputs = 0, []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        steps += 1
        each_step(steps)
        if steps in at:
            scheduler = engine.engine_core.engine_core.scheduler
            assert scheduler.reset_prefix_cache(reset_running_requests=True)
    return outputs[-1]


def counters(llm: Any) -> dict[str, int]:
    """The counters of an engine with one worker."""
    (found,) = llm.collective_rpc("kv_policy_counters")
    return found


def pool_usage(llm: Any) -> float:
    """Share of the page pool in use, from the engine's own metric."""
    (gauge,) = [m for m in llm.get_metrics() if m.name == "vllm:kv_cache_usage_perc"]
    return gauge.value
