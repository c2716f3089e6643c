// SPDX-License-Identifier: Apache-2.0
// Attention for one new token of each of many requests, if units fill whole registers: over blocks
// of W tokens. Queries are rotated by the distance that a unit has moved; keys are used as stored.
#pragma once

#include "attend_tokens.h"

namespace {

// Exponentials are relative to a reference that is raised only if a logit exceeds it by more than
// this. Sums stay within fp32, and few blocks have to compute their largest logit.
constexpr float SLACK = 16;

// W slots of a unit, of which the first `tokens` are filled.
struct Block {
  int64_t row;  // of the first slot, in elements from the start of the pool
  int64_t slot;
  int32_t tokens, rank, distance;  // rank of the first token; distance moved
};

// Lists the blocks of a head set with tokens. Returns their number.
template <class T>
int64_t list_blocks(const Request<T>& request, int64_t set, Block* block) {
  const Layer& layer = request.layer;
  const int64_t unit = layer.unit, cached = request.step()[CACHED];
  const int64_t places = request.step()[OLD_SLOTS] / unit, size = 2 * layer.head_size;
  const bool turns = request.batch.moved && layer.rotation;
  int64_t n = 0;
  for (int64_t place = 0; place < places; place++) {
    const int64_t page = request.pages()[place / layer.page_units], at = place % layer.page_units;
    const int64_t word = layer.word(page, set) + at, rank = layer.rank[word] * unit;
    if (rank < 0) continue;
    const int64_t row = page * layer.page_bytes / (int64_t)sizeof(T) + at * unit * size;
    const int32_t distance = turns ? layer.born[word] - (int32_t)rank - request.shift() : 0;
    for (int64_t i = 0; i < unit && rank + i < cached; i += W) {
      const int32_t tokens = (int32_t)std::min<int64_t>(W, cached - rank - i);
      block[n++] = {row + i * size, place * unit + i, tokens, (int32_t)(rank + i), distance};
    }
  }
  return n;
}

// Dot products of `Queries` queries with W keys. Prefetches the values behind the keys.
// `Width` is `width` if known at compile time, to unroll the loop; else 0.
template <int Queries, int Width, class T>
__attribute__((noinline)) void block_dots(const float* query, int64_t width, const T* key,
                                          vf* result) {
  constexpr int KEYS = W == 16 ? 4 : 2;
  if (Width) width = Width;
  Folded<Queries, KEYS> folded;
#pragma GCC unroll 4
  for (int k = 0; k < W / KEYS; k++, key += KEYS * 2 * width) {
    vf sum[Queries][KEYS] = {};
    int64_t c = 0;
    for (; c + 2 * W <= width; c += 2 * W) {
      vf x[KEYS][2];
#pragma GCC unroll 4
      for (int i = 0; i < KEYS; i++) {
        load_two(key + i * 2 * width + c, x[i]);
        x[i][0] = held(x[i][0]), x[i][1] = held(x[i][1]);
      }
#pragma GCC unroll 4
      for (int q = 0; q < Queries; q++) {
        const float* at = query + q * width + c;
        const vf a = held(load(at)), b = held(load(at + W));
#pragma GCC unroll 4
        for (int i = 0; i < KEYS; i++) sum[q][i] += a * x[i][0];
#pragma GCC unroll 4
        for (int i = 0; i < KEYS; i++) sum[q][i] += b * x[i][1];
      }
    }
    if (c < width)
      for (int q = 0; q < Queries; q++)
        for (int i = 0; i < KEYS; i++)
          sum[q][i] += load(query + q * width + c) * load(key + i * 2 * width + c);
#pragma GCC unroll 4
    for (int i = 0; i < KEYS; i++) prefetch(key + (2 * i + 1) * width, width);
    folded.take(k, sum);
  }
  folded.give(result);
}
template <int Queries, class T>
inline void block_dots(const float* query, int64_t width, const T* key, vf* result) {
  if (width == 64) return block_dots<Queries, 64>(query, width, key, result);
  if (width == 128) return block_dots<Queries, 128>(query, width, key, result);
  block_dots<Queries, 0>(query, width, key, result);
}

// acc[q, c ..] += sum over a block's tokens of exps[q, token] * V[token, c ..], `Parts` registers.
// Prefetches `next`.
template <int Queries, int Parts, class T>
inline void block_values(float* acc, int64_t width, const float* exps, int64_t padded,
                         const T* value, int64_t tokens, const T* next) {
  vf sum[Queries][Parts];
#pragma GCC unroll 4
  for (int q = 0; q < Queries; q++)
#pragma GCC unroll 4
    for (int p = 0; p < Parts; p++) sum[q][p] = load(acc + q * width + p * W);
  for (int64_t i = 0; i < tokens; i++, value += 2 * width, next += 2 * width) {
    prefetch(next, Parts * W);
    vf v[Parts];
#pragma GCC unroll 4
    for (int p = 0; p < Parts; p += 2)
      if constexpr (Parts > 1) load_two(value + p * W, v + p);
      else v[p] = load(value);
#pragma GCC unroll 4
    for (int p = 0; p < Parts; p++) v[p] = held(v[p]);
#pragma GCC unroll 4
    for (int q = 0; q < Queries; q++) {
      const vf e = splat(exps[q * padded + i]);
#pragma GCC unroll 4
      for (int p = 0; p < Parts; p++) sum[q][p] += e * v[p];
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < Queries; q++)
#pragma GCC unroll 4
    for (int p = 0; p < Parts; p++) store(acc + q * width + p * W, sum[q][p]);
}

// One KV head of a request: every block for all queries of the head.
template <class T>
struct UnitHead {
  const Layer& layer;
  const Mass& mass;
  Online& on;
  const T* rows;  // of the head, in the pool's first page
  int64_t cached;
  float* turned;  // [group, width], rotated queries
  int32_t distance = 0;  // by which they are rotated

  void turn(int32_t wanted) {
    if (wanted == distance) return;
    distance = wanted;
    const int64_t half = layer.half, width = on.width, end = layer.group * width;
    if (!layer.turns_by_registers()) {
      std::memcpy(turned, on.query, end * sizeof(float));
      for (int64_t q = 0; q < end; q += width) rotate<-1>(layer, turned + q, wanted);
      for (int64_t q = 0; q < end; q += width) to_loaded_order<T>(turned + q, width);
      return;
    }
    const float* rotation = layer.rotation + (int64_t)wanted * 2 * half;
    for (int64_t c = 0; c < half; c += W) {
      const vf cos = held(load(rotation + c)), sin = held(load(rotation + half + c));
      for (int64_t at = c; at < end; at += width) {
        const vf x = load(on.query + at), y = load(on.query + at + half);
        store(turned + at, x * cos + y * sin);
        store(turned + at + half, y * cos - x * sin);
      }
    }
    for (int64_t q = 0; q < end; q += width) to_loaded_order<T>(turned + q, width);
  }

  float* exps(int64_t q, const Block& block) const {
    return mass.exps + (on.first + q) * mass.padded + mass.place(block.slot);
  }

  // Raises the references of queries from `q` on to a block's logits, and rescales sums.
  template <int Queries>
  void raise(int64_t q, const vf* x) {
    for (int k = 0; k < Queries; k++) {
      float& most = mass.row_max[on.first + q + k];
      const float before = most, now = std::max(before, largest(x[k]));
      if (now == before) continue;
      const float shrink = std::exp(before - now);
      float *acc = on.acc + (q + k) * on.width, *sums = on.sums + (q + k) * W;
      most = now;
      store(sums, load(sums) * shrink);
      for (int64_t c = 0; c < on.width; c += W) store(acc + c, load(acc + c) * shrink);
    }
  }

  // Turns a block's logits into exponentials and stores them.
  template <int Queries>
  void exponentials(int64_t q, const Block& block, vf* x) {
    const vi lane = lanes();
    vi above{};
    for (int k = 0; k < Queries; k++) {
      const int64_t full = on.first + q + k;
      if (layer.softcap) x[k] = layer.soft_cap(x[k]);
      if (layer.slopes)
        x[k] += layer.slopes[full] *
                __builtin_convertvector(lane + (block.rank - (int32_t)cached), vf);
      if (block.tokens < W) x[k] = lane < block.tokens ? x[k] : splat(-INFINITY);
      above |= x[k] > mass.row_max[full] + SLACK;
    }
    if (any(above)) raise<Queries>(q, x);
    for (int k = 0; k < Queries; k++) {
      const int64_t full = on.first + q + k;
      const float most = mass.row_max[full];
      const vf e = vexp(x[k] - most);
      float* sums = on.sums + (q + k) * W;
      store(exps(q + k, block), e);
      store(sums, load(sums) + e);
      mass.relative[full * mass.blocks + mass.place(block.slot) / W] = most;
    }
  }

  template <int Queries>
  void values(int64_t q, const Block& block, const T* next) const {
    const int64_t width = on.width, padded = mass.padded, tokens = block.tokens;
    const T* value = rows + block.row + width;
    float *acc = on.acc + q * width, *of_block = exps(q, block);
    int64_t c = 0;
    for (; c + 4 * W <= width; c += 4 * W)
      block_values<Queries, 4>(acc + c, width, of_block, padded, value + c, tokens, next + c);
    for (; c + 2 * W <= width; c += 2 * W)
      block_values<Queries, 2>(acc + c, width, of_block, padded, value + c, tokens, next + c);
    if (c < width)
      block_values<Queries, 1>(acc + c, width, of_block, padded, value + c, tokens, next + c);
  }

  // Interleaves a block's logits with the values of the previous block, which are independent.
  template <int Queries>
  void step(int64_t q, const Block* now, const Block* before, const T* next) {
    vf x[Queries];
    if (now) block_dots<Queries>(turned + q * on.width, on.width, rows + now->row, x);
    if (before) values<Queries>(q, *before, next);
    if (now) exponentials<Queries>(q, *now, x);
  }

  void run(const Block* block, int64_t n) {
    std::memcpy(turned, on.query, on.num * on.width * sizeof(float));
    for (int64_t at = 0; at < on.num * on.width; at += on.width) {
      to_loaded_order<T>(turned + at, on.width);
      to_loaded_order<T>(on.acc + at, on.width);
    }
    for (int64_t i = 0; n && i <= n; i++) {
      const Block *now = i < n ? block + i : nullptr, *before = i ? block + i - 1 : nullptr;
      if (now) turn(now->distance);
      const T* next = rows + block[std::min(i + 1, n - 1)].row;
      for (int64_t q = 0; q < on.num;) {
        const int64_t left = on.num - q;
        switch (left > 4 ? left == 5 ? 3 : 4 : left) {
          case 4: step<4>(q, now, before, next); q += 4; break;
          case 3: step<3>(q, now, before, next); q += 3; break;
          case 2: step<2>(q, now, before, next); q += 2; break;
          case 1: step<1>(q, now, before, next); q += 1; break;
        }
      }
    }
  }
};

// Attention of KV heads [begin, end) of one request, one head at a time.
template <class T>
void attend_units(const Request<T>& request, const Mass& mass, int64_t begin, int64_t end) {
  static thread_local Scratch scratch;
  static thread_local std::vector<Block> block;
  const Layer& layer = request.layer;
  if (request.is_padding()) return;
  const int64_t width = layer.head_size, group = layer.group, cached = request.step()[CACHED];
  block.resize(std::max<size_t>(block.size(), request.step()[OLD_SLOTS] / W));
  const int64_t floats = Online::floats(group, width);
  float *memory = scratch.take(floats + group * width + width), *turned = memory + floats;
  int64_t n = 0;
  for (int64_t head = begin; head < end; head++) {
    Online on(memory, head * group, group, width);
    begin_softmax(request, mass, on, turned + group * width);
    if (head == begin || layer.num_sets > 1)
      n = list_blocks(request, layer.set_of(head), block.data());
    const T* rows = (const T*)layer.row(0, head, 0);
    UnitHead<T>{layer, mass, on, rows, cached, turned}.run(block.data(), n);
    for (int64_t q = 0; q < group; q++) from_loaded_order<T>(on.acc + q * width, width);
    end_softmax(request, mass, on);
  }
}

}  // namespace
