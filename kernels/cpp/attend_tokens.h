// SPDX-License-Identifier: Apache-2.0
// Attention for one new token of each of many requests, over tiles of cached tokens.
#pragma once

#include "layer.h"
#include "tile.h"

// Single tokens of `count` requests over at most `num_pages` pages each.
struct Tokens {
  int64_t count, num_pages;
  const int32_t *steps, *pages;  // [count, STEP_COLUMNS], [count, num_pages]
  const float* logit_scale;      // [count], or null: all 1
  const float* given;            // [count], scores that do not come from attention, or null
  const int32_t* scored;         // [count], ranks of the tokens that get them; negative: none
  const int32_t* rules;          // [any, RULE_COLUMNS], the rules after the first of each row
  const int32_t* shift;          // [count], positions beyond ranks, or null: all 0
  const int32_t* saves;          // [count], places of draft tokens, or -1; null: no drafts
  int64_t moved;
};

namespace {

// The output of attention for one request's score update: exponentials relative to a logit that W
// slots share, and the factors that turn them into probabilities. Without scores by attention, only
// those of the latest tile are kept.
struct Mass {
  float* exps;       // [H * G, padded], by place(slot)
  float* relative;   // [H * G, blocks] of W slots: the logit, later the factor
  float* row_max;    // [H * G]
  float* row_scale;  // [H * G], 1 / sum
  float* own;        // [H * G], probability of the new token
  int64_t padded, blocks;
  int64_t mask;  // of slots

  int64_t place(int64_t slot) const { return slot & mask; }
};

struct Shape {
  int64_t queries, width, slots, padded, blocks;
  bool prefetch, scored;
  int64_t mass_floats() const { return round_up(queries * (padded + blocks + 3) + W, 16); }
  Mass mass(float* at) const {
    // A unit smaller than a register is loaded with up to W numbers behind it, which are not used.
    float* relative = at + queries * padded + W;
    float* rest = relative + queries * blocks;
    const int64_t mask = scored ? -1 : TILE - 1;
    return {at, relative, rest, rest + queries, rest + 2 * queries, padded, blocks, mask};
  }
};

template <class T>
struct Request {
  const Layer& layer;
  const Tokens& batch;
  const Rows& rows;
  const Shape& shape;
  int64_t b;

  Step step() const { return {batch.steps + b * STEP_COLUMNS}; }
  int32_t shift() const { return batch.shift ? batch.shift[b] : 0; }
  const int32_t* pages() const { return batch.pages + b * batch.num_pages; }
  bool is_padding() const { return step()[STREAM] < 0; }
  int64_t at() const { return step()[START]; }
  const T* query(int64_t head) const {
    return (const T*)rows.query + at() * rows.query_stride + head * layer.head_size;
  }
  T* output(int64_t head) const {
    return (T*)rows.output + at() * rows.output_stride + head * layer.value_size;
  }
  const T* key(int64_t head) const {
    return (const T*)rows.key + at() * rows.key_stride + head * layer.head_size;
  }
  const T* value(int64_t head) const {
    return (const T*)rows.value + at() * rows.value_stride + head * layer.value_size;
  }
};

// State of the online softmax of one request's heads between tiles.
struct Online {
  int64_t first, num, width;  // query heads, and channels rounded up to W
  float *query, *acc;  // [num, width]
  float *sums, *own;   // [num, W], summed at the end; [num]

  static int64_t floats(int64_t num, int64_t width) {
    return round_up(num * (2 * width + W + 1), 16);
  }
  Online(float* at, int64_t first, int64_t num, int64_t width)
      : first(first), num(num), width(width), query(at), acc(at + num * width),
        sums(acc + num * width), own(sums + num * W) {}
};

// Starts the softmax with the new token itself.
template <class T>
void begin_softmax(const Request<T>& request, const Mass& mass, Online& on, float* key) {
  const Layer& layer = request.layer;
  const int64_t size = layer.head_size;
  const float factor = request.batch.logit_scale ? request.batch.logit_scale[request.b] : 1.0f;
  for (int64_t q = 0; q < on.num; q++) {
    const int64_t head = (on.first + q) / layer.group;
    float* query = on.query + q * on.width;
    widen_row(query, request.query(on.first + q), size);
    widen_row(key, request.key(head), size);
    widen_row(on.acc + q * on.width, request.value(head), layer.value_size);
    vf dot{};
    for (int64_t c = 0; c < on.width; c += W) {
      vf x = load(query + c) * (layer.scale * factor);
      dot += x * load(key + c);
      store(query + c, x);
    }
    on.own[q] = layer.soft_cap(sum(dot));
    store(on.sums + q * W, vf{});
    on.sums[q * W] = 1;
    mass.row_max[on.first + q] = on.own[q];
  }
}

// Writes outputs, and the factors that turn exponentials into probabilities.
template <class T>
void end_softmax(const Request<T>& request, const Mass& mass, const Online& on) {
  const Layer& layer = request.layer;
  for (int64_t q = 0; q < on.num; q++) {
    const int64_t full = on.first + q;
    const float nothing = layer.sink(full, mass.row_max[full]);
    const float inverse = 1.0f / (sum(load(on.sums + q * W)) + nothing);
    mass.row_scale[full] = inverse;
    mass.own[full] = std::exp(on.own[q] - mass.row_max[full]) * inverse;
    narrow_row(request.output(full), on.acc + q * on.width, inverse, layer.value_size);
  }
}

// A tile's keys: stored rows, or rotated to present positions in fp32. Sums of products have one
// order in all forms that a layer's keys take, so they do not depend on what has moved.
template <class T>
struct TileKeys {
  const float* keys;             // see tile_keys; null: use rows
  const T* const* row;           // stored rows, padded to a whole register
  const T* const* next;          // rows to prefetch, or null
  const float* const* turned;    // rotated rows, padded; null: use stored ones
  const float* const* rotation;  // each row's cos and sin, to rotate in registers, or null

  template <int Queries>
  void products(const float* query, int64_t width, int64_t i, vf* x) const {
    constexpr int STORED = Queries == 1 ? W : Queries == 2 ? W / 2 : W / 4;
    const T* const* to_come = next ? next + i : nullptr;
    if (keys)
      dots<Queries, STORED>(query, width, keys + i * W, x);
    else if (turned)
      of_rows<Queries, false, float>(query, width, turned + i, nullptr, nullptr, x);
    else if (rotation)
      of_rows<Queries, true>(query, width, row + i, to_come, rotation + i, x);
    else
      of_rows<Queries, false>(query, width, row + i, to_come, nullptr, x);
  }
  template <int Queries, bool Turn, class Row>
  static void of_rows(const float* query, int64_t width, const Row* const* row,
                      const Row* const* next, const float* const* rotation, vf* x) {
    constexpr int ROWS = W == 16 ? 4 : 2;
    if (width == 64)
      row_dots<Queries, ROWS, 64, Turn>(query, width, row, next, rotation, x);
    else if (width == 128)
      row_dots<Queries, ROWS, 128, Turn>(query, width, row, next, rotation, x);
    else
      row_dots<Queries, ROWS, 0, Turn>(query, width, row, next, rotation, x);
  }
};

// Logits and exponentials of `Queries` queries over a tile, relative to the largest logit so far.
template <int Queries, class T>
void tile_softmax(const Layer& layer, const Mass& mass, Online& on, int64_t q, int64_t tile,
                  const TileKeys<T>& keys, const int32_t* rank, int64_t n, int64_t cached) {
  const int64_t full = on.first + q;
  const int64_t place = mass.place(tile * TILE);
  float* exps = mass.exps + full * mass.padded + place;
  vf top[Queries];
  for (vf& most : top) most = splat(-INFINITY);
  for (int64_t i = 0; i < n; i += W) {
    vf x[Queries];
    keys.template products<Queries>(on.query + q * on.width, on.width, i, x);
    const vi held = load_as<vi>(rank + i);
#pragma GCC unroll 4
    for (int k = 0; k < Queries; k++) {
      if (layer.softcap) x[k] = layer.soft_cap(x[k]);
      if (layer.slopes)
        x[k] += layer.slopes[full + k] * __builtin_convertvector(held - (int32_t)cached, vf);
      x[k] = held < 0 ? splat(-INFINITY) : x[k];
      store(exps + k * mass.padded + i, x[k]);
      top[k] = vmax(top[k], x[k]);
    }
  }
  for (int k = 0; k < Queries; k++, exps += mass.padded) {
    float* sums = on.sums + (q + k) * W;
    const float before = mass.row_max[full + k], now = std::max(before, largest(top[k]));
    mass.row_max[full + k] = now;
    std::fill_n(mass.relative + (full + k) * mass.blocks + place / W, TILE / W, now);
    if (now > before) {
      const float shrink = std::exp(before - now);
      float* acc = on.acc + (q + k) * on.width;
      store(sums, load(sums) * shrink);
      for (int64_t c = 0; c < on.width; c += W) store(acc + c, load(acc + c) * shrink);
    }
    vf total = load(sums);
    for (int64_t i = 0; i < n; i += W) {
      vf e = vexp(load(exps + i) - now);
      store(exps + i, e);
      total += e;
    }
    store(sums, total);
  }
}

template <int Queries, class T>
void attend_tile(const Layer& layer, const Mass& mass, Online& on, int64_t q, int64_t tile,
                 const TileKeys<T>& keys, const T* const* value, const int32_t* rank, int64_t n,
                 int64_t cached) {
  tile_softmax<Queries>(layer, mass, on, q, tile, keys, rank, n, cached);
  add_tile<Queries>(layer, on.acc + q * on.width, on.width,
                    mass.exps + (on.first + q) * mass.padded + mass.place(tile * TILE),
                    mass.padded, value, rank, n);
}

// Attention of KV heads [begin, end) of one request. Every tile serves all heads, so its rotations
// are read from memory once. Unless `Plain`, a tile is decoded to fp32 first.
template <bool Plain, class T>
void attend(const Request<T>& request, const Mass& mass, int64_t begin, int64_t end) {
  using S = std::conditional_t<Plain, T, float>;
  static thread_local Scratch scratch;
  const Layer& layer = request.layer;
  if (request.is_padding()) return;
  const int64_t width = request.shape.width, size = layer.head_size;
  const int64_t group = layer.group, num = (end - begin) * group;
  const int64_t slots = request.step()[OLD_SLOTS], cached = request.step()[CACHED];
  const int64_t num_sets = layer.num_sets == 1 ? 1 : end - begin;
  const int64_t online = Online::floats(num, width), buffer = width / W * KEY_STRIDE;
  const bool moved = request.batch.moved && layer.rotation, ahead = request.shape.prefetch;
  const int64_t words = 2 * num_sets * TILE, decoded = Plain ? 0 : TILE * 2 * size;
  float* memory = scratch.take(online + buffer + words + decoded);
  float* keys = memory + online;
  int32_t* rank = (int32_t*)(keys + buffer);
  int32_t* distance = rank + num_sets * TILE;
  // For larger groups it is faster to read and rotate keys once.
  const bool by_row = group <= 4 && size % (2 * W) == 0;
  const bool in_registers = by_row && moved && layer.turns_by_registers();
  const bool turns = by_row && moved && !in_registers;
  Online on(memory, begin * group, num, width);
  begin_softmax(request, mass, on, keys);

  const S *rows[2][TILE], *value[TILE];
  const float *rotation[TILE], *turned[TILE];
  const S **row = rows[0], **next = rows[1];
  if (Plain) tile_rows(layer, request.pages(), begin, 0, std::min(TILE, slots), row);
  for (int64_t tile = 0; tile * TILE < slots; tile++) {
    const int64_t s0 = tile * TILE, n = std::min(TILE, slots - s0), after = slots - s0 - n;
    for (int64_t s = 0; s < num_sets; s++)
      tile_words(layer, request.pages(), layer.num_sets == 1 ? 0 : begin + s, s0, n, cached,
                 request.shift(), moved, rank + s * TILE, distance + s * TILE);
    for (int64_t head = begin; head < end; head++) {
      const int64_t s = layer.num_sets == 1 ? 0 : head - begin;
      const bool last = head + 1 == end;
      const int64_t n_next = last ? std::min(TILE, after) : n;
      if constexpr (Plain)
        tile_rows(layer, request.pages(), last ? begin : head + 1, last ? s0 + n : s0, n_next,
                  next);
      else
        decoded_rows(layer, request.pages(), head, s0, n, (float*)(rank + words), row);
      const S* const* to_come = Plain && ahead && n_next == TILE ? next : nullptr;
      const int32_t* moves = moved ? distance + s * TILE : nullptr;
      TileKeys<S> tile_of{by_row ? nullptr : keys, row, to_come, turns ? turned : nullptr,
                          in_registers ? rotation : nullptr};
      if (!by_row)
        tile_keys(layer, row, to_come, moves, n, width, keys);
      else if (turns)
        turned_rows(layer, row, to_come, moves, n, width, keys, turned);
      else
        tile_rotation(layer, moves, n, row, rotation);
      for (int64_t i = 0; i < n; i++) value[i] = row[i] + layer.value_at;
      for (int64_t g = 0; g < group;) {
        const int64_t q = (head - begin) * group + g, left = group - g;
        const int32_t* ranks = rank + s * TILE;
        switch (left > 4 ? left == 5 ? 3 : 4 : left) {
          case 4: attend_tile<4>(layer, mass, on, q, tile, tile_of, value, ranks, n, cached); g += 4; break;
          case 3: attend_tile<3>(layer, mass, on, q, tile, tile_of, value, ranks, n, cached); g += 3; break;
          case 2: attend_tile<2>(layer, mass, on, q, tile, tile_of, value, ranks, n, cached); g += 2; break;
          case 1: attend_tile<1>(layer, mass, on, q, tile, tile_of, value, ranks, n, cached); g += 1; break;
        }
      }
      if (Plain) std::swap(row, next);
    }
  }
  end_softmax(request, mass, on);
}

}  // namespace
