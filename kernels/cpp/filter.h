// SPDX-License-Identifier: Apache-2.0
// Which stored units may be worth most, by bounds of blocks and then of units: the candidates that
// are judged key by key. Bounds limit the logit of any key within them.
// vllm_cascade/attention/torch/recall.py has the rules.
#pragma once

#include "store.h"

namespace filter {

constexpr int64_t PANEL = 64;  // blocks or units whose bounds lie side by side
static_assert(PANEL % COLUMNS == 0, "panels are whole registers");

// Queries of 8 bits: words of channels above 0, which meet the largest values, then of those below.
struct Coarse {
  int64_t rows;    // of a KV head
  int32_t* words;  // [H, rows, 2, D / 4]
  int32_t* less;   // [H, rows], what makes up for bounds that count from 128
  float* step;     // [H, rows]
};

// Limits of a level: of all blocks, or of the units of some.
struct Level {
  int64_t columns;  // whole panels of them
  float* x;         // [H, rows, columns] logits
  float* limits;    // [H * G, columns]
};

// `some` of the queries' high parts.
inline void round_queries(const Judge& judge, const Queries& queries, const Coarse& coarse) {
  const int64_t words = judge.words(), asking = judge.store.num_asking;
  const int64_t each = coarse.rows / judge.layer.group;
  for (int64_t row = 0; row < judge.layer.num_heads * coarse.rows; row++) {
    const int64_t from = row / each * asking + spread(row % each, asking, each);
    coarse.step[row] = queries.step[from] * 128;
    coarse.less[row] = queries.less[from * 2];
    int8_t* to = (int8_t*)(coarse.words + row * 2 * words);
    for (int64_t word = 0; word < words; word++) {
      int8_t part[4];
      std::memcpy(part, queries.words + (from * words + word) * 2, 4);
      for (int64_t i = 0; i < 4; i++) {
        to[word * 4 + i] = std::max<int8_t>(part[i], 0);
        to[(words + word) * 4 + i] = std::min<int8_t>(part[i], 0);
      }
    }
  }
}

// Logits of `Rows` queries for a panel of bounds `[2 D / 4, PANEL]`. `next`: a panel to prefetch, or
// null: panels are about as large as memory's pages, at whose ends a processor's own stops.
template <int Rows>
void multiply_rows(const Judge& judge, const Coarse& coarse, int64_t row, const int32_t* bounds,
                   const float* scale, float* x, int64_t stride, const int32_t* next) {
  const int64_t words = 2 * judge.words();
  const int32_t* query = coarse.words + row * words;
  for (int64_t at = 0; at < PANEL; at += COLUMNS) {
    vi sums[Rows][PARTS];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
      for (int p = 0; p < PARTS; p++) sums[r][p] = splat_int(coarse.less[row + r]);
    for (int64_t word = 0; word < words; word++) {
      vi bound[PARTS];
#pragma GCC unroll 4
      for (int p = 0; p < PARTS; p++) {
        if (next) __builtin_prefetch(next + word * PANEL + at + p * W);
        bound[p] = load_as<vi>(bounds + word * PANEL + at + p * W) ^ SIGNS;
      }
#pragma GCC unroll 8
      for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < PARTS; p++)
          sums[r][p] = add_products(sums[r][p], bound[p], query[r * words + word]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
      for (int p = 0; p < PARTS; p++)
        store(x + r * stride + at + p * W, __builtin_convertvector(sums[r][p], vf) *
                                               (load(scale + at + p * W) * coarse.step[row + r]));
  }
}

// One panel under all queries of a KV head.
inline void multiply(const Judge& judge, const Coarse& coarse, const Level& level, int64_t head,
                     int64_t panel, const int32_t* bounds, const float* scale,
                     const int32_t* next) {
  constexpr int MOST = W == 4 ? 3 : 6;
  const int64_t end = (head + 1) * coarse.rows, stride = level.columns;
  for (int64_t row = head * coarse.rows; row < end;) {
    float* x = level.x + row * stride + panel * PANEL;
    const int64_t n = std::min<int64_t>(end - row, MOST);
    switch (n) {
      case 6: multiply_rows<6>(judge, coarse, row, bounds, scale, x, stride, next); break;
      case 5: multiply_rows<5>(judge, coarse, row, bounds, scale, x, stride, next); break;
      case 4: multiply_rows<4>(judge, coarse, row, bounds, scale, x, stride, next); break;
      case 3: multiply_rows<3>(judge, coarse, row, bounds, scale, x, stride, next); break;
      case 2: multiply_rows<2>(judge, coarse, row, bounds, scale, x, stride, next); break;
      case 1: multiply_rows<1>(judge, coarse, row, bounds, scale, x, stride, next); break;
    }
    row += n, next = nullptr;
  }
}

// The bounds of 64 units, of `n` blocks, side by side. `next`: blocks to prefetch.
inline void pack_panel(const Judge& judge, int64_t head, const int64_t* blocks, int64_t n,
                       const int64_t* next, int64_t num_next, int32_t* bounds, float* scale) {
  const Store& store = judge.store;
  const int64_t units = store.block_units, words = 2 * judge.words();
  for (int64_t i = 0; i < PANEL / units; i++) {
    const int64_t column = i * units;
    if (i >= n) {
      for (int64_t word = 0; word < words; word++)
        std::fill(bounds + word * PANEL + column, bounds + word * PANEL + column + units, 0);
      std::fill(scale + column, scale + column + units, 0.0f);
      continue;
    }
    const auto at = [&](int64_t block) {
      const int64_t unit = block * units - store.skipped;
      return judge.chunk(unit).bounds + judge.place(head, unit) * words;
    };
    const int64_t unit = blocks[i] * units - store.skipped;
    const int32_t *from = at(blocks[i]), *follows = i < num_next ? at(next[i]) : nullptr;
    for (int64_t word = 0; word < words; word++, from += units) {
      if (follows) __builtin_prefetch(follows + word * units);
      std::memcpy(bounds + word * PANEL + column, from, units * sizeof(int32_t));
    }
    std::memcpy(scale + column, judge.chunk(unit).bounds_scale + judge.place(head, unit),
                units * sizeof(float));
  }
}

// Logits of one query head to limits relative to each query's largest one, and the largest of its
// queries'. `inside`: of the columns that count.
template <class Inside>
void limit_head(const Coarse& coarse, const Level& level, int64_t each, int64_t query_head,
                Inside inside) {
  float* limits = level.limits + query_head * level.columns;
  std::fill(limits, limits + level.columns, -INFINITY);
  for (int64_t row = query_head * each; row < (query_head + 1) * each; row++) {
    float* x = level.x + row * level.columns;
    inside(x);
    vf top = splat(-INFINITY);
    for (int64_t i = 0; i < level.columns; i += W) top = vmax(load(x + i), top);
    const float most = largest(top);
    for (int64_t i = 0; i < level.columns; i += W)
      store(limits + i, vmax(load(x + i) - most, load(limits + i)));
  }
  for (int64_t i = 0; i < level.columns; i += W) store(limits + i, vexp(load(limits + i)));
}

// Sums over a set's query heads; columns that do not count are below all others.
template <class Inside>
const float* limits_of_set(const Judge& judge, const Level& level, int64_t set, Inside inside) {
  const int64_t heads = judge.layer.num_queries() / judge.layer.num_sets;
  float* sums = level.limits + set * heads * level.columns;
  for (int64_t q = 1; q < heads; q++)
    for (int64_t i = 0; i < level.columns; i += W)
      store(sums + i, load(sums + i) + load(sums + q * level.columns + i));
  inside(sums);
  return sums;
}

// Fills what lies outside of columns `begin .. end - 1`.
inline void only(float* x, int64_t columns, int64_t begin, int64_t end) {
  std::fill(x, x + begin, -INFINITY);
  std::fill(x + end, x + columns, -INFINITY);
}

// Called by all threads of a parallel region. `memory`: of `floats()` numbers, shared.
class Filter {
 public:
  explicit Filter(const Judge& judge)
      : judge_(judge),
        first_((judge.store.skipped + judge.store.begin) / judge.store.block_units),
        end_((judge.store.skipped + judge.store.end + judge.store.block_units - 1) /
             judge.store.block_units),
        num_kept_(std::min(end_ - first_, judge.store.most_blocks)),
        each_(std::min(judge.store.num_asking, judge.store.most_filtering)) {}

  int64_t floats() const {
    const Layer& layer = judge_.layer;
    const int64_t rows = layer.num_queries() * each_;
    const int64_t columns = std::max(of_blocks(), of_units());
    return rows * (2 * judge_.words() + 2 + columns) + layer.num_queries() * columns +
           2 * layer.num_sets * num_kept_;
  }

  // `candidates`: [S, most_candidates], units counted from `begin`.
  void run(const Queries& queries, float* memory, int64_t* candidates) const {
    const Layer& layer = judge_.layer;
    const Store& store = judge_.store;
    const int64_t rows = layer.num_queries() * each_, heads = layer.num_heads;
    int64_t* kept = (int64_t*)memory;  // [S, num_kept_]
    const Coarse coarse{layer.group * each_, (int32_t*)(kept + layer.num_sets * num_kept_),
                        (int32_t*)(kept + layer.num_sets * num_kept_) + rows * 2 * judge_.words(),
                        memory + 2 * layer.num_sets * num_kept_ + rows * (2 * judge_.words() + 1)};
    float* x = coarse.step + rows;
    const Level blocks{of_blocks(), x, x + rows * of_blocks()};
    const Level units{of_units(), x, x + rows * of_units()};
#pragma omp single
    round_queries(judge_, queries, coarse);
#pragma omp for schedule(static) collapse(2)
    for (int64_t head = 0; head < heads; head++)
      for (int64_t group = 0; group < store.num_groups; group++) {
        const int64_t at = judge_.of_head(head) * PANEL, words = at * 2 * judge_.words();
        const int64_t next = std::min(group + 1, store.num_groups - 1);
        multiply(judge_, coarse, blocks, head, group, store.groups[group].bounds + words,
                 store.groups[group].bounds_scale + at, store.groups[next].bounds + words);
      }
    const auto block_there = [&](float* some) { only(some, blocks.columns, first_, end_); };
#pragma omp for schedule(static)
    for (int64_t q = 0; q < layer.num_queries(); q++)
      limit_head(coarse, blocks, each_, q, block_there);
#pragma omp for schedule(static)
    for (int64_t set = 0; set < layer.num_sets; set++)
      best(limits_of_set(judge_, blocks, set, block_there), blocks.columns, num_kept_,
           kept + set * num_kept_);
#pragma omp for schedule(static) collapse(2)
    for (int64_t head = 0; head < heads; head++)
      for (int64_t panel = 0; panel < of_units() / PANEL; panel++)
        multiply_units(coarse, units, head, panel, kept + layer.set_of(head) * num_kept_);
    const auto unit_there = [&](int64_t set) {
      return [&, set](float* some) {
        const int64_t *mine = kept + set * num_kept_, last = num_kept_ - 1, n = store.block_units;
        const int64_t begin = std::max<int64_t>(store.skipped + store.begin - mine[0] * n, 0);
        const int64_t end = std::min(store.skipped + store.end - mine[last] * n, n) + last * n;
        only(some, units.columns, begin, end);
      };
    };
#pragma omp for schedule(static)
    for (int64_t q = 0; q < layer.num_queries(); q++)
      limit_head(coarse, units, each_, q, unit_there(layer.set_of(q / layer.group)));
#pragma omp for schedule(static)
    for (int64_t set = 0; set < layer.num_sets; set++) {
      int64_t *found = candidates + set * store.most_candidates, *mine = kept + set * num_kept_;
      best(limits_of_set(judge_, units, set, unit_there(set)), units.columns,
           store.most_candidates, found);
      for (int64_t i = 0; i < store.most_candidates; i++)
        found[i] = mine[found[i] / store.block_units] * store.block_units +
                   found[i] % store.block_units - store.skipped - store.begin;
    }
  }

 private:
  int64_t of_blocks() const { return judge_.store.num_groups * PANEL; }
  int64_t of_units() const { return round_up(num_kept_ * judge_.store.block_units, PANEL); }

  void multiply_units(const Coarse& coarse, const Level& level, int64_t head, int64_t panel,
                      const int64_t* kept) const {
    static thread_local Scratch scratch;
    const int64_t each = PANEL / judge_.store.block_units, at = panel * each;
    float* scale = scratch.take((2 * judge_.words() + 1) * PANEL);
    int32_t* bounds = (int32_t*)(scale + PANEL);
    const int64_t next = std::min(at + each, num_kept_);
    pack_panel(judge_, head, kept + at, std::min(num_kept_ - at, each), kept + next,
               std::min(num_kept_ - next, each), bounds, scale);
    multiply(judge_, coarse, level, head, panel, bounds, scale, nullptr);
  }

  const Judge& judge_;
  int64_t first_, end_;  // blocks, counted from the groups' first
  int64_t num_kept_, each_;
};

}  // namespace filter
