# SPDX-License-Identifier: Apache-2.0
"""Independent ground truth: written from the semantics page, imports nothing of the plugin."""
