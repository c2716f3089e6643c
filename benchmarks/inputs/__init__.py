# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks read: texts, models, shapes and tasks."""
