# SPDX-License-Identifier: Apache-2.0
"""Prompt chunks end where strides end, under sync and async scheduling, and pages suffice."""

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.conftest import MODEL
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.engine import scheduler as scheduler_module
from vllm_cascade.engine.encoder_inputs import release_unreached
from vllm_cascade.engine.scheduler import AsyncKVPolicyScheduler, KVPolicyScheduler
from vllm_cascade.log import logger
from vllm_cascade.patches import kv_cache_planning
from vllm_cascade.policies.registry import policy_of
from vllm_cascade.policies.strides import aligned_chunk, cut_strides, first_stride
from vllm_cascade.sessions.session import Report
from vllm_cascade.step.drafts import Drafts

STRIDE = 16
SCHEDULERS = [KVPolicyScheduler, AsyncKVPolicyScheduler]


@given(
    start=st.integers(0, 300),
    num=st.integers(1, 300),
    prompt=st.integers(1, 300),
    stride=st.integers(1, 64),
)
def test_aligned_chunk(start: int, num: int, prompt: int, stride: int) -> None:
    chunk = aligned_chunk(start, num, prompt, stride)
    assert 0 <= chunk <= num
    end = start + chunk
    if start >= prompt:
        assert chunk == num
    else:
        assert end <= prompt
        assert chunk == 0 or end == prompt or end % stride == 0
        assert end == prompt or start + num < end + stride  # no stride that fits is left out


STREAMS = given(
    prompt=st.integers(1, 200),
    total=st.integers(1, 260),
    stride=st.integers(1, 40),
    seed=st.integers(0, 10**6),
)


@STREAMS
def test_strides_do_not_depend_on_chunks(prompt: int, total: int, stride: int, seed: int) -> None:
    """Any way of chunking a stream gives the boundaries of the whole stream at once."""
    total = max(prompt, total)
    whole = [0, *range(stride, prompt, stride), prompt, *range(prompt + 1, total + 1)]
    rng = random.Random(seed)
    seen, t = [0], 0
    while t < total:
        chunk = aligned_chunk(t, min(rng.randint(1, 3 * stride), total - t), prompt, stride)
        if chunk == 0:  # too small a token budget: the scheduler tries again
            continue
        seen += cut_strides(t, t + chunk, stride, t < prompt)[1:]
        t += chunk
    assert seen == whole


@STREAMS
def test_one_stride_a_step_gives_the_same_strides(
    prompt: int, total: int, stride: int, seed: int
) -> None:
    """Also of tokens that are replayed after the prompt, which could all be in one step."""
    total = max(prompt, total)
    whole = [0, *range(stride, prompt, stride), prompt, *range(prompt + 1, total + 1)]
    rng = random.Random(seed)
    seen, t = [0], 0
    while t < total:
        chunk = aligned_chunk(t, min(rng.randint(1, 3 * stride), total - t), prompt, stride)
        t += first_stride(t, chunk, prompt, stride)
        if t > seen[-1]:
            seen.append(t)
    assert seen == whole


def test_the_first_stride_fills_a_unit_by_single_tokens() -> None:
    assert first_stride(10, 22, 40, 16, unit=8) == 1
    assert first_stride(16, 16, 40, 16, unit=8) == 16
    assert first_stride(0, 0, 40, 16) == 0


def make_scheduler(cls: type, num_pages: int, **kwargs: Any) -> Any:
    config = EngineArgs(
        model=str(MODEL),
        max_model_len=4096,
        **{
            "kv_policy": "cascade",
            "kv_budget": 64,
            "kv_recall": 0,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 100,
            "kv_policy_config": {"prefill_stride": STRIDE},
            **kwargs,
        },
    ).create_engine_config()
    config.scheduler_config.async_scheduling = cls is AsyncKVPolicyScheduler
    config.cache_config.kv_cache_layout = "LBHNC"
    config.cache_config.num_gpu_blocks_override = num_pages + 1
    full = FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=8, dtype=config.model_config.dtype
    )
    spec = KVPolicySpec.from_full(full, policy_of(config.additional_config))
    planning = kv_cache_planning()
    groups = planning.get_kv_cache_groups(config, {"a": spec, "b": spec})
    kv_cache = planning.get_kv_cache_config_from_groups(config, groups, 0)
    config.cache_config.num_gpu_blocks = kv_cache.num_blocks
    return cls(
        vllm_config=config,
        kv_cache_config=kv_cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=16,
        hash_block_size=16,
        log_stats=True,
    )


def request(name: str, prompt: int, max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    params.update_from_generation_config({}, 0)
    return Request(name, list(range(1, prompt + 1)), params, None)


@pytest.mark.parametrize("cls", SCHEDULERS)
def test_a_busy_scheduler(cls: type) -> None:
    """Mixed prompts, pages for a third of them: chunks aligned, pages bounded, none preempted."""
    rng = random.Random(1)
    scheduler = make_scheduler(cls, num_pages=15)
    requests = {
        f"r{i}": request(f"r{i}", rng.randint(1, 900), rng.randint(1, 40)) for i in range(20)
    }
    for r in requests.values():
        scheduler.add_request(r)
    (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
    pool = scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    done = dict.fromkeys(requests, 0)
    in_flight: list[Any] = []
    ends: dict[str, list[int]] = {name: [] for name in requests}
    for _ in range(3000):
        if not scheduler.has_unfinished_requests():
            break
        output = scheduler.schedule()
        for name, num in output.num_scheduled_tokens.items():
            done[name] += num
            ends[name].append(done[name])
            pages = len(manager.req_to_blocks[name])
            assert pages == manager.kv_cache_spec.num_pages(done[name]) <= 5
        in_flight.append(output)
        if len(in_flight) > (cls is AsyncKVPolicyScheduler):
            finish_step(scheduler, in_flight.pop(0))
    assert not scheduler.has_unfinished_requests()
    for name, r in requests.items():
        assert r.status == RequestStatus.FINISHED_LENGTH_CAPPED
        assert r.num_preemptions == 0
        inside = [end for end in ends[name] if end < r.num_prompt_tokens]
        assert all(end % STRIDE == 0 for end in inside)
        assert r.num_prompt_tokens in ends[name]
    assert pool.get_num_free_blocks() == free
    assert not manager._limits and not any(manager.req_to_blocks.values())


def finish_step(scheduler: Any, output: Any, ends: dict[str, int] | None = None) -> None:
    """Sample a token for each request whose prompt is read.

    Args:
        ends: tokens computed after the step; None: the scheduler's, which may have run ahead.

    States of sessions are copied within the step.
    """
    names = list(output.num_scheduled_tokens)
    live = scheduler.requests  # async scheduling may have run ahead of a request that finished
    if ends is None:
        ends = {name: live[name].num_computed_tokens for name in names if name in live}
    sampled = [
        [7] if name in live and ends[name] >= live[name].num_prompt_tokens else [] for name in names
    ]
    result = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=sampled,
    )
    saves = [one.id for one in getattr(output, "sessions", ()) if one.op == "save"]
    result.kv_sessions = Report(saved=saves)  # a field of ours
    scheduler.update_from_output(output, result)


def test_a_pool_that_requests_cannot_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start names the bytes that are enough, counting the null block."""
    said: list[str] = []
    monkeypatch.setattr(scheduler_module.logger, "info", lambda text, *_: said.append(text))
    made = make_scheduler(KVPolicyScheduler, num_pages=40)
    need = made._manager.kv_cache_spec.num_pages(4096)
    page = 2 * made._manager.kv_cache_spec.page_size_bytes  # of two layers
    assert 8 * need >= 40 and not [text for text in said if "KV pool" in text]
    make_scheduler(KVPolicyScheduler, num_pages=8 * need + 1)
    (text,) = [text for text in said if "KV pool" in text]
    assert f"8 requests (--max-num-seqs) hold at most {8 * need} of {8 * need + 1} pages" in text
    assert f"--kv-cache-memory-bytes {(8 * need + 1) * page} is enough" in text


@pytest.mark.parametrize("cls", SCHEDULERS)
def test_aborts_give_pages_back(cls: type) -> None:
    scheduler = make_scheduler(cls, num_pages=15)
    pool = scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    for name, prompt in (("prefilling", 3000), ("short", 20), ("waiting", 3000)):
        scheduler.add_request(request(name, prompt, 30))
    for _ in range(3):
        finish_step(scheduler, scheduler.schedule())
    assert pool.get_num_free_blocks() < free
    scheduler.finish_requests(["prefilling", "short", "waiting"], RequestStatus.FINISHED_ABORTED)
    assert pool.get_num_free_blocks() == free
    assert not scheduler.has_unfinished_requests()


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("computing", [False, True])
def test_an_abort_with_drafts(computing: bool, drafts: int, step: int) -> None:
    """vLLM takes aborts between steps and while one computes: known tokens stay computed."""
    speculation = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    scheduler = make_scheduler(
        KVPolicyScheduler, num_pages=40, kv_sessions=True, speculative_config=speculation
    )
    worker = Drafts(8, 2)
    one = request("r", 20, 30)
    assert one.sampling_params is not None
    one.sampling_params.extra_args = {"kv_session": "kept, however short"}
    scheduler.add_request(one)
    for i in range(step + 1):
        output = scheduler.schedule()
        assert worker.note(output) == []
        if computing and i == step:
            scheduler.finish_requests(["r"], RequestStatus.FINISHED_ABORTED)
        scheduler.update_from_output(output, ModelRunnerOutput(["r"], {"r": 0}, [[7]]))
        scheduler.update_draft_token_ids(DraftTokenIds(["r"], [[7] * drafts]))
    scheduler.finish_requests(["r"], RequestStatus.FINISHED_ABORTED)
    rejected = [(one.begin, one.num) for one in worker.note(scheduler.schedule())]
    assert rejected == ([(21, 2)] if step and drafts else [])
    (session,) = scheduler.sessions.index._sessions.values()
    assert session.num_tokens == 20 + step


def test_a_pool_too_small_for_the_longest_request_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Such requests are refused when they come (test_limits.py); all the others are served."""
    make_scheduler(KVPolicyScheduler, num_pages=5)
    assert "needs 5 pages" not in caplog.text
    make_scheduler(KVPolicyScheduler, num_pages=4)
    assert "a request of --max-model-len 4096 tokens needs 5 pages of 16 tokens, but" in caplog.text


@pytest.mark.parametrize("cls", SCHEDULERS)
@pytest.mark.parametrize("running", [False, True])
def test_a_request_beyond_this_engines_pool_ends(
    running: bool, cls: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Front-ends know the mean of several engines' pools; what waits behind it is served."""
    said: list[str] = []
    monkeypatch.setattr(logger, "error", lambda text, *args: said.append(text % args))
    scheduler = make_scheduler(cls, num_pages=4)
    pool = scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    first, large, last = (request(*one) for one in (("a", 20, 9), ("b", 4000, 90), ("c", 20, 3)))
    if running:
        scheduler.add_request(first)
        finish_step(scheduler, scheduler.schedule())
    for one in (large, last):
        scheduler.add_request(one)
    (error,) = said
    assert "request b of up to 4090 tokens needs 5 pages, but this engine's pool has 4" in error
    for _ in range(20):
        finish_step(scheduler, scheduler.schedule())
    assert large.status == RequestStatus.FINISHED_ERROR and large.num_computed_tokens == 0
    for one in (first, last) if running else (last,):
        assert one.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert pool.get_num_free_blocks() == free and not scheduler.has_unfinished_requests()


@pytest.mark.parametrize("cls", SCHEDULERS)
@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("extra", [{"kv_budget": 999}, {"kv_recall": 4}, {"kv_policy": 7}], ids=str)
def test_arguments_that_no_front_end_checked_end_their_request(
    extra: dict[str, Any], running: bool, cls: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``AsyncLLM`` passes a caller's own ``EngineCoreRequest`` on; the engine must live on."""
    said: list[str] = []
    monkeypatch.setattr(logger, "error", lambda text, *args: said.append(text % args))
    scheduler = make_scheduler(cls, num_pages=15, kv_sessions=True)
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    first, wrong, last = (request(name, 20, 9) for name in "abc")
    wrong.sampling_params.extra_args = extra
    ahead: list[Any] = []
    if running:
        scheduler.add_request(first)
        ahead.append(scheduler.schedule())  # a step is in flight
    for one in (wrong, last):
        scheduler.add_request(one)
    (error,) = said
    assert "request b ends with an error" in error and next(iter(extra)) in error
    for _ in range(20):
        ahead.append(scheduler.schedule())
        finish_step(scheduler, ahead.pop(0))
    assert wrong.status == RequestStatus.FINISHED_ERROR and wrong.num_computed_tokens == 0
    for one in (first, last) if running else (last,):
        assert one.status == RequestStatus.FINISHED_LENGTH_CAPPED
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == free and not scheduler.has_unfinished_requests()


def with_images(name: str, prompt: int, *images: tuple[int, int], own: bool = True) -> Request:
    """A prompt with images, each its first token and its size; not ``own``: one for each size."""
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    params.update_from_generation_config({}, 0)
    features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=f"{name} {i}" if own else str(length),
            mm_position=PlaceholderRange(offset=offset, length=length),
        )
        for i, (offset, length) in enumerate(images)
    ]
    return Request(name, list(range(1, prompt + 1)), params, None, mm_features=features)


class Encoding:
    """A scheduler of prompts with images that checks the encoder's budget and cache.

    Args:
        ahead: tokens after a chunk that a drafting model reads in the same step.

    Attributes:
        ends: of each request, where its chunks end.
    """

    def __init__(
        self, most: int, cls: type = KVPolicyScheduler, ahead: int = 0, **kwargs: Any
    ) -> None:
        self.scheduler = make_scheduler(cls, 60, max_num_batched_tokens=most, **kwargs)
        self.scheduler.num_prefill_lookahead = ahead
        self.budget = self.scheduler.max_num_encoder_input_tokens = most
        self.cache = self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=most)
        self.ends: dict[str, list[int]] = {}
        self._ahead = int(cls is AsyncKVPolicyScheduler)

    def run(self, *requests: Request) -> None:
        known = {item.request_id: item for item in requests}
        in_flight: list[Any] = []
        for item in requests:
            self.ends[item.request_id] = []
            self.scheduler.add_request(item)
        for _ in range(300):
            output = self.scheduler.schedule()
            encoded = 0
            for name, num in output.num_scheduled_tokens.items():
                ends = self.ends[name]
                start = ends[-1] if ends else 0
                ends.append(start + num)
                encoded += self._check(known[name], start, start + num, output)
            assert encoded <= self.budget
            in_flight.append((output, {name: ends[-1] for name, ends in self.ends.items() if ends}))
            if len(in_flight) > self._ahead:
                finish_step(self.scheduler, *in_flight.pop(0))
            if not self.scheduler.has_unfinished_requests():
                return
        raise AssertionError(f"a request never ends: {self.ends}")

    def _check(self, item: Request, start: int, end: int, output: Any) -> int:
        """Tokens of the images that a request has encoded, all of which its chunk reaches."""
        chosen = output.scheduled_encoder_inputs.get(item.request_id, [])
        places = [feature.mm_position for feature in item.mm_features]
        for i, place in enumerate(places):
            if i in chosen:
                assert start < place.offset + place.length and place.offset < end
            if place.offset < end and start < place.offset + place.length:
                assert item.mm_features[i].identifier in self.cache.cached
        return sum(places[i].length for i in chosen)


def inside(ends: list[int], prompt: int) -> list[int]:
    """Chunk ends in a prompt that are no stride's end."""
    return [end for end in ends if end < prompt and end % STRIDE]


@pytest.mark.parametrize("cls", SCHEDULERS)
def test_a_chunk_before_a_picture_ends_at_a_stride(cls: type) -> None:
    """The encoder takes two of five images in a step."""
    images = [(10 + 115 * i, 100) for i in range(5)]
    encoding = Encoding(256, cls)
    encoding.run(with_images("a", 600, *images))
    assert encoding.ends["a"] == [240, 464, 600, 601]
    whole = Encoding(1024, cls)
    whole.run(with_images("a", 600, *images))
    assert whole.ends["a"] == [600, 601]


@pytest.mark.parametrize("cls", SCHEDULERS)
def test_a_picture_in_the_first_stride_waits_for_the_encoder(cls: type) -> None:
    """Four prompts begin with text of a few tokens, and the encoder takes one image a step."""
    encoding = Encoding(256, cls)
    prompts = {f"r{i}": with_images(f"r{i}", 250, (5 + i, 200)) for i in range(4)}
    encoding.run(*prompts.values())
    assert not any(inside(encoding.ends[name], 250) for name in prompts)
    assert not encoding.cache.request_cached_ids


@pytest.mark.parametrize(("end", "held", "left"), [(64, (), ()), (128, (), (1,)), (64, (1,), (1,))])
def test_pictures_beyond_a_shorter_chunk_are_released(
    end: int, held: tuple[int, ...], left: tuple[int, ...]
) -> None:
    """Another prompt has encoded the same image; this one takes it only if it needs it."""
    cache = EncoderCacheManager(cache_size=500)
    first = with_images("a", 100, (0, 50), own=False)
    second = with_images("b", 300, (0, 40), (100, 50), own=False)
    cache.allocate(first, 0)
    assert cache.check_and_update_cache(second, 1)
    release_unreached(cache, second, end, set(held))
    assert cache.get_cached_input_ids(second) == set(left)
    assert cache.get_cached_input_ids(first) == {0}


def test_where_a_strides_pictures_exceed_the_encoder_the_prompt_goes_on() -> None:
    """Two images of together 260 begin in one stride: a chunk ends before the second."""
    encoding = Encoding(256)
    encoding.run(with_images("a", 600, (240, 10), (252, 250)))
    assert encoding.ends["a"] == [240, 252, 496, 600, 601]


def test_pictures_in_one_piece() -> None:
    """With --disable-chunked-mm-input a chunk ends before an image that it cannot hold."""
    encoding = Encoding(120, disable_chunked_mm_input=True)
    encoding.run(with_images("a", 300, (10, 100), (150, 110)))
    assert encoding.ends["a"][-2:] == [300, 301]


@pytest.mark.parametrize("cls", SCHEDULERS)
@pytest.mark.parametrize(
    ("prompt", "images"),
    [(203, [(76, 20), (96, 70)]), (120, [(20, 3), (24, 70)]), (130, [(33, 80), (114, 3)])],
    ids=["touch", "a token apart", "behind a long one"],
)
def test_pictures_in_one_piece_near_each_other(
    prompt: int, images: list[tuple[int, int]], cls: type
) -> None:
    """A drafting model reads a token ahead, so vLLM ends a chunk a token before an image."""
    encoding = Encoding(100, cls, ahead=1, disable_chunked_mm_input=True)
    encoding.run(with_images("a", prompt, *images))
    assert encoding.ends["a"][-2:] == [prompt, prompt + 1]


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6))
def test_prompts_with_pictures_in_one_piece_end(seed: int) -> None:
    """No chunk reaches into an image and ends there, also where a drafting model reads ahead.

    vLLM 0.32 itself divides an image at which a chunk begins. Where a drafting model reads ahead,
    images do not touch: vLLM would end chunks inside the first one, and 0.32 could never go on.
    """
    rng = random.Random(seed)
    ahead = rng.choice([0, 1])
    encoding = Encoding(
        rng.choice([100, 256]), rng.choice(SCHEDULERS), ahead, disable_chunked_mm_input=True
    )
    requests = []
    for i in range(rng.randint(1, 6)):
        images, end = [], 0
        for _ in range(rng.randint(0, 4)):
            offset = end + rng.randint(2 * ahead, 40)
            end = offset + rng.choice([3, 20, 70, rng.randint(1, encoding.budget - ahead)])
            images.append((offset, end - offset))
        requests.append(with_images(f"r{i}", end + rng.randint(1, 60), *images))
    encoding.run(*requests)
    for item in requests:
        places = [feature.mm_position for feature in item.mm_features]
        ends = encoding.ends[item.request_id]
        for begin, end in pairwise([0, *ends]):
            assert not any(begin < p.offset < end < p.offset + p.length for p in places)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6))
def test_prompts_with_pictures_end(seed: int) -> None:
    """Any images, also equal ones, in any batch: each is encoded, and every request ends.

    Chunks end inside a stride only where its images exceed the encoder or an image is half read.
    """
    rng = random.Random(seed)
    encoding = Encoding(rng.choice([64, 100, 256]), rng.choice(SCHEDULERS))
    requests = []
    for i in range(rng.randint(1, 8)):
        images, end = [], 0
        for _ in range(rng.randint(0, 5)):
            offset = end + rng.randint(0, 40)
            end = offset + rng.choice([3, 20, encoding.budget, rng.randint(1, encoding.budget)])
            images.append((offset, end - offset))
        prompt = end + rng.randint(1, 60)
        requests.append(with_images(f"r{i}", prompt, *images, own=rng.random() < 0.5))
    encoding.run(*requests)
    assert not encoding.cache.request_cached_ids
    for item in requests:
        places = [feature.mm_position for feature in item.mm_features]
        for end in inside(encoding.ends[item.request_id], item.num_prompt_tokens):
            first = end // STRIDE * STRIDE
            last = first + STRIDE
            near = [p for p in places if p.offset < last and first < p.offset + p.length]
            assert len(near) > 1 and any(p.offset == end for p in near)


class Adapters:
    """A scheduler with adapters: one request decodes, and two prompts begin in the next step.

    The step after that does not schedule the prompt under adapter 1: less than a stride is left.
    """

    def __init__(self, max_loras: int) -> None:
        self.scheduler = scheduler = make_scheduler(
            KVPolicyScheduler,
            num_pages=80,
            enable_prefix_caching=True,
            enable_lora=True,
            max_loras=max_loras,
            max_num_batched_tokens=48,
        )
        first = self.add("first", list(range(1, 65)), 1)
        while not first.is_finished():
            finish_step(scheduler, scheduler.schedule())
        self.decodes = self.add("decodes", [99], 60)
        finish_step(scheduler, scheduler.schedule())
        # Its first chunk ends early, where the prefix ends that it shares with the first request.
        self.add("prompt", [*range(1, 17), *range(200, 264)], 60)
        self.under_1 = self.add("under 1", list(range(300, 380)), 4, adapter=1)

    def add(self, name: str, prompt: list[int], max_tokens: int, adapter: int = 0) -> Request:
        from tests.cache.test_snapshots import HASHER  # which imports this file

        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        params.update_from_generation_config({}, 0)
        lora = LoRARequest(f"adapter {adapter}", adapter, "/nowhere") if adapter else None
        one = Request(name, prompt, params, None, lora_request=lora, block_hasher=HASHER)
        self.scheduler.add_request(one)
        return one


def test_adapters_that_run_do_not_exceed_their_limit() -> None:
    """Also while a prompt under one is not scheduled, as less than a stride is left to it."""
    adapters = Adapters(max_loras=1)
    scheduler, under_1, decodes = adapters.scheduler, adapters.under_1, adapters.decodes
    under_2 = adapters.add("under 2", list(range(400, 410)), 40, adapter=2)
    steps = []
    while not (under_1.is_finished() and under_2.is_finished()):
        output = scheduler.schedule()
        steps.append(dict(output.num_scheduled_tokens))
        assert not {under_1, under_2} <= set(scheduler.running), steps
        finish_step(scheduler, output)
        assert len(steps) < 90
    assert steps[0] == {"decodes": 1, "prompt": 16, "under 1": 16}
    assert steps[1] == {"decodes": 1, "prompt": 32}
    assert decodes.num_output_tokens > 40


def test_adapters_that_start_in_a_step_count_in_it() -> None:
    """Beside one that runs, but whose prompt is not scheduled in that step."""
    adapters = Adapters(max_loras=2)
    scheduler = adapters.scheduler
    finish_step(scheduler, scheduler.schedule())
    adapters.add("under 2", [400, 401], 40, adapter=2)
    adapters.add("under 3", [500, 501], 40, adapter=3)
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"decodes": 1, "prompt": 32, "under 2": 2}
    assert adapters.under_1 in scheduler.running


class Walked(list[Request]):
    """Requests, and how often all of them were visited."""

    times = 0

    def __iter__(self) -> Iterator[Request]:
        self.times += 1
        return super().__iter__()


def test_running_adapters_are_counted_once_a_step() -> None:
    """However many requests wait for another adapter: vLLM asks for each in every step."""
    adapters = Adapters(max_loras=1)
    scheduler = adapters.scheduler
    finish_step(scheduler, scheduler.schedule())
    scheduler.running = running = Walked(scheduler.running)
    times = []
    for first, last in ((0, 1), (1, 50)):
        for i in range(first, last):
            adapters.add(f"waits {i}", [i + 400], 4, adapter=2)
        running.times = 0
        output = scheduler.schedule()
        assert "decodes" in output.num_scheduled_tokens and scheduler.running is running
        assert len(running) == 3 and scheduler.get_request_counts() == (3, last)
        times.append(running.times)
        finish_step(scheduler, output)
    assert times[1] == times[0] > 0
