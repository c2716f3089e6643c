# SPDX-License-Identifier: Apache-2.0
"""The columns of a step row, of a rule and of a row of recall: the one place that names them, for
every device.

A *step row* is what one request does in one stride, int32 ``[STEP_COLUMNS]``. ``step/plan.py``
makes rows with numpy; C++ and PyTorch read them as they are, CUDA reads a copy, and in decode the
kernel ``triton/schedule.py`` makes them on the device. ``STREAM`` is -1 in a row that only pads a
batch: it has no tokens, and nothing may be written for it. C++ has the same names in ``step.h``.
"""

STREAM = 0
"""Index of the stride's first token in its stream; -1: padding."""
CACHED = 1
"""Tokens cached before, which is the first new token's position."""
OLD_SLOTS = 2
"""Slots that hold valid metadata before ..."""
NEW_SLOTS = 3
"""... and afterwards."""
START = 4
"""The first new token's place in the step ..."""
LENGTH = 5
"""... and the number of tokens."""
# What inserting a single token deletes: its first rule (strides carry their schedule instead).
LO = 6
"""Among the ranks [LO, HI) ..."""
HI = 7
EVICTS = 8
"""... so many are deleted: 0, 1 (the lowest score), all, or as CELL says."""
CELL = 9
"""> 0: the best of every CELL ranks stays; < 0: the first of every -CELL."""
MORE = 10
"""Further rules, rows ``[RULE_COLUMNS]`` of a table: where they begin ..."""
NUM_MORE = 11
"""... and how many they are."""
# How scores are made and compared.
PER_AGE = 12
"""Whether scores are divided by the number of queries that saw the token."""
NEWEST_STAYS = 13
"""Whether of equal scores the later token stays, or the earlier one."""
DECAY = 14
"""fp32's bits: scores are multiplied by this at every query ..."""
WEIGHT = 15
"""... and its probabilities are added times this; 0: attention makes no scores here."""
STEP_COLUMNS = 16

RULE_COLUMNS = 4
"""lo, hi, evicts, cell, as LO .. CELL of a step row."""

# What a stride does with its request's evicted units, beside its step row, on CUDA.
HOW = 0
"""Whether it chooses anew which units are recalled: not, ``TAKES_ALL`` there are, or ``JUDGED``."""
RING = 1
"""The first of the request's places in the store."""
BEFORE = 2
"""Units recalled in the pages as they are ..."""
NOW = 3
"""... and while the stride is attended."""
BEGIN = 4
"""Units that may be recalled, counted from the request's first evicted one: BEGIN ..."""
END = 5
"""... to END - 1."""
STORED = 6
"""Units that the stride evicts, which get the numbers from END on."""
SINKS = 7
"""Units before the recalled ones, with half of NOW also those before where keys are judged."""
MORE_RECALLED = 8
"""So many units more are recalled when the stride's own evictions are done."""
RECALL_COLUMNS = 12
"""Also some that say nothing: every row begins at a multiple of 16 bytes."""

TAKES_ALL, JUDGED = 1, 2

MOST_UNIT = 128
"""Tokens of a unit that the kernels of recall have room for."""
