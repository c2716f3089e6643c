# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks write: tables, pictures, goals and the document of results."""
