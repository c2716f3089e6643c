# SPDX-License-Identifier: Apache-2.0
"""Measurements and the demo, run from the repository's root: ``python -m benchmarks.demo``."""
