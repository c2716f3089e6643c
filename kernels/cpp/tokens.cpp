// SPDX-License-Identifier: Apache-2.0
// Processes one new token of each of many requests in one layer: attends, updates scores, inserts.
#include "attend_units.h"
#include "insert_tokens.h"

// Bytes of a step's rows above which they are read from memory instead of the last-level cache.
// Then prefetching tiles is faster, and reading keys twice is slower (measured on Zen 5 with 32 MiB).
extern "C" {
int64_t from_memory = 12 << 20;
}

namespace {

template <bool Plain, class T>
void attend_heads(const Request<T>& request, const Mass& mass, int64_t begin, int64_t end) {
  const Layer& layer = request.layer;
  const bool in_blocks = Plain && !layer.latent() && layer.unit % W == 0 && layer.head_size % W == 0;
  in_blocks ? attend_units(request, mass, begin, end) : attend<Plain>(request, mass, begin, end);
}

template <bool Plain, class T>
void run(const Layer& layer, const Tokens& batch, const Rows& rows) {
  static thread_local Scratch scratch;
  Shape shape{layer.num_queries(), round_up(layer.head_size, W), 0, 0, 0, false, false};
  int64_t bytes = 0;
  for (int64_t b = 0; b < batch.count; b++) {
    const Step step{batch.steps + b * STEP_COLUMNS};
    const int64_t slots = step[STREAM] < 0 ? 0 : step[OLD_SLOTS];
    shape.slots = std::max(shape.slots, slots);
    shape.scored |= layer.uses_scores && step.weight() != 0;
    bytes += slots * layer.num_heads * layer.row_bytes();
  }
  shape.prefetch = bytes > from_memory;
  shape.padded = shape.scored ? round_up(shape.slots, TILE) : TILE;
  shape.blocks = round_up(shape.padded / W, W);
  const int threads = omp_get_max_threads();
  const int64_t floats = shape.mass_floats();
  if (batch.count >= threads) {  // one thread per request
    float* memory = scratch.take(floats * threads);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t b = 0; b < batch.count; b++) {
      Request<T> request{layer, batch, rows, shape, b};
      Mass mass = shape.mass(memory + omp_get_thread_num() * floats);
      if (layer.attends) attend_heads<Plain>(request, mass, 0, layer.num_heads);
      for (int64_t s = 0; s < layer.num_sets && layer.inserts; s++) insert(request, mass, s);
    }
    return;
  }
  float* memory = scratch.take(floats * batch.count);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(dynamic) collapse(2)
    for (int64_t b = 0; b < batch.count; b++)
      for (int64_t head = 0; head < layer.num_heads; head++)
        if (layer.attends) attend_heads<Plain>(Request<T>{layer, batch, rows, shape, b},
                            shape.mass(memory + b * floats), head, head + 1);
#pragma omp for schedule(dynamic) collapse(2)
    for (int64_t b = 0; b < batch.count; b++)
      for (int64_t s = 0; s < layer.num_sets; s++)
        if (layer.inserts)
          insert(Request<T>{layer, batch, rows, shape, b}, shape.mass(memory + b * floats), s);
  }
}

template <class T>
void run(const Layer& layer, const Tokens& batch, const Rows& rows) {
  layer.plain() ? run<true, T>(layer, batch, rows) : run<false, T>(layer, batch, rows);
}

}  // namespace

extern "C" int64_t tokens_size() { return sizeof(Tokens); }
extern "C" int64_t undone_size() { return sizeof(Undone); }
extern "C" int64_t layer_size() { return sizeof(Layer); }
extern "C" int64_t rows_size() { return sizeof(Rows); }
// Sets the number of threads of the OpenMP runtime that this library uses.
extern "C" void set_threads(int64_t number) { omp_set_num_threads((int)number); }
extern "C" int64_t has_fp16() {
#ifdef HAS_FP16
  return 1;
#else
  return 0;
#endif
}

// `count` batches one after the other: a request may have a token in each of them.
extern "C" void attend_and_insert_tokens(const Layer* layer, const Tokens* const* batches,
                                         int64_t count, const Rows* rows) {
  for (int64_t i = 0; i < count; i++) {
    if (layer->dtype == FP32) run<float>(*layer, *batches[i], *rows);
    if (layer->dtype == BF16) run<bf16>(*layer, *batches[i], *rows);
#ifdef HAS_FP16
    if (layer->dtype == FP16) run<fp16>(*layer, *batches[i], *rows);
#endif
  }
}

extern "C" void undo_tokens(const Layer* layer, const Undone* undone) {
#pragma omp parallel for collapse(2) if (undone->count > 1)
  for (int64_t b = 0; b < undone->count; b++)
    for (int64_t set = 0; set < layer->num_sets; set++)
      undo(*layer, undone->rows + b * UNDONE_COLUMNS, undone->pages + b * undone->num_pages, set);
}
