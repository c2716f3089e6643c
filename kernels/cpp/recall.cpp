// SPDX-License-Identifier: Apache-2.0
// How much one token's query heads ask for each stored unit: the probability of its keys, as if the
// query attended to the whole store. Keys are in 8 bits, each with a scale of its own.
#include "layer.h"

// A layer's stored units, in chunks of `chunk_units`, and one token's query heads.
struct Store {
  const int8_t* const* codes;  // [num_chunks] of [H, chunk_units, unit, D]
  const float* const* scales;  // [num_chunks] of [H, chunk_units, unit]
  const float* queries;        // [H * G, D], before rotation, times the scale of logits
  float* asked;                // [H * G, end - begin], written
  int64_t num_chunks, chunk_units, begin, end;  // units begin .. end - 1 of all chunks' are there
  int64_t unit, num_heads, group, head_size;
};

namespace {

typedef int8_t vb __attribute__((vector_size(W)));

// W keys of 8 bits as fp32 rows of `width` channels, zeros behind.
inline void widen_codes(float* to, const int8_t* from, int64_t size, int64_t width) {
  for (int64_t i = 0; i < W; i++, from += size, to += width) {
    int64_t c = 0;
    for (; c + W <= size; c += W)
      store(to + c, __builtin_convertvector(__builtin_convertvector(load_as<vb>(from + c), vi), vf));
    for (; c < width; c++) to[c] = c < size ? from[c] : 0;
  }
}

// Products of one query and W rows.
inline vf products(const float* query, const float* rows, int64_t width) {
  vf sums[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) sums[i] = load(query) * load(rows + i * width);
  for (int64_t c = W; c < width; c += W) {
    const vf x = load(query + c);
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) sums[i] += x * load(rows + i * width + c);
  }
  fold_within<W>(sums);
  return sums[0];
}

// Logits of one KV head's queries for one chunk, in whole registers of keys; `keys` a chunk's row.
void chunk_logits(const Store& units, int64_t head, int64_t chunk, float* logits, int64_t keys) {
  static thread_local Scratch scratch;
  const int64_t of_chunk = units.chunk_units * units.unit, size = units.head_size;
  const int64_t width = round_up(size, W), first = chunk * of_chunk;
  const int64_t low = std::max<int64_t>(units.begin * units.unit - first, 0) / W * W;
  const int64_t high = std::min(units.end * units.unit - first, of_chunk);
  float* rows = scratch.take((W + units.group) * width);
  float* queries = rows + W * width;
  for (int64_t g = 0; g < units.group; g++)
    widen_row(queries + g * width, units.queries + (head * units.group + g) * size, size);
  const int8_t* codes = units.codes[chunk] + head * of_chunk * size;
  const float* scales = units.scales[chunk] + head * of_chunk;
  for (int64_t k = low; k < high; k += W) {
    widen_codes(rows, codes + k * size, size, width);
    for (int64_t g = 0; g < units.group; g++)
      store(logits + (head * units.group + g) * keys + first + k,
            products(queries + g * width, rows, width) * load(scales + k));
  }
}

// A query head's logits to probabilities, summed over each unit.
void unit_masses(const Store& units, float* x, float* asked) {
  const int64_t begin = units.begin * units.unit, end = units.end * units.unit;
  const int64_t low = begin / W * W, high = round_up(end, W);
  for (int64_t k = low; k < begin; k++) x[k] = -INFINITY;
  for (int64_t k = end; k < high; k++) x[k] = -INFINITY;
  vf top = splat(-INFINITY), total{};
  for (int64_t k = low; k < high; k += W) top = vmax(load(x + k), top);
  const float most = largest(top);
  for (int64_t k = low; k < high; k += W) {
    const vf e = vexp(load(x + k) - most);
    store(x + k, e);
    total += e;
  }
  const float inverse = 1.0f / sum(total);
  for (int64_t u = 0; u < units.end - units.begin; u++) {
    float mass = 0;
    for (int64_t i = 0; i < units.unit; i++) mass += x[begin + u * units.unit + i];
    asked[u] = mass * inverse;
  }
}

}  // namespace

extern "C" int64_t store_size() { return sizeof(Store); }

extern "C" void recall_evidence(const Store* given) {
  static thread_local Scratch scratch;
  const Store& units = *given;
  const int64_t keys = round_up(units.num_chunks * units.chunk_units * units.unit, W);
  float* logits = scratch.take(units.num_heads * units.group * keys);
#pragma omp parallel if (omp_get_max_threads() > 1)
  {
#pragma omp for schedule(static) collapse(2)
    for (int64_t head = 0; head < units.num_heads; head++)
      for (int64_t chunk = 0; chunk < units.num_chunks; chunk++)
        chunk_logits(units, head, chunk, logits, keys);
#pragma omp for schedule(static)
    for (int64_t q = 0; q < units.num_heads * units.group; q++)
      unit_masses(units, logits + q * keys,
                  units.asked + q * (units.end - units.begin));
  }
}
