# SPDX-License-Identifier: Apache-2.0
"""Runs a policy in a vLLM engine: configuration, scheduler, worker, admission, metrics."""
