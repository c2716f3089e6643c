# SPDX-License-Identifier: Apache-2.0
"""What the GPU commands of ``benchmarks`` share: needs torch and triton, but no vLLM."""
