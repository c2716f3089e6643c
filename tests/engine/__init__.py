# SPDX-License-Identifier: Apache-2.0
"""Tests with real engines.

The closest peer, R-KV's port to vLLM, published the thirteen bugs that it shipped with. Each has a
test here that would find it:

 1. built although disabled: ``test_metrics.py::test_no_metric_without_a_policy``, ``test_stock.py``
 2. ``view`` of a pool that is not contiguous:
    ``test_pages.py::test_page_views_share_the_pools_bytes``
 3. a silent no-op on another model runner: ``test_refusals.py::test_refused_runner``, and the
    counters in ``test_metrics.py`` and ``test_against_oracle.py``
 4. index buffers too small for many long requests: ``test_concurrency.py``
 5. more dropped than computed, by chunked prefill: ``test_metrics.py::test_every_step``
 6. shared pages written in place:
    ``test_concurrency.py::test_a_shared_prefix_is_not_shared_memory``
 7. layers and heads that drift apart: every layer's kept tokens in ``test_against_oracle.py``
 8. eviction too early: ``test_metrics.py::test_nothing_is_evicted_before_the_cache_is_full``
 9. prompts and decoding in one batch: ``test_batching.py``, ``test_concurrency.py``
10. stale counts under asynchronous scheduling: ``test_concurrency.py``, ``test_faults.py`` [async]
11. counts that survive a preemption: ``test_metrics.py::test_a_replay_is_counted_again``,
    ``test_batching.py::test_a_replay_after_preemption_changes_nothing``
12. a default that is not the paper's: ``test_cascade.py::test_gamma_is_the_papers``,
    ``test_settings.py::test_defaults``
13. evicted memory never freed: ``test_batching.py::test_a_stream_of_20_000_tokens``, pages in
    ``test_metrics.py::test_every_step``
"""
