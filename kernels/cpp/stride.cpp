// SPDX-License-Identifier: Apache-2.0
// A stride of one request's prompt in two calls: attention with the scores it makes, then, when
// the policy has chosen from them, the insertion of the survivors.
#include "layer.h"
#include "panel.h"

// `num_tokens` new tokens after `cached` ones.
struct Stride {
  const int64_t* pages;
  int64_t start, num_tokens, stream, cached, old_slots, new_slots, moved;
  const float* logit_scale;  // [num_tokens], or null: all 1
  const float* given;        // [num_tokens] scores that attention doesn't make, or null
  int64_t scored;            // rank of the first token that gets one; those below 0 get none
  float* scores;             // [S, cached + num_tokens], chronological; null: not wanted
};

namespace {

constexpr int64_t LOGITS = 1 << 16;  // fp32 logits at once and thread: a quarter of an L2 cache
constexpr int64_t DEPTH = 128;       // keys whose values stay in L1 over a tile's rows

// The cache and the stride as plain fp32 matrices, in slot order, the new tokens behind.
struct Packed {
  int64_t total, padded, width;  // keys, rounded up to COLUMNS; channels, rounded up to W
  int64_t tile, tiles;           // queries at once
  float* keys;                   // [H, padded / COLUMNS, D, COLUMNS], transposed blocks
  float* values;                 // [H, padded, width]
  float* mass;                   // [H * G, tiles, padded]
  int32_t *slot, *rank;          // [S, cached], of the keys in this order
};

template <class T>
struct Work {
  Layer layer;
  const Stride& stride;
  const Rows& rows;

  const T* query(int64_t t, int64_t head) const {
    return (const T*)rows.query + (stride.start + t) * rows.query_stride + head * layer.head_size;
  }
  const T* key(int64_t t, int64_t head) const {
    return (const T*)rows.key + (stride.start + t) * rows.key_stride + head * layer.head_size;
  }
  const T* value(int64_t t, int64_t head) const {
    return (const T*)rows.value + (stride.start + t) * rows.value_stride + head * layer.head_size;
  }
  T* output(int64_t t, int64_t head) const {
    return (T*)rows.output + (stride.start + t) * rows.output_stride + head * layer.head_size;
  }
  T* cached(int64_t slot, int64_t head) {
    return layer.template row<T>(stride.pages[slot / layer.block_size], head,
                                 slot % layer.block_size);
  }
};

// Slots that hold a token, and their ranks. Returns how many: `stride.cached`.
template <class T>
void list_slots(const Work<T>& work, const Packed& packed, int64_t set) {
  const Stride& stride = work.stride;
  std::vector<int32_t> rank(stride.old_slots);
  gather(work.layer, stride.pages, set, (const int32_t*)work.layer.rank, rank.data(), 0,
         stride.old_slots);
  int64_t n = set * stride.cached;
  const int64_t end = n + stride.cached;
  for (int64_t slot = 0; slot < stride.old_slots && n < end; slot++)
    if (rank[slot] >= 0) {
      packed.slot[n] = (int32_t)slot;
      packed.rank[n++] = rank[slot];
    }
}

// Keys (rotated to where they are now, transposed) and values of one block of COLUMNS tokens.
template <class T>
void pack(Work<T>& work, const Packed& packed, int64_t head, int64_t block) {
  static thread_local Scratch scratch;
  const Layer& layer = work.layer;
  const Stride& stride = work.stride;
  const int64_t size = layer.head_size, set = layer.set_of(head);
  float* key = scratch.take(packed.width);
  float* keys = packed.keys + (head * packed.padded + block * COLUMNS) * size;
  float* values = packed.values + (head * packed.padded + block * COLUMNS) * packed.width;
  for (int64_t i = 0; i < COLUMNS; i++) {
    const int64_t j = block * COLUMNS + i;
    float* to = values + i * packed.width;
    if (j >= packed.total) {
      std::fill(key, key + packed.width, 0.0f);
      std::fill(to, to + packed.width, 0.0f);
    } else if (j >= stride.cached) {
      widen_row(key, work.key(j - stride.cached, head), size);
      widen_row(to, work.value(j - stride.cached, head), size);
    } else {
      const int64_t slot = packed.slot[set * stride.cached + j];
      const T* row = work.cached(slot, head);
      widen_row(key, row, size);
      widen_row(to, row + size, size);
      if (stride.moved && layer.rotation) {
        int64_t page = stride.pages[slot / layer.block_size];
        int64_t born = layer.born[layer.word(page, set) + slot % layer.block_size];
        rotate(layer, key, born - packed.rank[set * stride.cached + j]);
      }
    }
    for (int64_t c = 0; c < size; c++) keys[c * COLUMNS + i] = key[c];
  }
}

// Logits of one query to exponentials; returns 1 / their sum. `visible` keys, then masked ones.
inline float softmax_row(float* x, int64_t visible, int64_t end) {
  vf top = splat(-INFINITY);
  for (int64_t j = visible; j < end; j++) x[j] = -INFINITY;
  for (int64_t j = 0; j < end; j += W) top = vmax(top, load(x + j));
  const float most = largest(top);
  vf total{};
  for (int64_t j = 0; j < end; j += W) {
    vf e = vexp(load(x + j) - most);
    store(x + j, e);
    total += e;
  }
  return 1.0f / sum(total);
}

// Attention of one query head over a tile of the stride's queries.
template <class T>
void attend(const Work<T>& work, const Packed& packed, const float* weights, int64_t head,
            int64_t tile) {
  static thread_local Scratch scratch;
  const Layer& layer = work.layer;
  const Stride& stride = work.stride;
  const int64_t size = layer.head_size, width = packed.width, kv_head = head / layer.group;
  const int64_t begin = tile * packed.tile;
  const int64_t n = std::min(packed.tile, stride.num_tokens - begin);
  const int64_t end = round_up(stride.cached + begin + n, COLUMNS);  // later keys are not seen
  float* query = scratch.take(n * (2 * width + end));
  float* acc = query + n * width;
  float* logits = acc + n * width;
  for (int64_t r = 0; r < n; r++) {
    const float factor = stride.logit_scale ? stride.logit_scale[begin + r] : 1.0f;
    widen_row(query + r * width, work.query(begin + r, head), size);
    for (int64_t c = 0; c < width; c += W)
      store(query + r * width + c, load(query + r * width + c) * (layer.scale * factor));
  }
  for (int64_t j = 0; j < end; j += COLUMNS)
    multiply(n, COLUMNS, query, width, packed.keys + (kv_head * packed.padded + j) * size, COLUMNS,
             logits + j, end, size, false);
  float* mass = packed.mass + (head * packed.tiles + tile) * packed.padded;
  if (weights) std::fill(mass, mass + packed.padded, 0.0f);
  float inverse[LOGITS / COLUMNS];
  for (int64_t r = 0; r < n; r++) {
    float* x = logits + r * end;
    const int64_t position = stride.cached + begin + r;
    if (layer.softcap)
      for (int64_t j = 0; j < end; j++) x[j] = layer.soft_cap(x[j]);
    if (layer.slopes) {
      const int32_t* rank = packed.rank + layer.set_of(kv_head) * stride.cached;
      const float slope = layer.slopes[head];
      for (int64_t j = 0; j < stride.cached; j++) x[j] += slope * (rank[j] - position);
      for (int64_t j = stride.cached; j < end; j++) x[j] += slope * (j - position);
    }
    inverse[r] = softmax_row(x, position + 1, end);
    if (!weights) continue;
    const float weight = weights[begin + r] * inverse[r];
    for (int64_t j = 0; j < end; j += W) store(mass + j, load(mass + j) + load(x + j) * weight);
  }
  for (int64_t j = 0; j < end; j += DEPTH)
    multiply(n, width, logits + j, end, packed.values + (kv_head * packed.padded + j) * width,
             width, acc, width, std::min(DEPTH, end - j), j > 0);
  for (int64_t r = 0; r < n; r++) {
    T* to = work.output(begin + r, head);
    narrow_row(to, acc + r * width, inverse[r], size);
  }
}

// The scores after this stride: what its queries gave, reduced over a set's heads, on decayed ones.
template <class T>
void write_scores(const Work<T>& work, const Packed& packed, int64_t set) {
  const Layer& layer = work.layer;
  const Stride& stride = work.stride;
  const int64_t cached = stride.cached, heads = layer.num_queries() / layer.num_sets;
  const float decay = stride.given ? 1.0f : std::pow((double)layer.decay, stride.num_tokens);
  float* scores = stride.scores + set * packed.total;
  std::vector<float> reduced(packed.padded), old(stride.old_slots);
  for (int64_t j = 0; j < packed.padded && !stride.given; j += W) {
    vf column[256];
    for (int64_t q = 0; q < heads; q++) {
      const float* mass = packed.mass + (set * heads + q) * packed.tiles * packed.padded + j;
      column[q] = load(mass);
      for (int64_t t = 1; t < packed.tiles; t++) column[q] += load(mass + t * packed.padded);
    }
    store(reduced.data() + j, reduce_heads(layer.reduction, column, heads));
  }
  gather(layer, stride.pages, set, (const float*)layer.score, old.data(), 0, stride.old_slots);
  for (int64_t j = 0; j < cached; j++)
    scores[packed.rank[set * cached + j]] =
        old[packed.slot[set * cached + j]] * decay + reduced[j];
  for (int64_t t = 0; t < stride.num_tokens; t++)
    scores[cached + t] = reduced[cached + t];
  for (int64_t t = 0; t < stride.num_tokens && stride.given; t++)
    if (stride.scored + t >= 0) scores[stride.scored + t] = stride.given[t];
}

template <class T>
void run(const Layer& layer, const Stride& stride, const Rows& rows) {
  static thread_local Scratch scratch;
  Work<T> work{layer, stride, rows};
  const bool scored = stride.scores && !stride.given;
  Packed packed{};
  packed.total = stride.cached + stride.num_tokens;
  packed.padded = round_up(packed.total, COLUMNS);
  packed.width = round_up(layer.head_size, W);
  packed.tile = std::max<int64_t>(LOGITS / packed.padded / ROWS, 1) * ROWS;
  packed.tiles = (stride.num_tokens + packed.tile - 1) / packed.tile;
  const int64_t keys = layer.num_heads * packed.padded;
  const int64_t masses = scored ? layer.num_queries() * packed.tiles * packed.padded : 0;
  const int64_t listed = layer.num_sets * stride.cached;
  packed.keys = scratch.take(keys * (layer.head_size + packed.width) + masses + 2 * listed + 16);
  packed.values = packed.keys + round_up(keys * layer.head_size, 16);
  packed.mass = packed.values + keys * packed.width;
  packed.slot = (int32_t*)(packed.mass + masses);
  packed.rank = packed.slot + listed;
  std::vector<float> weights(stride.num_tokens);
  double weight = layer.weight;
  for (int64_t t = stride.num_tokens; t-- > 0; weight *= layer.decay) weights[t] = (float)weight;
  for (int64_t set = 0; set < layer.num_sets; set++) list_slots(work, packed, set);
#pragma omp parallel if (omp_get_max_threads() > 1)
  {
#pragma omp for schedule(static) collapse(2)
    for (int64_t head = 0; head < layer.num_heads; head++)
      for (int64_t block = 0; block < packed.padded / COLUMNS; block++)
        pack(work, packed, head, block);
#pragma omp for schedule(dynamic) collapse(2)
    for (int64_t head = 0; head < layer.num_queries(); head++)
      for (int64_t tile = 0; tile < packed.tiles; tile++)
        attend(work, packed, scored ? weights.data() : nullptr, head, tile);
#pragma omp for schedule(dynamic)
    for (int64_t set = 0; set < layer.num_sets; set++)
      if (stride.scores) write_scores(work, packed, set);
  }
}

// Renumber one set's survivors; the k-th surviving new token takes the k-th free slot.
template <class T>
void insert(Work<T> work, const bool* keep, int64_t set) {
  Layer& layer = work.layer;
  const Stride& stride = work.stride;
  const int64_t total = stride.cached + stride.num_tokens;
  const float* scores = stride.scores ? stride.scores + set * total : nullptr;
  keep += set * total;
  std::vector<int32_t> place(total), rank(stride.new_slots, -1);
  std::vector<float> score(stride.new_slots, 0.0f);
  int32_t kept = 0;
  for (int64_t i = 0; i < total; i++) place[i] = keep[i] ? kept++ : -1;
  gather(layer, stride.pages, set, (const int32_t*)layer.rank, rank.data(), 0, stride.old_slots);
  for (int64_t slot = 0; slot < stride.old_slots; slot++) {
    const int32_t old = rank[slot];
    if (old < 0) continue;
    rank[slot] = place[old];
    if (scores) score[slot] = scores[old];
  }
  const int64_t begin = layer.num_sets == 1 ? 0 : set;
  const int64_t end = layer.num_sets == 1 ? layer.num_heads : set + 1;
  int64_t slot = 0;
  for (int64_t t = 0; t < stride.num_tokens; t++) {
    if (!keep[stride.cached + t]) continue;
    while (slot < stride.new_slots && rank[slot] >= 0) slot++;
    if (slot == stride.new_slots) break;  // the policy's count says that this cannot be
    rank[slot] = place[stride.cached + t];
    if (scores) score[slot] = scores[stride.cached + t];
    const int64_t word = layer.word(stride.pages[slot / layer.block_size], set) +
                         slot % layer.block_size;
    layer.born[word] = (int32_t)(stride.cached + t);
    if (layer.token) layer.token[word] = (int32_t)(stride.stream + t);
    for (int64_t head = begin; head < end; head++) {
      T* row = work.cached(slot, head);
      std::memcpy(row, work.key(t, head), layer.head_size * sizeof(T));
      std::memcpy(row + layer.head_size, work.value(t, head), layer.head_size * sizeof(T));
    }
  }
  scatter(layer, stride.pages, set, layer.rank, (const int32_t*)rank.data(), 0, stride.new_slots);
  if (scores)
    scatter(layer, stride.pages, set, layer.score, (const float*)score.data(), 0,
            stride.new_slots);
}

template <class T>
void run_insert(const Layer& layer, const Stride& stride, const Rows& rows, const bool* keep) {
#pragma omp parallel for schedule(dynamic) if (layer.num_sets > 1 && omp_get_max_threads() > 1)
  for (int64_t set = 0; set < layer.num_sets; set++)
    insert(Work<T>{layer, stride, rows}, keep, set);
}

}  // namespace

extern "C" int64_t stride_size() { return sizeof(Stride); }

extern "C" void attend_stride(const Layer* layer, const Stride* stride, const Rows* rows) {
  if (layer->dtype == FP32) run<float>(*layer, *stride, *rows);
  if (layer->dtype == BF16) run<bf16>(*layer, *stride, *rows);
#ifdef HAS_FP16
  if (layer->dtype == FP16) run<fp16>(*layer, *stride, *rows);
#endif
}

extern "C" void insert_stride(const Layer* layer, const Stride* stride, const Rows* rows,
                              const bool* keep) {
  if (layer->dtype == FP32) run_insert<float>(*layer, *stride, *rows, keep);
  if (layer->dtype == BF16) run_insert<bf16>(*layer, *stride, *rows, keep);
#ifdef HAS_FP16
  if (layer->dtype == FP16) run_insert<fp16>(*layer, *stride, *rows, keep);
#endif
}
