# SPDX-License-Identifier: Apache-2.0
"""vLLM on the CPU with the CUDA backend's code, in every process that it starts.

    python -m tests.engine.triton_cpu serve MODEL ...       as ``vllm``
    python -m tests.engine.triton_cpu check '{"policy": {...}, "engine": {...}}'
    python -m tests.engine.triton_cpu drafts ngram h2o 2    as ``tests.engine.ngram``

Kernels are interpreted. vLLM spawns its processes, and these import the main module again, hence
the calls at the module's level. ``check`` reads a text of a random model, of which some tokens are
decoded, compares it with the oracle, and prints what the workers count. ``drafts`` compares vLLM's
own drafters with an engine without them, which runs on the CPU's own paths.

With ``VLLM_USE_V2_MODEL_RUNNER=1`` they have the second model runner, like ``runner_v2.py``, and
``check`` compares generated tokens.
"""

import os
import sys
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1"}
V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"


def use_triton() -> None:
    """Every engine of this process from here on."""
    if V2:  # before vLLM is imported
        import torch

        from tests.engine.runner_v2 import like_a_gpu

        like_a_gpu()
        torch.Tensor.record_stream = lambda self, stream: None  # a CPU has no streams
    from tests.engine.cuda_backend import use_cuda_backend
    from tests.interpreter import quicken
    from vllm_cascade.engine.worker import KVPolicyWorker
    from vllm_cascade.kernels.triton.repeat import Repeater

    quicken()
    use_cuda_backend()
    counters = KVPolicyWorker.kv_policy_counters

    def all_counters(self: KVPolicyWorker) -> dict[str, int]:
        return counters(self) | {"repeats": Repeater.number}

    KVPolicyWorker.kv_policy_counters = all_counters


def share_experts() -> None:
    """What engines exchange that share a model's experts; vLLM has it for GPUs only."""
    import torch
    import torch.distributed as dist
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gatherv(self: Any, given: Any, dim: int = 0, sizes: Any = None) -> Any:
        if isinstance(given, list):
            return [all_gatherv(self, one, dim, sizes) for one in given]
        sizes = sizes or [len(given)] * self.world_size
        parts = [given.new_empty((size, *given.shape[1:])) for size in sizes]
        # Gloo gathers parts of one size only.
        for rank, part in zip(self.ranks, parts, strict=True):
            if rank == self.global_rank:
                part.copy_(given)
            dist.broadcast(part, src=rank, group=self.device_group)
        return torch.cat(parts)

    def reduce_scatterv(self: Any, given: Any, dim: int = -1, sizes: Any = None) -> Any:
        total = given.clone()
        dist.all_reduce(total, group=self.device_group)
        sizes = sizes or [len(given) // self.world_size] * self.world_size
        return total.split(sizes)[self.rank_in_group].contiguous()

    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv


def check_second_runner(case: dict[str, Any]) -> None:
    """The same as ``check`` for requests that the second runner can run."""
    import json

    from tests.engine.on_device import identity

    (found,) = identity(case["policy"], label="", tiny=True, **case["engine"])
    print("RESULT " + json.dumps(found))


def check(case: dict[str, object]) -> None:
    """Print ``RESULT`` and the workers' counters, if the engine equals the oracle."""
    import json
    import tempfile
    from pathlib import Path

    import numpy as np

    from tests.conftest import MODEL
    from tests.engine import test_triton_recall as triton
    from tests.engine.pool import EnginePool
    from tests.engine.test_prefix_caching import ask
    from tests.oracle.random_models import write_llama

    policy, pool = case["policy"], EnginePool()
    with tempfile.TemporaryDirectory() as folder:
        model = write_llama(folder, num_layers=2, tokenizer_from=MODEL, head_dim=16)
        llm = triton.engine(pool, policy, Path(model), **case["engine"])
        text, prompt = triton.TOKENS[:100], 75
        found = triton.read(llm, [*text, 7], prompt)[:-1]
        truth = triton.run_oracle(policy, text, model, prompt_len=prompt)
        assert np.abs(np.asarray(found) - np.asarray(truth.logprobs)).max() < 2e-4
        assert ("recall" in policy) == (truth.recalls[0] > 10)
        cached = [
            triton.check_turn(llm, triton.TOKENS[200:270], n, policy, model)[0] for n in (0, 64)
        ]
        ask(llm, [[5]], 1)
        counters = llm.collective_rpc("kv_policy_counters")
        print("RESULT " + json.dumps({"cached": cached, "counters": counters}))
        pool.close()


def check_family(case: dict[str, Any]) -> None:
    """The same for a family of models: a text is read, and nothing is decoded."""
    import json
    import tempfile
    from pathlib import Path

    import numpy as np
    from vllm import SamplingParams

    from tests.engine.pool import EnginePool, prompt_logprobs
    from tests.engine.test_families import random_tokens
    from tests.oracle.families import run_family, shallow, write_family
    from tests.oracle.full_attention import OWN_MODULES

    policy, pool, family = case["policy"], EnginePool(), shallow(OWN_MODULES[case["family"]])
    with tempfile.TemporaryDirectory() as folder:
        path = write_family(Path(folder), family)
        own = {"max_model_len": 1024, "max_num_batched_tokens": 64, "skip_tokenizer_init": True}
        llm = pool.get(policy, path, **own, **case["engine"])
        text = random_tokens(3, 230)
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": text}], params)
        truth = run_family(path, family, text, len(text), policy)
        error = np.asarray(prompt_logprobs(output)) - np.asarray(truth.logprobs[: len(text) - 1])
        assert np.abs(error).max() < 2e-4
        counters = llm.collective_rpc("kv_policy_counters")
        print("RESULT " + json.dumps({"counters": counters}))
        pool.close()


if __name__ == "__mp_main__" or (__name__ == "__main__" and sys.argv[1] != "drafts"):
    use_triton()
    share_experts()

if __name__ == "__main__":
    if sys.argv[1] == "check":
        import json

        case = json.loads(sys.argv[2])
        kind = check_second_runner if V2 else check_family if case["family"] else check
        kind(case)
    elif sys.argv[1] == "drafts":
        from tests.engine.ngram import main as compare_drafts

        compare_drafts(*sys.argv[2:], before_drafts=use_triton)
    else:
        from vllm.entrypoints.cli.main import main

        sys.exit(main())
