// SPDX-License-Identifier: Apache-2.0
// Lists the units that are judged by all of their keys: those to which a few queries give the largest
// probability by the unit's centre, which is the mean of its keys, and by how far the keys spread around it.
//
// A unit is worth the sum of the exponentials of its keys' logits. If these are normally distributed,
// the mean of the exponentials is that of the mean logit plus half of their variance. The variance is
// the query's squared norm times the keys' variance, if that is the same in all directions. On
// text, a weight above one half selects better (SPREAD).
//
// A first pass sums each query's exponentials and notes its largest logit in each panel of W units. Then
// a panel's largest probability is known. All candidates lie in the panels where it is largest, at most
// one panel per candidate. Only these panels' logits are needed again. Those of a stride's queries
// take about as much memory as the centres, and are computed again; those of single tokens are kept.
#pragma once

#include <cfloat>

#include "judge.h"

namespace {

constexpr float SPREAD = 0.7f;  // weight of a unit's variance
constexpr int64_t BLOCK = 16;  // panels whose logits stay in the processor's cache
constexpr int64_t AHEAD = 4;   // panels between one that is read and one that is fetched
constexpr int CENTRES = W == 16 ? 2 : 1;       // panels that are multiplied at once
constexpr int ROWS_AT_ONCE = W == 16 ? 8 : 4;  // queries that share their loads

// Sizes, and scratch memory.
struct Filter {
  const Judge& judge;
  Scratch& scratch;
  // Panels of all units' centres, from the first unit of all chunks on.
  const int64_t panels = judge.units.num_chunks * CHUNK_UNITS / W;
  const int64_t blocks = (panels + BLOCK - 1) / BLOCK;
  const int64_t sets = judge.layer.num_sets, heads = judge.heads_of_set();
  // Queries of a KV head, of a set in whole registers, and of all.
  const int64_t of_head = judge.layer.group * judge.filtering();
  const int64_t of_set = round_up(heads * of_head, W), rows = sets * of_set;

  // Whether logits take at most half of the centres' memory.
  const bool keeps = rows * (int64_t)sizeof(float) * 2 <= judge.layer.num_heads * judge.layer.head_size;

  float* largest = scratch.take(numbers());     // [panels, rows], logits
  float* tops = largest + panels * rows;        // [blocks, rows], largest logit times log2(e)
  float* sums = tops + blocks * rows;           // [blocks, rows], of exponentials
  float* log_sums = sums + blocks * rows;       // [rows], over all panels
  float* bounds = log_sums + rows;              // [S, panels], the largest share
  float* shares = bounds + sets * panels;       // [S, panels, W], of open panels
  int32_t* open = (int32_t*)(shares + sets * panels * W);  // [S, panels]
  int32_t* num_open = open + sets * panels;                // [S]
  float* kept = (float*)(num_open + sets);                 // [panels, rows, W] logits, if it keeps them
  Queries queries{kept + kept_numbers(), rows, judge.words()};

  int64_t kept_numbers() const { return keeps ? panels * rows * W : 0; }
  int64_t numbers() const {
    return (panels + 2 * blocks + 1) * rows + sets * (panels * (W + 2) + 1) + kept_numbers() +
           Queries::numbers(rows, judge.words());
  }
  // The first row of a KV head.
  int64_t row(int64_t head) const { return head / heads * of_set + head % heads * of_head; }
};

// Lanes of a panel that hold a unit.
inline vi holds_units(const Judge& judge, int64_t panel) {
  const vi number = lanes() + (int32_t)(panel * W);
  return (number >= (int32_t)judge.units.begin) & (number < (int32_t)judge.units.end);
}

// Centres of one KV head in `Panels` panels. Those of the panels `then` are fetched as these are read.
template <int Panels>
struct Centres {
  const int32_t *words[Panels], *next[Panels];
  vf scale[Panels], spread[Panels];
  vi valid[Panels];

  Centres(const Judge& judge, int64_t head, const int64_t* panels, const int64_t* then) {
    for (int p = 0; p < Panels; p++) {
      words[p] = (const int32_t*)judge.stored().centre(head, panels[p] * W);
      next[p] = (const int32_t*)judge.stored().centre(head, then[p] * W);
      __builtin_prefetch(judge.stored().centre_scale(head, then[p] * W), 0, 2);
      __builtin_prefetch(judge.stored().spread(head, then[p] * W), 0, 2);
      scale[p] = load(judge.stored().centre_scale(head, panels[p] * W));
      spread[p] = load(judge.stored().spread(head, panels[p] * W)) * SPREAD;
      valid[p] = holds_units(judge, panels[p]);
    }
  }

  // Logits for `Rows` queries from number `row` on, -inf where no unit is.
  template <int Rows>
  void some_logits(const Filter& filter, int64_t row, vf (*logits)[Rows]) const {
    const int64_t size = filter.queries.size;
    const int32_t *query = filter.queries.words + row * size, *less = filter.queries.less + row;
    const float *step = filter.queries.step + row, *norm = filter.queries.norm + row;
    vi sums[Rows][Panels];
    multiply(query, less, size, sums, [&](int64_t word, int p) {
      __builtin_prefetch(next[p] + word * CHUNK_UNITS, 0, 2);
      return load_as<vi>(words[p] + word * CHUNK_UNITS) ^ SIGNS;
    });
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++)
#pragma GCC unroll 2
      for (int p = 0; p < Panels; p++) {
        const vf mean = __builtin_convertvector(sums[r][p], vf) * scale[p] * step[r];
        logits[p][r] = valid[p] ? mean + spread[p] * norm[r] : splat(-INFINITY);
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
        some_logits<Rows>(filter, row, logits);
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
  float* logits = filter.keeps ? filter.kept + first * rows * W : scratch.take(BLOCK * rows * W);
  for (int64_t i = 0; i < num * filter.sets; i++) {  // rows without a query
    float* end = logits + (i + 1) * filter.of_set * W;
    std::fill(end - (filter.of_set - filter.heads * filter.of_head) * W, end, -INFINITY);
  }
  for_panels(num, [&](int64_t i, auto number) {
    constexpr int Panels = decltype(number)::value;
    int64_t panels[Panels], then[Panels];
    for (int p = 0; p < Panels; p++) {
      panels[p] = first + i + p;
      then[p] = std::min(panels[p] + AHEAD, all - 1);
    }
    for (int64_t head = 0; head < judge.layer.num_heads; head++)
      Centres<Panels>(judge, head, panels, then)
          .for_rows(filter, head, [&](int p, int64_t row, vf logit) {
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
  const int64_t heads = filter.heads, num = filter.num_open[set];
  const int32_t* open = filter.open + set * filter.panels;
  int64_t panels[Panels], then[Panels];
  vf shares[Panels];
  for (int p = 0; p < Panels; p++) {
    panels[p] = open[i + p];
    then[p] = open[std::min(i + p + Panels, num - 1)];
    shares[p] = splat(-FLT_MAX);
  }
  for (int64_t head = set * heads; head < (set + 1) * heads; head++)
    Centres<Panels>(judge, head, panels, then)
        .for_rows(filter, head, [&](int p, int64_t row, vf logit) {
          shares[p] = vmax(logit * LOG2E - filter.log_sums[row], shares[p]);
        });
  for (int p = 0; p < Panels; p++)
    store(filter.shares + (set * filter.panels + i + p) * W,
          holds_units(judge, panels[p]) ? shares[p] : splat(-INFINITY));
}

// The same of one open panel, by the logits that were kept.
void share_kept(const Filter& filter, int64_t set, int64_t i) {
  const int64_t at = set * filter.panels + i, panel = filter.open[at];
  const int64_t first = set * filter.of_set;
  const float* logits = filter.kept + (panel * filter.rows + first) * W;
  vf share = splat(-FLT_MAX);
  for (int64_t row = 0; row < filter.heads * filter.of_head; row++)
    share = vmax(load(logits + row * W) * LOG2E - filter.log_sums[first + row], share);
  store(filter.shares + at * W, holds_units(filter.judge, panel) ? share : splat(-INFINITY));
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
      const int64_t i = pair * CENTRES, end = std::min(i + CENTRES, open);
      if (filter.keeps) for (int64_t k = i; k < end; k++) share_kept(filter, set, k);
      else if (end - i == CENTRES) share_panels<CENTRES>(filter, set, i);
      else for (int64_t k = i; k < end; k++) share_panels<1>(filter, set, k);
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
