# SPDX-License-Identifier: Apache-2.0
"""One of three tensor-parallel ranks on CPUs: prints a digest of what they reduce together.

python -m tests.attention.three_ranks RANK PORT
"""

import hashlib
import os
import sys

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel

from vllm_cascade.attention.layer import over_ranks

SIZE = 3


def main() -> None:
    rank, port = map(int, sys.argv[1:])
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(SIZE)}
    os.environ["VLLM_DIST_IDENT"] = str(port)  # names the ranks' shared memory
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(SIZE, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        initialize_model_parallel(SIZE)
        parts = torch.rand(SIZE, 1, 4096, generator=torch.Generator().manual_seed(0))
        mean, most = (over_ranks(parts[rank].clone(), how) for how in ("mean", "max"))
    torch.testing.assert_close(mean.double(), parts.double().mean(0), atol=1e-6, rtol=1e-6)
    assert torch.equal(most, parts.amax(0))
    print(hashlib.sha256(mean.numpy().tobytes()).hexdigest())


if __name__ == "__main__":
    main()
