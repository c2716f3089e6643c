// SPDX-License-Identifier: Apache-2.0
// The columns of a step row and of a rule. ../columns.py has the same numbers and explains them.
#pragma once

#include <cstdint>
#include <cstring>

// clang-format off
enum Column : int32_t {
  STREAM = 0, CACHED = 1, OLD_SLOTS = 2, NEW_SLOTS = 3, START = 4, LENGTH = 5,
  LO = 6, HI = 7, EVICTS = 8, CELL = 9, MORE = 10, NUM_MORE = 11,
  PER_AGE = 12, NEWEST_STAYS = 13, DECAY = 14, WEIGHT = 15,
  STEP_COLUMNS = 16, RULE_COLUMNS = 4,
};
// clang-format on

// What is deleted from the ranks [lo, hi); see rules.h.
struct Rule {
  int32_t lo, hi, evicts, cell;
};
static_assert(sizeof(Rule) == RULE_COLUMNS * sizeof(int32_t), "a row of a table of rules");

// A step row: step[CACHED], and so on.
struct Step {
  const int32_t* row;

  int64_t operator[](Column column) const { return row[column]; }
  float decay() const { return as_float(DECAY); }
  float weight() const { return as_float(WEIGHT); }
  // The rules of a single token: the first one is in the row, the others are in a table.
  template <class Each>
  void each_rule(const int32_t* table, Each each) const {
    each(rule_at(row + LO));
    for (int64_t i = 0; i < row[NUM_MORE]; i++)
      each(rule_at(table + (row[MORE] + i) * RULE_COLUMNS));
  }
  static Rule rule_at(const int32_t* from) {
    return {from[LO - LO], from[HI - LO], from[EVICTS - LO], from[CELL - LO]};
  }

 private:
  float as_float(Column column) const {
    float x;
    std::memcpy(&x, row + column, sizeof(x));
    return x;
  }
};
