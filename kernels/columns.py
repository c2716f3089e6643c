# SPDX-License-Identifier: Apache-2.0
"""The columns of a step row and of a rule: the one place that names them, for every device.

A *step row* is what one request does in one stride, int32 ``[STEP_COLUMNS]``. ``attention/step.py``
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
