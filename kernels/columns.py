# SPDX-License-Identifier: Apache-2.0
"""Column names of step rows, rule rows and recall rows, shared by all devices.

A *step row* describes one request's work in one stride: int32 ``[STEP_COLUMNS]``. ``step/plan.py``
builds the rows with numpy. C++ and PyTorch read them directly; CUDA reads a copy. During decode,
the kernel in ``triton/schedule.py`` builds them on the device. ``STREAM`` is -1 in a padding row:
it has no tokens, and kernels must write nothing for it. ``step.h`` repeats the names for C++.
"""

STREAM = 0
"""Index of the stride's first token in its stream; -1: padding."""
CACHED = 1
"""Tokens cached before the stride; also the first new token's position."""
OLD_SLOTS = 2
"""Slots with valid metadata before the stride."""
NEW_SLOTS = 3
"""Slots with valid metadata after the stride."""
START = 4
"""Index of the first new token in the step."""
LENGTH = 5
"""Number of new tokens."""
# First eviction rule for a single-token insert. Longer strides carry a schedule instead.
LO = 6
"""First rank of the rule's range [LO, HI)."""
HI = 7
"""End of the rule's range, exclusive."""
EVICTS = 8
"""Evictions in the range: 0, 1 (the lowest score), all, or as CELL says."""
CELL = 9
"""> 0: keep the best of every CELL ranks; < 0: keep the first of every -CELL."""
MORE = 10
"""Index of the first further rule in a table of rows ``[RULE_COLUMNS]``."""
NUM_MORE = 11
"""Number of further rules."""
# How scores are made and compared.
PER_AGE = 12
"""True divides each score by the number of queries that saw the token."""
NEWEST_STAYS = 13
"""Tie-break between equal scores: true keeps the later token, false the earlier one."""
DECAY = 14
"""Score multiplier per query, as fp32 bits."""
WEIGHT = 15
"""Factor on added probabilities, as fp32 bits; 0: attention computes no scores."""
STEP_COLUMNS = 16

RULE_COLUMNS = 4
"""Columns lo, hi, evicts, cell: the same as LO .. CELL of a step row."""

# Recall row: what a stride does with its request's evicted units. Only CUDA reads RING and
# MORE_RECALLED.
HOW = 0
"""Selection of recalled units: 0 (unchanged), ``TAKES_ALL`` or ``JUDGED``."""
RING = 1
"""Index of the request's first place in the store."""
BEFORE = 2
"""Recalled units in the pages before the stride."""
NOW = 3
"""Recalled units during the stride's attention."""
BEGIN = 4
"""First candidate unit, counted from the request's first evicted unit."""
END = 5
"""End of the candidates, exclusive."""
STORED = 6
"""Units that the stride evicts; they are numbered from END."""
SINKS = 7
"""Units before the recalled ones. Keys are judged at unit SINKS + NOW // 2."""
MORE_RECALLED = 8
"""Additional units recalled after the stride's own evictions."""
RECALL_COLUMNS = 12
"""Includes unused columns, so that rows start at multiples of 16 bytes."""

TAKES_ALL, JUDGED = 1, 2

MOST_UNIT = 128
"""Maximum tokens per unit in the recall kernels."""

LONGEST_HEAD = 512
"""Maximum channels of a head in CUDA's kernels, but for latent rows."""

MOST_RULES = 1024
"""Maximum further rules of a request's own policy in the table of rules on CUDA."""
