// SPDX-License-Identifier: Apache-2.0
// Processes one request's stride in one layer: attends, updates scores, applies rules, inserts.
#include "insert_stride.h"

namespace {

template <class T>
void run(const Layer& layer, const Stride& stride, const Rows& rows) {
  static thread_local Scratch scratch;
  Work<T> work{layer, stride, rows};
  const bool scored = work.scored();
  typedef typename Work<T>::Number Number;
  Packed<T> packed{};
  packed.padded = round_up(work.total, COLUMNS);
  packed.width = round_up(layer.head_size, W);
  packed.value_width = round_up(layer.value_size, W);
  packed.depth = (layer.head_size + Work<T>::N::DEPTHS - 1) / Work<T>::N::DEPTHS;
  packed.tile = std::max<int64_t>(LOGITS / packed.padded / ROWS, 1) * ROWS;
  packed.tiles = (work.num_tokens + packed.tile - 1) / packed.tile;
  packed.run = scored ? tiles_of_a_run(layer, packed) : 1;
  packed.runs = (packed.tiles + packed.run - 1) / packed.run;
  const int64_t keys = layer.num_heads * packed.padded;
  const int64_t masses = scored ? layer.num_queries() * packed.runs * packed.padded : 0;
  const int64_t listed = layer.num_sets * work.cached;
  const int64_t values = keys / Work<T>::N::DEPTHS * packed.value_width;
  packed.mass = scratch.take(masses + keys * packed.depth + values + 2 * listed + 32);
  packed.keys = (Number*)(packed.mass + masses);
  packed.values = packed.keys + round_up(keys * packed.depth, 16);
  packed.slot = (int32_t*)(packed.values + values);
  packed.rank = packed.slot + listed;
  std::vector<float> weights(work.num_tokens);
  double weight = work.step.weight(), decay = work.step.decay();
  for (int64_t t = work.num_tokens; t-- > 0; weight *= decay) weights[t] = (float)weight;
  for (int64_t set = 0; set < layer.num_sets; set++) list_slots(work, packed, set);
#pragma omp parallel if (omp_get_max_threads() > 1)
  {
#pragma omp for schedule(static) collapse(2)
    for (int64_t head = 0; head < layer.num_heads; head++)
      for (int64_t block = 0; block < packed.padded / COLUMNS; block++)
        if (layer.attends) pack(work, packed, head, block);
#pragma omp for schedule(dynamic) collapse(2)
    for (int64_t head = 0; head < layer.num_queries(); head++)
      for (int64_t run = 0; run < packed.runs; run++)
        if (layer.attends) attend_run(work, packed, scored ? weights.data() : nullptr, head, run);
#pragma omp for schedule(dynamic)
    for (int64_t set = 0; set < layer.num_sets; set++)
      if (layer.inserts) insert(work, packed, set);
  }
}

}  // namespace

extern "C" int64_t stride_size() { return sizeof(Stride); }
// Whether bf16 rows are multiplied without conversion (panel.h).
extern "C" int64_t multiplies_bf16() { return Numbers<bf16>::DEPTHS == 2; }

extern "C" void attend_and_insert_stride(const Layer* layer, const Stride* stride,
                                         const Rows* rows) {
  if (layer->dtype == FP32) run<float>(*layer, *stride, *rows);
  if (layer->dtype == BF16) run<bf16>(*layer, *stride, *rows);
#ifdef HAS_FP16
  if (layer->dtype == FP16) run<fp16>(*layer, *stride, *rows);
#endif
}
