# SPDX-License-Identifier: Apache-2.0
"""Independent ground truth: docs/ALGORITHMS.md in plain Python, without code of the plugin."""
