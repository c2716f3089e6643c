// SPDX-License-Identifier: Apache-2.0
// What asks for stored units: tokens' queries in 8 bits, before rotation.
//
// Few units are judged by all keys and all of these queries (recall.cpp). Of many units, a few queries
// first select candidates (candidates.h), and some of the queries judge those. Of each head, these are
// the last query, which may ask for an answer, and those with the largest norms: the larger a query, the
// more its attention differs between units.
#pragma once

#include "tile.h"
#include "units.h"

// The tokens that ask, and for what.
struct Asking {
  const int64_t *places, *positions;  // [num_asking], of tokens in the step, and of their queries
  int64_t num;             // of these tokens
  int64_t num_candidates;  // units that are judged by all of their keys, at most
  int64_t num_filtering, num_judging;  // a head's queries that select and judge candidates, at most
  int64_t num_chosen;
  const int32_t* pages;  // block numbers; the first units in them are the sinks
  int64_t num_sinks;     // units
};

namespace {

constexpr int64_t LEVELS = 127;  // a query's channels are -LEVELS .. LEVELS
constexpr int32_t SIGNS = (int32_t)0x80808080;
constexpr float LOG2E = 1.44269504f;

struct Judge {
  const Layer& layer;
  const Units& units;
  const Asking& asking;
  int64_t index;  // of the layer
  LayerUnits stored() const { return {layer, units, index}; }
  int64_t num_units() const { return units.end - units.begin; }
  int64_t words() const { return layer.head_size / 4; }
  bool filters() const { return num_units() > asking.num_candidates; }
  // Queries of a query head that select candidates, and that judge.
  int64_t filtering() const { return std::min(asking.num, asking.num_filtering); }
  int64_t judging() const {
    return filters() ? std::min(asking.num, asking.num_judging) : asking.num;
  }
  // Queries of one KV head that judge: those of a query head follow each other.
  int64_t rows() const { return layer.group * judging(); }
  // Units that are judged by all of their keys, in panels of W.
  int64_t judged() const { return std::min(num_units(), asking.num_candidates); }
  int64_t panels() const { return (judged() + W - 1) / W; }
  int64_t columns() const { return panels() * W; }
  int64_t heads_of_set() const { return layer.num_heads / layer.num_sets; }
  int64_t num_sinks() const { return asking.num_sinks * layer.unit; }
  // Queries of all query heads: those of a head follow each other.
  int64_t num_queries() const { return layer.num_queries() * asking.num; }
  template <class T>
  const T* query(const Rows& rows, int64_t row) const {
    const int64_t token = asking.places[row % asking.num];
    return (const T*)rows.query + token * rows.query_stride + row / asking.num * layer.head_size;
  }
  // Whether the tokens of the unit that was stored after this one follow its tokens.
  bool goes_on(int64_t set, int64_t unit) const {
    const int64_t number = units.begin + unit;
    return *stored().token(set, number + 1) == *stored().token(set, number) + layer.unit;
  }
};

// Queries as integers, `[rows]`; what makes up for keys that count from 128; the logarithm of the sum of
// exponentials over the sinks.
struct Queries {
  int64_t size;    // D / 4
  int32_t* words;  // [rows, D / 4], four channels each
  int32_t* less;   // [rows]
  float* step;     // [rows]
  float* norm;     // [rows], squared
  float* sinks;    // [rows]

  static int64_t numbers(int64_t rows, int64_t size) { return rows * (size + 4); }
  Queries(float* memory, int64_t rows, int64_t size) : size(size) {
    words = (int32_t*)memory;
    less = words + rows * size;
    step = (float*)(less + rows);
    norm = step + rows;
    sinks = norm + rows;
  }
  void copy(int64_t to, const Queries& from, int64_t row) const {
    std::memcpy(words + to * size, from.words + row * size, size * 4);
    less[to] = from.less[row], step[to] = from.step[row];
    norm[to] = from.norm[row], sinks[to] = from.sinks[row];
  }
  // One fp32 query. The step of one that is not finite is NaN: it asks for nothing.
  void round(int64_t row, const float* query) const {
    int32_t wrong = 0;
    for (int64_t c = 0; c < size * 4; c++) wrong |= !std::isfinite(query[c]);
    if (wrong) {
      std::fill_n(words + row * size, size, 0);
      less[row] = 0, step[row] = NAN, norm[row] = 0;
      return;
    }
    const float most = largest_magnitude(query, size * 4);
    const float levels = most > 0 ? LEVELS / most : 0;
    int32_t sum = 0, squares = 0;
    for (int64_t word = 0; word < size; word++) {
      int8_t part[4];
      for (int64_t i = 0; i < 4; i++) {
        part[i] = (int8_t)std::rint(query[word * 4 + i] * levels);
        sum += part[i], squares += part[i] * part[i];
      }
      std::memcpy(words + row * size + word, part, sizeof(part));
    }
    step[row] = most / LEVELS, less[row] = -128 * sum;
    norm[row] = (float)squares * step[row] * step[row];
  }
};

// Integer products of `Rows` queries with `Count` vectors of keys. `keys(word, i)`: four channels of each
// key of vector `i`, as unsigned bytes. Slower without always_inline.
template <int Rows, int Count, class Keys>
__attribute__((always_inline)) inline void multiply(const int32_t* query, const int32_t* less,
                                                    int64_t words, vi (&sums)[Rows][Count],
                                                    Keys keys) {
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
    for (int i = 0; i < Count; i++) sums[r][i] = splat_int(less[r]);
  for (int64_t word = 0; word < words; word++) {
    vi here[Count];
#pragma GCC unroll 4
    for (int i = 0; i < Count; i++) here[i] = keys(word, i);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
      for (int i = 0; i < Count; i++)
        sums[r][i] = add_products(sums[r][i], here[i], query[r * words + word]);
  }
}

// Rounds one of the tokens' queries, turned back by its position, times the scale of logits.
template <class T>
void plain_query(const Judge& judge, const Rows& rows, int64_t row, const Queries& queries) {
  static thread_local Scratch scratch;
  const Layer& layer = judge.layer;
  const int64_t size = layer.head_size;
  float* query = scratch.take(round_up(size, W));
  widen_row(query, judge.query<T>(rows, row), size);
  if (layer.rotation) rotate(layer, query, judge.asking.positions[row % judge.asking.num]);
  for (int64_t c = 0; c < size; c++) query[c] *= layer.scale;
  queries.round(row, query);
}

// Integers in the order of fp32 numbers with these bits; NaN is one of the ends.
template <class Bits>
inline Bits ordered(Bits bits) {
  return bits ^ (bits >> 31 & 0x7FFFFFFF);
}
inline int32_t ordered(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return ordered(bits);
}

// The `num`-th largest of `n` numbers, `ordered`: the largest one that so many reach, bit by bit.
inline int32_t nth_largest(const float* from, int64_t n, int64_t num) {
  uint32_t found = 0x80000000;
  for (int bit = 31; bit >= 0; bit--) {
    const int32_t least = (int32_t)(found + (1u << bit));
    vi reach = vi{};
    int64_t i = 0;
    for (; i + W <= n; i += W) reach -= ordered(load_as<vi>(from + i)) >= least;
    int64_t count = 0;
    for (int lane = 0; lane < W; lane++) count += reach[lane];
    for (; i < n; i++) count += ordered(from[i]) >= least;
    if (count >= num) found = (uint32_t)least;
  }
  return (int32_t)found;
}

// The `num` of `n` units with the largest numbers, ascending; of equal ones the first.
inline void choose(const float* most, int64_t n, int64_t num, int64_t* chosen) {
  const int32_t least = nth_largest(most, n, num);
  int64_t equal = num;
  for (int64_t u = 0; u < n; u++) equal -= ordered(most[u]) > least;
  for (int64_t u = 0, at = 0; u < n && at < num; u++) {
    const int32_t here = ordered(most[u]);
    if (here > least || (here == least && equal-- > 0)) chosen[at++] = u;
  }
}

// Copies the last query of each query head, and those with the largest norms, together `num`. `row(head)`
// is where they go.
template <class Row>
void take_largest(const Judge& judge, const Queries& queries, int64_t num, Row row,
                  const Queries& to) {
  const int64_t asking = judge.asking.num;
  std::vector<int64_t> chosen(num);
  std::vector<float> norms(asking);
  for (int64_t head = 0; head < judge.layer.num_queries(); head++) {
    const int64_t first = head * asking;
    std::copy_n(queries.norm + first, asking, norms.data());
    norms[asking - 1] = INFINITY;
    choose(norms.data(), asking, num, chosen.data());
    for (int64_t i = 0; i < num; i++) to.copy(row(head) + i, queries, first + chosen[i]);
  }
}

}  // namespace
