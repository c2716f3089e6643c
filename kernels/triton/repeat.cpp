// SPDX-License-Identifier: Apache-2.0
// Launches a layer's kernels one after the other, as repeat.py says.

#include <cstdint>
#include <cstring>

namespace {

constexpr int MOST_ARGUMENTS = 96;  // repeat.py has it, too

// cuLaunchKernel
using Driver = int (*)(const void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                       void* stream, void** arguments, void** extra);

// A compiled kernel with a layer's constants. Every argument has eight bytes, of which the driver
// reads as many as its type has; the first ones, since processors with GPUs are little-endian.
struct Bound {
  const void* function;
  const uint64_t* arguments;
  const int32_t* places;  // of arguments that are the step's
  int32_t num_arguments, num_places;
  uint32_t threads, shared;
};

}  // namespace

extern "C" {

// Returns 0, or what the driver returned for the first launch that failed.
//
// grids: three numbers a launch.
// values: the step's arguments, those of one launch after the other.
// bases: for each of these a row of `rows`, to which it is added.
// rows: 0, and addresses of the layer's query, key, value and output.
int repeat_launches(Driver launch, void* stream, int num_launches, const Bound* const* kernels,
                    const uint32_t* grids, const uint64_t* values, const uint8_t* bases,
                    const uint64_t* rows) {
  uint64_t arguments[MOST_ARGUMENTS];
  void* addresses[MOST_ARGUMENTS];
  for (int i = 0; i < MOST_ARGUMENTS; ++i) addresses[i] = arguments + i;
  for (int i = 0; i < num_launches; ++i, grids += 3) {
    const Bound& kernel = *kernels[i];
    std::memcpy(arguments, kernel.arguments, kernel.num_arguments * sizeof(uint64_t));
    for (int j = 0; j < kernel.num_places; ++j)
      arguments[kernel.places[j]] = *values++ + rows[*bases++];
    if (grids[0] * grids[1] * grids[2] == 0) continue;
    const int failed = launch(kernel.function, grids[0], grids[1], grids[2], kernel.threads, 1, 1,
                              kernel.shared, stream, addresses, nullptr);
    if (failed) return failed;
  }
  return 0;
}
}
