# SPDX-License-Identifier: Apache-2.0
"""How models give keys their positions: rotary embeddings, key norms after them, or neither."""
