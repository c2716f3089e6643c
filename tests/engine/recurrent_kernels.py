# SPDX-License-Identifier: Apache-2.0
"""vLLM's own GPU kernels for recurrent layers, interpreted, on the state pages of a policy.

    python -m tests.engine.recurrent_kernels granite4
    python -m tests.engine.recurrent_kernels granite4 recall

On CPUs vLLM has other functions in place of these kernels. Here it finds a Triton for CPUs, and
modules of recurrent layers take their GPU path: short convolutions, Mamba-2 and gated delta nets,
of prompts and of single tokens. Attention runs on the CUDA backend's code, as in ``triton_cpu.py``.
Log-probabilities and kept tokens of 1,000 tokens and 60 more are compared with the oracle; the same
alone, in a batch and from a snapshot. ``RESULT`` has the kernels of vLLM that ran, and how often
our kernels' scratch memory grew after the layers had reserved it for the worst batch. (They do so
when vLLM profiles the model, which its worker for CPUs does not.)

With ``VLLM_USE_V2_MODEL_RUNNER=1`` the engine has the second model runner.
"""

import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
os.environ |= {"TRITON_INTERPRET": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

import torch
import triton.backends
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner

triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False))

from vllm.platforms import current_platform

OPS = "vllm.model_executor.layers.mamba.ops"
DELTA = "vllm.third_party.flash_linear_attention"
launched: set[str] = set()
"""Names of vLLM's kernels for recurrent layers."""


def let_grids_change_arguments() -> None:
    """A function that computes a grid may put tensors into a launch's arguments, as compiled."""
    call = interpreter.GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = inspect.getmodule(self.fn)
        if module is not None and module.__name__.startswith((OPS, DELTA)):
            launched.add(self.fn.__name__)
        if callable(self.grid):
            self.grid = _grid(self, self.grid, args, kwargs)
        return call(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = launch


def _grid(executor: Any, grid: Callable[..., Any], args: Any, kwargs: Any) -> Callable[..., Any]:
    names = inspect.getfullargspec(executor.fn).args
    own = {name: value for name, value in kwargs.items() if name in names}
    given = inspect.getcallargs(executor.fn, *args, **own)

    def size(meta: dict[str, Any]) -> Any:
        found = grid(given)
        for name, value in given.items():
            if isinstance(value, torch.Tensor) and name not in executor.constexprs:
                meta[name] = interpreter._implicit_cvt(value)
        return found

    return size


def take_first_configurations() -> None:
    """Nothing is timed to choose a configuration."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())

    Autotuner.run = run


def use_gpu_paths() -> None:
    """Modules of recurrent layers call vLLM's Triton kernels."""
    with patch.object(type(current_platform), "is_cpu", lambda self: False):
        from vllm.model_executor.layers.mamba.ops import (  # noqa: F401
            causal_conv1d,
            mamba_ssm,
            ssd_combined,
            ssu_dispatch,
        )
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as delta_nets
    from vllm.model_executor.layers.mamba.short_conv import ShortConv

    known = ssu_dispatch._BACKEND_REGISTRY
    known[ssu_dispatch.MambaBackendEnum.CPU] = known[ssu_dispatch.MambaBackendEnum.TRITON]
    ShortConv.forward_native = ShortConv.forward_cuda
    net = delta_nets.QwenGatedDeltaNetAttention
    net.forward_cpu = net.forward_cuda
    delta_nets.fla_chunk_gated_delta_rule = delta_rule
    interpret_delta_rule()


def delta_rule(q: Any, k: Any, v: Any, g: Any, beta: Any, **kwargs: Any) -> Any:
    """vLLM's function without its refusal of fp32, which its kernels compute in as well."""
    from vllm.third_party.flash_linear_attention.ops import chunk

    parameters = inspect.signature(chunk.ChunkGatedDeltaRuleFunction.forward).parameters
    kwargs["scale"] = k.shape[-1] ** -0.5
    rest = [kwargs.get(name, one.default) for name, one in list(parameters.items())[6:]]
    return chunk.ChunkGatedDeltaRuleFunction.apply(q, k, v, g, beta, *rest)


def interpret_delta_rule() -> None:
    """What the interpreter does not know of these kernels.

    They call functions of ``triton.language`` by names of their own, which the interpreter leaves
    alone, and numbers of their loops are tensors, which it makes integers.
    """
    from vllm.third_party.flash_linear_attention.ops import chunk_delta_h

    from vllm_cascade.engine import devices

    devices.DELTA_NETS = ()  # of which vLLM's kernels for CPUs have no fp32

    def numbers(*bounds: Any) -> Iterator[Any]:
        for number in range(*map(int, bounds)):
            yield tl.full([], number, tl.int32)

    vars(chunk_delta_h)["range"] = numbers
    for name, module in list(sys.modules.items()):
        if name.startswith(DELTA):
            for function in ("exp", "exp2", "log", "log2"):
                if getattr(module, function, None) is getattr(tl, function):
                    setattr(module, function, _by_name(function))


def _by_name(function: str) -> Callable[..., Any]:
    return lambda *args: getattr(tl, function)(*args)


def run(family: str, recall: bool) -> None:
    """Compare a model with the oracle, then alone with in a batch and from a snapshot."""
    from tests.engine import test_recall_families as recalling
    from tests.engine import test_recurrent as plain
    from tests.engine.pool import EnginePool
    from tests.engine.test_batching import ForceTokens
    from tests.engine.test_families import POLICIES, check_company
    from tests.oracle.recurrent import run_recurrent, write_recurrent
    from vllm_cascade.attention.cuda.workspace import workspace_of

    policy = POLICIES["cascade-heads"] | {"prefill_stride": 64}
    more: dict[str, Any] = {"max_num_seqs": 4}
    if recall:
        policy = {**recalling.POLICIES["sink"], "budget": 32, "prefill_stride": 32}
        policy |= {"recall_every": 4, "recall_store": 128}
        more = {"logits_processors": [ForceTokens], "max_num_seqs": 4}
    pool, prompt = EnginePool(), 133
    with tempfile.TemporaryDirectory() as folder:
        path = write_recurrent(Path(folder), family)
        llm = plain.engine(pool, path, family, policy, {}, dtype="float32", **more)
        (layers,) = llm.collective_rpc("_all_layers")
        for layer in layers.values():
            layer.impl.reserve(torch.empty(1, layer.num_heads, layer.head_size))
        workspace = workspace_of(torch.device("cpu"))
        before = workspace.grown
        assert before
        if recall:

            def truth_of(tokens: list[int], kept: dict[int, Any]) -> Any:
                return run_recurrent(path, family, tokens, prompt, policy, kept)

            recalling.compare(llm, family, truth_of, policy, False, prompt=prompt, total=180)
        else:
            plain.check(llm, path, family, policy, native=False)
        check_company(llm, policy["prefill_stride"], lengths=(130, 1, 47))
        runner = "V2" if llm.llm_engine.vllm_config.use_v2_model_runner else "V1"
        found = {"runner": runner, "kernels": sorted(launched), "grown": workspace.grown - before}
        print("RESULT " + json.dumps(found))
        pool.close()


def main(family: str, *what: str) -> None:
    let_grids_change_arguments()
    take_first_configurations()
    use_gpu_paths()
    from tests.engine.triton_cpu import use_triton

    use_triton()
    run(family, recall="recall" in what)


if __name__ == "__main__":
    main(*sys.argv[1:])
