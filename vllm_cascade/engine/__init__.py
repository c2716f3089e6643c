# SPDX-License-Identifier: Apache-2.0
"""How a policy gets into a vLLM engine: configuration, scheduler, worker, admission, metrics."""
