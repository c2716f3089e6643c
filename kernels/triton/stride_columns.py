# SPDX-License-Identifier: Apache-2.0
"""Columns of step rows of prompt strides on CUDA, in place of the rules of single tokens.

All other columns are those of ``kernels/columns.py``.
"""

# How completed units are inserted and scored.
PLAN = 6
"""Offset of the stride's plan in the table of plans."""
GROUPED = 7
"""Kind of the plan: groups (1) or a range (0), see ``choose.py``."""
PLANNED = 8
"""Leading units that the plan covers; the others stay behind them."""
STAY = 9
"""Number of covered units that stay."""
LAG = 10
"""Scores from the host belong to tokens this many places before the stride's."""
FADE = 14
"""Factor on old scores, as the bits of an fp32."""

# For score-free policies, one launch attends all strides of a request's chunk.
CHUNK = 6
"""Index of the stride's chunk. A chunk's row has the columns of a step row, for all its tokens,
and the following ones."""
SINKS = 7
"""Leading tokens of the stream that are never evicted."""
LEFT = 8
"""Tokens cached after the chunk."""
