# SPDX-License-Identifier: Apache-2.0
"""What rows of a prompt's strides say on CUDA where those of single tokens have their rules.

All other columns are those of ``kernels/columns.py``.
"""

# How the units that it completes are inserted, and what they are judged by.
PLAN = 6
"""Where its plan begins in a table of plans ..."""
GROUPED = 7
"""... which is of groups (1) or a range (0): ``choose.py`` ..."""
PLANNED = 8
"""... and about the first so many units of the line; the others stay behind them."""
STAY = 9
"""Number of those units that stay."""
LAG = 10
"""Scores from the host are of the tokens so many places before the stride's."""
FADE = 14
"""fp32's bits: old scores are multiplied by this."""

# Where nothing is compared, all strides of a request's chunk are attended in one launch.
CHUNK = 6
"""A stride's: which chunk it is part of. A chunk's row has what a step row has, of all its
tokens, ..."""
SINKS = 7
"""... the tokens at the stream's start that are never deleted ..."""
LEFT = 8
"""... the tokens cached afterwards ..."""
STRIDES = 9
"""... and its strides."""
