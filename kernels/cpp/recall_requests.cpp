// SPDX-License-Identifier: Apache-2.0
// What requests move between their pages and their stores in one layer. A call is for all requests of
// a step, so that Python's time does not grow with them.
#include "judge.h"

// A request whose queries select units.
struct Recall {
  Units units;
  Asking asking;
  Exchange exchange;
};

// A request whose token evicts units.
struct Leaving {
  Units units;  // that are evicted
  Freed freed;
};

extern "C" void recall_units(const Layer* layer, const Rows* rows, const Units* units,
                             const Asking* asking, int64_t index, float* asked, int64_t* listed,
                             int64_t* chosen);
extern "C" int64_t exchange_units(const Layer* layer, const Units* units, int64_t index,
                                  const Exchange* exchange);
extern "C" int64_t store_freed_units(const Layer* layer, const Units* units, int64_t index,
                                     const Freed* freed);

namespace {

// Calls `each` with every request and adds up what it returns; -1 if any returns less than 0. With
// fewer requests than threads, threads share the work within a request. That must not be inside a
// parallel region, not even one of a single thread: OpenMP would start new threads at each call.
template <class Request, class Each>
int64_t for_requests(const Request* requests, int64_t num, Each each) {
  int64_t total = 0, least = 0;
  if (num == 1 || num < omp_get_max_threads()) {
    for (int64_t i = 0; i < num; i++) {
      const int64_t found = each(requests[i]);
      total += found, least = std::min(least, found);
    }
    return least < 0 ? -1 : total;
  }
#pragma omp parallel for schedule(dynamic) reduction(+ : total) reduction(min : least)
  for (int64_t i = 0; i < num; i++) {
    const int64_t found = each(requests[i]);
    total += found, least = std::min(least, found);
  }
  return least < 0 ? -1 : total;
}

// Returns how many units came back to the pages, or -1.
int64_t recall(const Layer& layer, const Rows& rows, const Recall& request, int64_t index) {
  const Judge judge{layer, request.units, request.asking, index};
  const int64_t now = request.exchange.now, sets = layer.num_sets;
  std::vector<int64_t> chosen(sets * now), listed(sets * judge.judged());
  if (now == judge.num_units()) {
    for (int64_t i = 0; i < sets * now; i++) chosen[i] = i % now;
  } else {
    std::vector<float> asked(layer.num_queries() * judge.judged());
    recall_units(&layer, &rows, &request.units, &request.asking, index, asked.data(), listed.data(),
                 chosen.data());
  }
  Exchange exchange = request.exchange;
  exchange.chosen = chosen.data();
  return exchange_units(&layer, &request.units, index, &exchange);
}

}  // namespace

extern "C" int64_t recall_size() { return sizeof(Recall); }
extern "C" int64_t leaving_size() { return sizeof(Leaving); }
extern "C" int64_t chunk_units() { return CHUNK_UNITS; }

// Selects units for each request and puts them into its pages. Returns how many units came, or -1 if
// ranks are not as planned.
extern "C" int64_t recall_requests(const Layer* layer, const Rows* rows, const Recall* requests,
                                   int64_t num, int64_t index) {
  return for_requests(requests, num,
                      [=](const Recall& one) { return recall(*layer, *rows, one, index); });
}

// Copies each request's ranks to `before`.
extern "C" void note_ranks(const Layer* layer, const Leaving* requests, int64_t num) {
  for (int64_t i = 0; i < num; i++) {
    const Freed& freed = requests[i].freed;
    for (int64_t set = 0; set < layer->num_sets; set++)
      gather(*layer, freed.pages, set, (const int32_t*)layer->rank,
             freed.before + set * freed.num_before, 0, freed.num_before);
  }
}

// Stores what each request's token has evicted. Returns -1 if that is another number of units.
extern "C" int64_t store_leaving(const Layer* layer, const Leaving* requests, int64_t num,
                                 int64_t index) {
  return for_requests(requests, num, [=](const Leaving& one) {
    return store_freed_units(layer, &one.units, index, &one.freed);
  });
}
