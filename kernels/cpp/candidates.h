// SPDX-License-Identifier: Apache-2.0
// Lists the units that are judged by all of their keys: those to which a few queries give the largest
// probability by the mean of the unit's keys, its centre.
//
// Logits of all centres would be many times the centres' size, so they are not kept. A first pass sums
// each query's exponentials and notes its largest logit in each panel of W units. Then a panel's largest
// probability is known. The candidates lie in the panels in which it is largest, as many as there are
// candidates. Only these panels' logits are computed again.
#pragma once

#include <cfloat>

#include "judge.h"

namespace {

constexpr int64_t BLOCK = 16;  // panels whose logits stay in the processor's cache
constexpr int64_t AHEAD = 4;   // panels that are fetched before they are read
constexpr int CENTRES = W == 16 ? 2 : 1;       // panels that are multiplied at once
constexpr int ROWS_AT_ONCE = W == 16 ? 8 : 4;  // queries that share their loads

// Sizes, and scratch memory.
struct Filter {
  const Judge& judge;
  Scratch& scratch;
  // Panels of all units' centres, from the first unit of all chunks on.
  const int64_t panels = judge.units.num_chunks * judge.units.chunk_units / W;
  const int64_t blocks = (panels + BLOCK - 1) / BLOCK;
  const int64_t sets = judge.layer.num_sets, heads = judge.heads_of_set();
  // Queries of a KV head, of a set in whole registers, and of all.
  const int64_t of_head = judge.layer.group * judge.filtering();
  const int64_t of_set = round_up(heads * of_head, W), rows = sets * of_set;

  float* largest = scratch.take(numbers());     // [panels, rows], logits
  float* tops = largest + panels * rows;        // [blocks, rows], largest logit times log2(e)
  float* sums = tops + blocks * rows;           // [blocks, rows], of exponentials
  float* log_sums = sums + blocks * rows;       // [rows], over all panels
  float* bounds = log_sums + rows;              // [S, panels], the largest share
  float* shares = bounds + sets * panels;       // [S, panels, W], of open panels
  int32_t* open = (int32_t*)(shares + sets * panels * W);  // [S, panels]
  int32_t* num_open = open + sets * panels;                // [S]
  Queries queries{(float*)(num_open + sets), rows, judge.words()};

  int64_t numbers() const {
    return (panels + 2 * blocks + 1) * rows + sets * (panels * (W + 2) + 1) +
           Queries::numbers(rows, judge.words());
  }
  // The first row of a KV head.
  int64_t row(int64_t head) const { return head / heads * of_set + head % heads * of_head; }
};

// Prefetches a panel's centres; those of all heads are adjacent.
inline void prefetch_centres(const Judge& judge, int64_t panel) {
  const int64_t bytes = judge.layer.num_heads * judge.layer.head_size * judge.units.chunk_units;
  const int8_t* centre = judge.stored().centre(0, panel * W);
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(centre + at, 0, 2);
  for (int64_t head = 0; head < judge.layer.num_heads; head++)
    __builtin_prefetch(judge.stored().centre_scale(head, panel * W), 0, 2);
}

// Centres of one KV head in `Panels` panels.
template <int Panels>
struct Centres {
  const int32_t* words[Panels];
  vf scale[Panels];
  vi valid[Panels];  // lanes that hold a unit

  Centres(const Judge& judge, int64_t head, const int64_t* panels) {
    for (int p = 0; p < Panels; p++) {
      const int64_t first = panels[p] * W;
      const vi number = lanes() + (int32_t)first;
      words[p] = (const int32_t*)judge.stored().centre(head, first);
      scale[p] = load(judge.stored().centre_scale(head, first));
      valid[p] = (number >= (int32_t)judge.units.begin) & (number < (int32_t)judge.units.end);
    }
  }

  // Logits for `Rows` queries from number `row` on, -inf where no unit is.
  template <int Rows>
  void multiply(const Filter& filter, int64_t row, vf (*logits)[Rows]) const {
    const int64_t size = filter.queries.size, units = filter.judge.units.chunk_units;
    const int32_t *query = filter.queries.words + row * size, *less = filter.queries.less + row;
    const float* step = filter.queries.step + row;
    vi sums[Rows][Panels];
    ::multiply(query, less, size, sums, [&](int64_t word, int p) {
      return load_as<vi>(words[p] + word * units) ^ SIGNS;
    });
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++)
#pragma GCC unroll 2
      for (int p = 0; p < Panels; p++) {
        const vf logit = __builtin_convertvector(sums[r][p], vf) * scale[p] * step[r];
        logits[p][r] = valid[p] ? logit : splat(-INFINITY);
      }
  }

  // Calls `take(panel, row, logits)` for all queries of the KV head.
  template <class Take>
  void for_rows(const Filter& filter, int64_t head, Take take) const {
    int64_t row = filter.row(head);
    const int64_t end = row + filter.of_head;
    auto some = [&](auto number) {
      constexpr int Rows = decltype(number)::value;
      for (; row + Rows <= end; row += Rows) {
        vf logits[Panels][Rows];
        multiply<Rows>(filter, row, logits);
        for (int p = 0; p < Panels; p++)
          for (int r = 0; r < Rows; r++) take(p, row + r, logits[p][r]);
      }
    };
    some(std::integral_constant<int, ROWS_AT_ONCE>());
    some(std::integral_constant<int, 3>());
    some(std::integral_constant<int, 1>());
  }
};

// Calls `each` with all of `num` panels, CENTRES at a time as long as there are so many.
template <class Each>
inline void for_panels(int64_t num, Each each) {
  int64_t i = 0;
  for (; i + CENTRES <= num; i += CENTRES) each(i, std::integral_constant<int, CENTRES>());
  for (; i < num; i++) each(i, std::integral_constant<int, 1>());
}

// The first pass over a block of panels.
void read_block(const Filter& filter, int64_t block) {
  static thread_local Scratch scratch;
  const Judge& judge = filter.judge;
  const int64_t rows = filter.rows, all = filter.panels;
  const int64_t first = block * BLOCK, num = std::min(BLOCK, all - first);
  float* logits = scratch.take(BLOCK * rows * W);
  for (int64_t i = 0; i < num * filter.sets; i++) {  // rows without a query
    float* end = logits + (i + 1) * filter.of_set * W;
    std::fill(end - (filter.of_set - filter.heads * filter.of_head) * W, end, -INFINITY);
  }
  for_panels(num, [&](int64_t i, auto number) {
    constexpr int Panels = decltype(number)::value;
    int64_t panels[Panels];
    for (int p = 0; p < Panels; p++) {
      panels[p] = first + i + p;
      if (panels[p] + AHEAD < all) prefetch_centres(judge, panels[p] + AHEAD);
    }
    for (int64_t head = 0; head < judge.layer.num_heads; head++)
      Centres<Panels>(judge, head, panels).for_rows(filter, head, [&](int p, int64_t row, vf logit) {
        store(logits + ((i + p) * rows + row) * W, logit);
      });
  });
  float *tops = filter.tops + block * rows, *sums = filter.sums + block * rows;
  for (int64_t row = 0; row < rows; row += W) {
    vf top = splat(-INFINITY);
    for (int64_t i = 0; i < num; i++) {
      const vf most = largest_of_each(logits + (i * rows + row) * W);
      store(filter.largest + (first + i) * rows + row, most);
      top = vmax(most, top);
    }
    store(tops + row, top * LOG2E);
  }
  for (int64_t row = 0; row < rows; row++) {
    const float top = tops[row];
    vf sum_here = vf{};
    for (int64_t i = 0; i < num && top > -INFINITY; i++)
      sum_here += vexp2(load(logits + (i * rows + row) * W) * LOG2E - top);
    sums[row] = sum(sum_here);
  }
}

// log2 of each query's sum of exponentials over all blocks; 0 where no query is.
void add_blocks(const Filter& filter) {
  const int64_t rows = filter.rows;
  for (int64_t row = 0; row < rows; row += W) {
    vf top = splat(-FLT_MAX), total = vf{};
    for (int64_t i = 0; i < filter.blocks; i++) top = vmax(load(filter.tops + i * rows + row), top);
    for (int64_t i = 0; i < filter.blocks; i++)
      total += load(filter.sums + i * rows + row) * vexp2(load(filter.tops + i * rows + row) - top);
    for (int lane = 0; lane < W; lane++)
      filter.log_sums[row + lane] = total[lane] > 0 ? top[lane] + std::log2(total[lane]) : 0;
  }
}

// log2 of the largest probability that any query of a set gives any unit of a panel.
inline float bound(const Filter& filter, int64_t set, int64_t panel) {
  const int64_t first = set * filter.of_set;
  const float* most = filter.largest + panel * filter.rows;
  vf share = splat(-INFINITY);
  for (int64_t row = first; row < first + filter.of_set; row += W)
    share = vmax(load(most + row) * LOG2E - load(filter.log_sums + row), share);
  return largest(share);
}

// Lists the panels that can hold candidates of a set.
void open_panels(const Filter& filter, int64_t set) {
  const int64_t all = filter.panels, judged = filter.judge.judged();
  const float* bounds = filter.bounds + set * all;
  const int32_t least = all > judged ? nth_largest(bounds, all, judged) : INT32_MIN;
  int32_t *open = filter.open + set * all, num = 0;
  for (int64_t panel = 0; panel < all; panel++)
    if (ordered(bounds[panel]) >= least) open[num++] = (int32_t)panel;
  filter.num_open[set] = num;
}

// The second pass: log2 of the largest probability that any query of a set gives each unit of some
// open panels.
template <int Panels>
void share_panels(const Filter& filter, int64_t set, int64_t i) {
  const Judge& judge = filter.judge;
  const int64_t all = filter.panels, heads = filter.heads;
  int64_t panels[Panels];
  vf shares[Panels];
  for (int p = 0; p < Panels; p++) {
    panels[p] = filter.open[set * all + i + p];
    shares[p] = splat(-FLT_MAX);
  }
  vi valid[Panels];
  for (int64_t head = set * heads; head < (set + 1) * heads; head++) {
    const Centres<Panels> centres(judge, head, panels);
    for (int p = 0; p < Panels; p++) valid[p] = centres.valid[p];
    centres.for_rows(filter, head, [&](int p, int64_t row, vf logit) {
      shares[p] = vmax(logit * LOG2E - filter.log_sums[row], shares[p]);
    });
  }
  for (int p = 0; p < Panels; p++)
    store(filter.shares + (set * all + i + p) * W, valid[p] ? shares[p] : splat(-INFINITY));
}

// Lists the units that are judged by all of their keys, `listed`: [S, judged]. Called by all threads of
// a team.
void list_candidates(const Filter& filter, const Queries& queries, int64_t* listed) {
  const Judge& judge = filter.judge;
  const int64_t all = filter.panels, num = judge.judged();
#pragma omp single
  take_largest(judge, queries, judge.filtering(), [&](int64_t query) {
    const int64_t group = judge.layer.group;
    return filter.row(query / group) + query % group * judge.filtering();
  }, filter.queries);
#pragma omp for schedule(static)
  for (int64_t block = 0; block < filter.blocks; block++) read_block(filter, block);
#pragma omp single
  add_blocks(filter);
#pragma omp for schedule(static) collapse(2)
  for (int64_t set = 0; set < filter.sets; set++)
    for (int64_t panel = 0; panel < all; panel++)
      filter.bounds[set * all + panel] = bound(filter, set, panel);
#pragma omp for schedule(static)
  for (int64_t set = 0; set < filter.sets; set++) open_panels(filter, set);
  for (int64_t set = 0; set < filter.sets; set++) {
    const int64_t open = filter.num_open[set], pairs = (open + CENTRES - 1) / CENTRES;
#pragma omp for schedule(static)
    for (int64_t pair = 0; pair < pairs; pair++) {
      if ((pair + 1) * CENTRES <= open) share_panels<CENTRES>(filter, set, pair * CENTRES);
      else for (int64_t i = pair * CENTRES; i < open; i++) share_panels<1>(filter, set, i);
    }
  }
#pragma omp for schedule(static)
  for (int64_t set = 0; set < filter.sets; set++) {
    int64_t* mine = listed + set * num;
    choose(filter.shares + set * all * W, filter.num_open[set] * W, num, mine);
    for (int64_t i = 0; i < num; i++)
      mine[i] = filter.open[set * all + mine[i] / W] * W + mine[i] % W - judge.units.begin;
  }
}

}  // namespace
