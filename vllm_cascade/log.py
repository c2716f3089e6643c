# SPDX-License-Identifier: Apache-2.0
"""Our log lines go through vLLM's logger, so they look like its own and obey its settings."""

from vllm.logger import init_logger

logger = init_logger("vllm.plugins.vllm_cascade")
