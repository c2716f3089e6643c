# SPDX-License-Identifier: Apache-2.0
"""What a spawned API server of vLLM does first, in a process that has not loaded plugins yet.

Nothing here imports the plugin.
"""

import argparse
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs


def configured(args: argparse.Namespace) -> tuple[Any, str, int]:
    """The policy, the worker and the longest stream of parsed arguments."""
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    assert isinstance(config.additional_config, dict)
    policy = config.additional_config.get("kv_policy")
    return policy, config.parallel_config.worker_cls, config.model_config.max_model_len
