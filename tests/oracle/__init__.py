# SPDX-License-Identifier: Apache-2.0
"""Independent ground truth: what docs/INTERNALS.md, "Policies", says; nothing of the plugin."""
