# SPDX-License-Identifier: Apache-2.0
"""What tests and benchmarks share: random pools, checks, compilation ahead of time."""
