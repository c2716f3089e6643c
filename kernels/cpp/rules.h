// SPDX-License-Identifier: Apache-2.0
// Applies victim rules (../../vllm_cascade/policies/rules.py) to tokens in order of age. From the
// ranks [lo, hi) a rule deletes none, all, the lowest value, or all but one of every cell of `cell`
// ranks: it keeps the highest value or the oldest. Each rule sees the ranks left by the last one.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "step.h"
#include "vec.h"

constexpr int64_t BLOCK = 64;  // entries per block; only blocks with a match are searched

// The index of the lowest value in [from, to): the first or the last of equal ones.
static inline int64_t lowest(const float* value, int64_t from, int64_t to, bool last) {
  float least = INFINITY;
  int64_t i = from;
  if (to - from >= 4 * W) {
    vf low[4] = {splat(INFINITY), splat(INFINITY), splat(INFINITY), splat(INFINITY)};
    for (; i + 4 * W <= to; i += 4 * W)
      for (int k = 0; k < 4; k++) low[k] = vmin(load(value + i + k * W), low[k]);
    least = -largest(-vmin(vmin(low[0], low[1]), vmin(low[2], low[3])));
  }
  for (; i < to; i++) least = std::min(least, value[i]);
  const int64_t blocks = (to - from + BLOCK - 1) / BLOCK;
  for (int64_t block = 0; block < blocks; block++) {
    const int64_t begin = from + (last ? blocks - 1 - block : block) * BLOCK;
    const int64_t end = std::min(begin + BLOCK, to);
    int32_t any = 0;
    for (i = begin; i < end; i++) any |= value[i] == least;
    if (!any) continue;
    for (i = last ? end - 1 : begin; value[i] != least;) i += last ? -1 : 1;
    return i;
  }
  return from;  // all are NaN
}

// The index of the highest value in [from, to), which are few.
static inline int64_t highest(const float* value, int64_t from, int64_t to, bool last) {
  int64_t best = from;
  for (int64_t i = from + 1; i < to; i++)
    if (last ? value[i] >= value[best] : value[i] > value[best]) best = i;
  return best;
}

// Calls each(begin, end, survivor) for every cell of [from, to).
template <class Each>
static inline void each_cell(const Rule& rule, const float* value, int64_t from, int64_t to,
                             bool newest_stays, Each each) {
  const int64_t size = std::abs(rule.cell);
  for (int64_t begin = from; begin < to; begin += size) {
    const int64_t end = std::min(begin + size, to);
    each(begin, end, rule.cell < 0 ? begin : highest(value, begin, end, newest_stays));
  }
}

// Tokens in order of age: compared values, and columns in the caller's arrays. Tokens of a stride
// are stored behind the line until they are appended.
struct Line {
  float* value;
  int32_t* column;
  int64_t begin, end;  // the line's range in both arrays
  bool newest_stays;

  void append(int64_t from) {
    value[end] = value[from];
    column[end++] = column[from];
  }
  void apply(const Rule& rule) {
    if (!rule.evicts) return;
    const int64_t lo = begin + rule.lo, hi = begin + rule.hi;
    if (rule.cell) {
      int64_t stay = lo;
      each_cell(rule, value, lo, hi, newest_stays, [&](int64_t, int64_t, int64_t best) {
        value[stay] = value[best];
        column[stay++] = column[best];
      });
      return erase(stay, hi);
    }
    if (rule.evicts == hi - lo) return erase(lo, hi);
    const int64_t victim = lowest(value, lo, hi, !newest_stays);
    erase(victim, victim + 1);
  }

 private:
  // Moves the shorter part.
  void erase(int64_t from, int64_t to) {
    const bool head = from - begin < end - to;
    move(value, from, to, head);
    move(column, from, to, head);
    (head ? begin : end) += head ? to - from : from - to;
  }
  template <class Word>
  void move(Word* words, int64_t from, int64_t to, bool head) const {
    if (head)
      std::memmove(words + begin + to - from, words + begin, sizeof(Word) * (from - begin));
    else
      std::memmove(words + from, words + to, sizeof(Word) * (end - to));
  }
};

// Tokens by place: each has a rank, and empty places have -1. Only ranks change.
struct Places {
  int64_t size;          // a multiple of BLOCK
  int32_t* rank;
  const float* score;
  const int32_t* token;  // token indices; null: scores are compared without ages
  int64_t seen;          // tokens seen so far
  bool newest_stays;

  void apply(const Rule& rule) {
    if (!rule.evicts) return;
    if (rule.cell) return thin(rule);
    const bool all = rule.evicts == rule.hi - rule.lo;
    const int32_t lo = all ? rule.lo : victim(rule.lo, rule.hi), hi = lo + rule.evicts;
    for (int64_t i = 0; i < size; i += W) {
      const vi old = load_as<vi>(rank + i);
      const vi left = (old >= hi ? old - rule.evicts : old) | ((old >= lo) & (old < hi));
      std::memcpy(rank + i, &left, sizeof(left));
    }
  }
  // The first empty place before `end`, or -1.
  int64_t free(int64_t end) const {
    for (int64_t from = 0; from < end; from += BLOCK) {
      int32_t least = 0;
      for (int64_t i = from; i < from + BLOCK; i++) least = std::min(least, rank[i]);
      for (int64_t i = from; least < 0 && i < std::min(from + BLOCK, end); i++)
        if (rank[i] < 0) return i;
    }
    return -1;
  }

 private:
  vf compared(int64_t i) const {
    const vf x = load(score + i);
    if (!token) return x;
    const vi age = (int32_t)seen - load_as<vi>(token + i);
    return x / __builtin_convertvector(age < 1 ? splat_int(1) : age, vf);
  }
  // The rank of the lowest value in [lo, hi): reduced per lane, then over lanes.
  int32_t victim(int32_t lo, int32_t hi) const {
    vf low = splat(INFINITY);
    vi found = splat_int(-1);
    for (int64_t from = 0; from < size; from += BLOCK) {
      int32_t any = 0;
      for (int64_t i = from; i < from + BLOCK; i++) any |= (rank[i] >= lo) & (rank[i] < hi);
      for (int64_t i = from; any && i < from + BLOCK; i += W) {
        const vi at = load_as<vi>(rank + i);
        const vf x = compared(i);
        const vi tied = (x == low) & (newest_stays ? at < found : at > found);
        const vi takes = (at >= lo) & (at < hi) & ((found < 0) | (x < low) | tied);
        low = takes ? x : low;
        found = takes ? at : found;
      }
    }
    int best = 0;
    for (int i = 1; i < W; i++) {
      const bool tied = low[i] == low[best] && (found[i] < found[best]) == newest_stays;
      if (found[i] >= 0 && (found[best] < 0 || low[i] < low[best] || tied)) best = i;
    }
    return found[best];
  }
  void thin(const Rule& rule) {
    const int64_t n = rule.hi - rule.lo;
    std::vector<int64_t> place(n);
    std::vector<float> value(n);
    for (int64_t i = 0; i < size; i++) {
      if (rank[i] >= rule.hi) rank[i] -= rule.evicts;
      else if (rank[i] >= rule.lo) place[rank[i] - rule.lo] = i;
    }
    for (int64_t i = 0; i < n; i++) value[i] = compared(place[i] / W * W)[place[i] % W];
    int32_t left = rule.lo;
    each_cell(rule, value.data(), 0, n, newest_stays, [&](int64_t from, int64_t to, int64_t best) {
      for (int64_t i = from; i < to; i++) rank[place[i]] = -1;
      rank[place[best]] = left++;
    });
  }
};
