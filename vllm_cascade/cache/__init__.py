# SPDX-License-Identifier: Apache-2.0
"""Pages of a bounded KV cache: layout, allocation, quantisation and snapshots."""
