# SPDX-License-Identifier: Apache-2.0
"""Other programs that bound a KV cache, asked the same questions as this one."""
