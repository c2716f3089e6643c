# SPDX-License-Identifier: Apache-2.0
"""vLLM's workers with a policy: select the backend before model load, connect it afterwards."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict
from functools import wraps
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from vllm.config import ModelConfig, get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention, MLAAttention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.model_executor.offloader import PrefetchOffloader, get_offloader
from vllm.v1.attention.backends.mla.prefill.registry import (
    MLAPrefillBackendEnum,
    register_mla_prefill_backend,
)
from vllm.v1.attention.backends.registry import register_backend
from vllm.v1.attention.selector import _cached_get_attn_backend
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, UniformTypeKVCacheSpecs
from vllm.v1.worker.block_table import SlotMappingMode

from vllm_cascade.attention.latent import LatentImpl, OwnPrefill, connect
from vllm_cascade.attention.recorder import Recorder
from vllm_cascade.attention.selfcheck_layer import LayerShape
from vllm_cascade.cache.kinds import DraftingLayers, bounded
from vllm_cascade.cache.layout import whole_pages
from vllm_cascade.cache.quantised import has_scales
from vllm_cascade.cache.spec import KVPolicySpec
from vllm_cascade.cache.states import StateSpec, apart, beside_states
from vllm_cascade.engine.certify import certify_layers, shapes_of_layers
from vllm_cascade.engine.lookup import token_importance
from vllm_cascade.engine.nodes import check_workers
from vllm_cascade.engine.recall_memory import model_shape, open_memory
from vllm_cascade.engine.session_worker import SessionWorker
from vllm_cascade.engine.stages import of_all_stages, own_part
from vllm_cascade.log import logger
from vllm_cascade.models.architectures import learns_positions, loops
from vllm_cascade.models.norms import KeyNorms
from vllm_cascade.models.probe import rotaries_of
from vllm_cascade.models.rotary import choose_long_tables, longest
from vllm_cascade.policies.registry import policy_of
from vllm_cascade.policies.settings import KVPolicyError
from vllm_cascade.step.builder import StepBuilder
from vllm_cascade.step.drafts import Drafted, Drafts, most_drafts
from vllm_cascade.step.recall import unit_shape
from vllm_cascade.step.requests import (
    NoRequests,
    Requests,
    RunnerV1Requests,
    RunnerV2Requests,
)


def scales_of(layer: Any) -> tuple[float, float]:
    """Scales of a layer's quantised keys and values: the checkpoint's, or 1.

    A checkpoint's are not used by other types of caches. vLLM has one scale for the rows of
    multi-head latent attention, that of keys.

    Raises:
        KVPolicyError: the checkpoint has several scales for one layer.
    """
    if not has_scales(layer.kv_cache_dtype):
        return 1.0, 1.0
    values = "_k_scale" if isinstance(layer, MLAAttention) else "_v_scale"
    scales: list[Any] = [getattr(layer, name) for name in ("_k_scale", values)]
    if any(scale.numel() > 1 for scale in scales):
        raise KVPolicyError(
            "kv_policy: the checkpoint has key and value scales per head, which no policy "
            "supports; set --kv-cache-dtype to fp8_per_token_head or int8_per_token_head, or to "
            "the dtype of a 16-bit model"
        )
    return scales[0].item(), scales[1].item()


def owners_of(layers: Mapping[str, Any]) -> dict[str, str]:
    """Layers that attend to another layer's cache, in the model's order, and that layer."""
    owners = {
        name: owner
        for name, layer in layers.items()
        if (owner := getattr(layer, "kv_sharing_target_layer_name", None)) is not None
    }
    return {name: owners[name] for name in sorted(owners, key=extract_layer_index)}


def beside_owners(config: KVCacheConfig, owners: Mapping[str, str]) -> KVCacheConfig:
    """Cache groups in which a layer that attends to another's cache has that layer's spec.

    vLLM adds such layers to groups. It finds no spec of theirs if layers have specs of their own.
    """
    config = deepcopy(config)
    for group in config.kv_cache_groups:
        if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
            specs = group.kv_cache_spec.kv_cache_specs
            specs.update({name: specs[own] for name, own in owners.items() if own in specs})
    return config


def check_resident() -> None:
    """Check that a load of weights would reach all of them.

    Raises:
        KVPolicyError: vLLM offloads some by prefetch.
    """
    offloader = get_offloader()
    if isinstance(offloader, PrefetchOffloader) and offloader.module_offloaders:
        raise KVPolicyError(
            "kv_policy: new weights cannot be loaded into a running engine whose weights vLLM "
            "offloads by prefetch: they would go to a buffer that layers share; remove "
            "--offload-group-size, or use --cpu-offload-gb instead"
        )


class Loaded(NamedTuple):
    """A loaded model, its configuration, and its attention layers by name."""

    model: Any
    config: ModelConfig
    layers: dict[str, Any]


class KVPolicyWorker(SessionWorker):
    """Mixin for vLLM's workers: one process of an engine that runs a policy."""

    _requests: Requests = Requests()
    _drafts: Drafts | None = None
    _key_norms: Sequence[KeyNorms] = ()
    _loading = False
    _block_size: int

    @contextmanager
    def _our_backend(self) -> Iterator[None]:
        """Make layers built in this context use our backend; later engines are not affected."""
        backends = self.device_entry.backends(self.vllm_config)
        for slot, backend in backends.items():
            register_backend(slot, backend)
        prefill = MLAPrefillBackendEnum.CUSTOM  # where a device's configuration names it
        register_mla_prefill_backend(prefill, f"{OwnPrefill.__module__}.{OwnPrefill.__name__}")
        _cached_get_attn_backend.cache_clear()  # vLLM caches its selection
        try:
            yield
        finally:
            for slot in backends:
                slot.clear_override()
            prefill.clear_override()
            _cached_get_attn_backend.cache_clear()

    def load_model(self, **kwargs: Any) -> None:
        check_workers(self.vllm_config)
        self._block_size = self.vllm_config.cache_config.block_size
        policy = policy_of(self.vllm_config.additional_config)
        assert policy is not None
        with self._our_backend():
            super().load_model(**kwargs)
        drafting = self._drafting().names
        for name, layer in self._all_layers().items():
            impl: Any = layer.impl
            impl.drafting = name in drafting
            if isinstance(impl, LatentImpl):
                connect(layer)
            if isinstance(layer, ChunkedLocalAttention):
                # vLLM's backend for chunks splits a request into one for each chunk.
                layer.attn_backend = resolve_name(self.device_entry.backend)
                impl.window = layer.attention_chunk_size  # it does not tell its backend
        for one in self._models():
            choose_long_tables(one.model, longest(policy, self.model_config))
        self._watch_weights()
        self._bound_caches(self.model_runner)
        assert self.device is not None, "init_device sets it"
        entry = self.device_entry
        certify_layers(self.vllm_config, policy, self._layer_shapes, entry, self.device)

    def _bound_caches(self, runner: Any) -> None:
        """Let the runner have bounded caches.

        The worker's methods call the runner's, which profiling of CUDA graphs calls itself.
        """
        specs, initialize = runner.get_kv_cache_spec, runner.initialize_kv_cache
        owners = owners_of(self._attention_layers())

        def initialize_kv_cache(config: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
            initialize(beside_owners(config, owners) if owners else config, *args, **kwargs)

        runner.get_kv_cache_spec = lambda: self._bounded(specs)
        runner.initialize_kv_cache = initialize_kv_cache

    def _layer_shapes(self) -> tuple[LayerShape, ...]:
        """The different shapes of the models' layers."""
        specs, shapes = self.get_kv_cache_spec(), []
        for model, config, layers in self._models():
            rotaries = rotaries_of(model, layers, config.hf_text_config)
            own = {name: specs[name] for name in layers if name in specs}  # others share a cache
            shapes += shapes_of_layers(layers, own, rotaries, config.dtype, self._block_size)
        return tuple(dict.fromkeys(shapes))

    # --- weights that change ------------------------------------------------------------------

    def _watch_weights(self) -> None:
        """Move the weights of key norms, now and after every load, whatever calls for it."""
        models = self._models()
        self._key_norms = [KeyNorms(one.model, one.config.hf_text_config) for one in models]
        for norms in self._key_norms:
            norms.move()
        for one in models:
            self._watch_loads(one.model)

    def _watch_loads(self, model: Any) -> None:
        stock = model.load_weights

        @wraps(stock)
        def load_weights(*args: Any, **kwargs: Any) -> Any:
            with self._new_weights():
                return stock(*args, **kwargs)

        model.load_weights = load_weights

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        with self._new_weights():
            super().reload_weights(*args, **kwargs)
        self._read_scales()

    def start_weight_update(self) -> None:
        check_resident()
        super().start_weight_update()
        self._begin_loading()

    def start_draft_weight_update(self) -> None:
        check_resident()
        super().start_draft_weight_update()
        self._begin_loading()

    def update_weights(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().update_weights(*args, **kwargs)
        except BaseException:
            self._end_loading()  # so has vLLM
            raise

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        self._end_loading()
        self._read_scales()

    @contextmanager
    def _new_weights(self) -> Iterator[None]:
        """Let weights be loaded in this context, unless they already are, in an update."""
        if self._loading:
            yield
            return
        check_resident()
        self._begin_loading()
        try:
            yield
        finally:
            self._end_loading()

    def _begin_loading(self) -> None:
        self._loading = True
        for norms in self._key_norms:
            norms.restore()

    def _end_loading(self) -> None:
        """Do again with changed weights what was done after the first load."""
        self._loading = False
        for norms in self._key_norms:
            norms.move()
        for layer in self._all_layers().values():
            layer.impl.read_sinks()

    def _read_scales(self) -> None:
        layers = self._all_layers()
        owners = owners_of(layers)
        for name, layer in layers.items():
            layer.impl.read_scales(scales_of(layers[owners.get(name, name)]))

    def _bounded(self, stock: Callable[[], dict[str, KVCacheSpec]]) -> dict[str, KVCacheSpec]:
        """The specs of the model's layers under the policy; ``stock`` returns vLLM's."""
        cache_config, block_size = self.vllm_config.cache_config, self._block_size
        # For models with recurrent layers, vLLM raises it until a page holds a state.
        cache_config.block_size = block_size
        with set_current_vllm_config(self.vllm_config):  # for customize_spec
            specs = stock()
        policy = policy_of(self.vllm_config.additional_config)
        assert policy is not None
        model = self.model_config.hf_text_config
        last = getattr(model, "max_position_embeddings", None)
        whole, states = apart(of_all_stages(specs))
        drafts = most_drafts(self.vllm_config)
        made = bounded(whole, policy, block_size, last, drafts, self._drafting())
        if all(getattr(spec, "window", None) is not None for spec in made.values()):
            logger.warning_once(
                "KV policy %s has no effect: every layer of this model has a sliding window; "
                "--kv-policy full is faster",
                policy.name,
            )
        if states:
            made = beside_states(made, states, policy, block_size)
        made = own_part(made, specs)
        layers = self._all_layers()
        owners = owners_of(layers)
        for name, layer in layers.items():
            layer.impl.spec = made.get(owners.get(name, name))
        return made

    def _drafting(self) -> DraftingLayers:
        """The layers of a drafting model."""
        return DraftingLayers()

    def _models(self) -> list[Loaded]:
        """The model, and a drafting model."""
        model = self.model_runner.get_model()
        return [Loaded(model, self.model_config, self._attention_layers())]

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        layers = self._attention_layers()
        owners = owners_of(layers)
        super().initialize_from_config(kv_cache_config)
        first, *_ = builders = self._builders()
        self._prepare(self.model_runner.get_model(), self.model_config, builders, layers)
        for name, owner in owners.items():
            layers[name].impl.attend_to(layers[owner].impl)
        if loops(self.model_config.hf_text_config):
            for layer in layers.values():
                if layer.sliding_window is None:  # the first run's; others have a cache each
                    layer.impl.attend_to(layer.impl)
        self._connect(builders)
        self._check_recalling(builders)
        self._open_stores(first, layers)
        # The V1 runner maps absolute positions to slots. Our tables are bounded, so it would read
        # past their end. The result is unused.
        if not self.use_v2_model_runner:
            for table in self.model_runner.input_batch.block_table.block_tables:
                table.slot_mapping_mode = SlotMappingMode.NONE
        self._open_sessions()
        self._keep_drafts()

    def _prepare(
        self,
        model: Any,
        config: ModelConfig,
        builders: list[StepBuilder],
        layers: Mapping[str, Any],
    ) -> None:
        """Set up a model's layers, and make it read the positions of its first builder.

        Without that, as with learned positions, it reads those of the stream.
        """
        owners, ranks = owners_of(layers), self.parallel_config.tensor_parallel_size
        rotaries = rotaries_of(model, dict(layers), config.hf_text_config)
        # Index of this rank's first KV head among those of all tensor-parallel ranks.
        first_head = get_tensor_model_parallel_rank() * config.get_total_num_kv_heads() // ranks
        for builder in builders:
            assert isinstance(builder.kv_cache_spec, KVPolicySpec)
            for name in builder.layer_names:
                layers[name].impl.prepare(
                    builder.kv_cache_spec,
                    layers[name].kv_cache,
                    rotaries[name],
                    ranks,
                    config.dtype,
                    scales_of(layers[owners.get(name, name)]),
                    (name, first_head),
                )
        first, *others = builders
        if not learns_positions(config.hf_text_config):
            first.positions.install(model)
        for builder in others:
            builder.follow(first)

    def _connect(self, builders: list[StepBuilder]) -> None:
        """Give the builders the runner's requests, and the runner our whole pages."""
        runner: Any = self.model_runner  # of either version
        schedule = builders[0].engine_schedule
        importance = token_importance(schedule.policy, self.model_config)
        kind = RunnerV2Requests if self.use_v2_model_runner else RunnerV1Requests
        self._requests = kind(runner, schedule, importance)
        if isinstance(self._requests, RunnerV2Requests):
            self._requests.watch(runner.model_state)
        for builder in builders:
            builder.requests = self._requests
        # The runner copies these when a request starts from a snapshot, including page tails.
        runner.kv_caches[:] = [whole_pages(cache) for cache in runner.kv_caches]

    def _make_stores(self, specs: Sequence[KVPolicySpec], device: torch.device) -> None:
        """Create the stores of evicted units, for a policy with recall."""
        spec = specs[0]
        memory = open_memory(model_shape(spec, len(specs)), spec.policy, self.vllm_config)
        shape, backend = unit_shape(spec, len(specs)), self.device_entry.backend
        self._stores = resolve_name(backend).make_stores(shape, memory, device)

    def _check_recalling(self, builders: list[StepBuilder]) -> None:
        """Check that one store fits all layers whose units are recalled.

        Raises:
            KVPolicyError: their keys differ in shape.
        """
        # A log is known by its request's first page of tokens, which is in the first group.
        assert not isinstance(self.model_runner.attn_groups[0][0].kv_cache_spec, StateSpec)
        if sum(builder.kv_cache_spec.policy.recall > 0 for builder in builders) > 1:
            raise KVPolicyError(
                "kv_policy: the model's layers without windows have keys of several shapes, and "
                "recall stores units of one shape; set --kv-recall 0 for this model"
            )

    def _open_stores(self, builder: StepBuilder, layers: dict[str, Any]) -> None:
        """Connect the builder and the layers with the stores of evicted units."""
        spec, owners = builder.kv_cache_spec, owners_of(layers)
        names = [name for name in builder.layer_names if name not in owners]
        if not spec.policy.recall:
            return
        if self._stores is None:
            self._make_stores([spec] * len(names), builder.device)
        builder.stores = self._stores
        for index, name in enumerate(names):
            layers[name].impl.recall_from(self._stores, index, spec.policy.recall_queries)

    def _keep_drafts(self) -> None:
        """Prepare layers and builders for speculative decoding, if it is on."""
        most, most_requests = most_drafts(self.vllm_config), self.scheduler_config.max_num_seqs
        if not most:
            return
        self._drafts = Drafts(most_requests, most)
        for builder in self._builders():
            builder.drafts = self._drafts
        for layer in self._all_layers().values():
            layer.impl.keep_drafts(most_requests)

    def compile_or_warm_up_model(self) -> Any:
        """Run vLLM's warm-up; Model Runner V2's has drafts that nothing accepts or rejects."""
        for drafts in self._all_drafts():
            drafts.warming_up = True
        try:
            return super().compile_or_warm_up_model()
        finally:
            for drafts in self._all_drafts():
                drafts.warming_up = False

    def _all_drafts(self) -> Sequence[Drafts]:
        """The drafts of the model's layers, and those of a drafting model."""
        return [] if self._drafts is None else [self._drafts]

    def _undo_drafts(self, output: SchedulerOutput) -> None:
        """Undo the drafts that the last steps rejected, before anything reads or copies pages."""
        assert self._drafts is not None
        self._undo(self._drafts.note(output), self._builders())

    def _undo(self, rejected: Sequence[Drafted], builders: Sequence[StepBuilder]) -> None:
        if not rejected:
            return
        blocks = [self._requests.blocks(one.name) for one in rejected]
        layers = self._all_layers()
        for builder in builders:
            undone = builder.undone(rejected, blocks)
            for name in builder.layer_names:
                layers[name].impl.undo(undone)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        if self._drafts is not None:
            self._undo_drafts(scheduler_output)
        self._serve_sessions(scheduler_output)
        self._requests.note(scheduler_output)
        if self._stores is not None:
            self._stores.note(scheduler_output)
        return self._with_report(super().execute_model(scheduler_output))

    def execute_dummy_batch(self) -> None:
        """Run a batch of padding while other engines, which share a model's experts, have requests.

        Model Runner V1 gives the batch the block tables of requests that it still knows.
        """
        builders, requests = self._builders(), self._requests
        for builder in builders:
            builder.requests = NoRequests()
        try:
            super().execute_dummy_batch()
        finally:
            for builder in builders:
                builder.requests = requests

    def _attention_layers(self) -> dict[str, Any]:
        """The model's attention layers; the ``impl`` of each is a ``KVPolicyImpl``."""
        others = self._drafting().names
        return {name: one for name, one in self._all_layers().items() if name not in others}

    def _all_layers(self) -> dict[str, Any]:
        """The attention layers of the model and of a drafting model."""
        kinds: Any = (Attention, MLAAttention)
        return get_layers_from_vllm_config(self.vllm_config, kinds)

    def _token_groups(self) -> dict[int, list[Any]]:
        """vLLM's attention groups of the cache groups that hold tokens, by the group's number."""
        return {
            number: all_of
            for number, all_of in enumerate(self.model_runner.attn_groups)
            if not all(isinstance(group.kv_cache_spec, StateSpec) for group in all_of)
        }

    def _builders(self) -> list[StepBuilder]:
        """The metadata builders, one per kind of the model's attention layers.

        These kinds share a cache group. Recurrent layers have other groups and use vLLM's builders.
        The first builder has the policy's layers, if the model has any. It publishes positions, and
        its counters are the engine's.

        Raises:
            KVPolicyError: some layers need caches that are not ours.
        """
        groups = self._token_groups().values()
        builders: list[Any] = [g.get_metadata_builder() for all_of in groups for g in all_of]
        if len(groups) != 1 or not all(isinstance(builder, StepBuilder) for builder in builders):
            kinds = ", ".join(type(builder).__name__ for builder in builders)
            raise KVPolicyError(
                f"kv_policy: vLLM splits this model's caches into several groups ({kinds}); use a "
                "model with full attention or sliding windows, or with full attention and at least "
                "as many recurrent layers"
            )
        return sorted(builders, key=lambda builder: builder.kv_cache_spec.window is not None)

    def kv_policy_counters(self) -> dict[str, int]:
        """Counters of this worker: tokens seen, tokens evicted, strides, steps.

        With recall, also units recalled (summed over layers and head sets), units stored for
        requests and snapshots, and the stores' memory in bytes.
        """
        counters = asdict(self._builders()[0].counters)
        if self._stores is not None:
            layers = self._attention_layers().values()
            counters["recalled_units"] = sum(layer.impl.recalled_units for layer in layers)
            counters["stored_units"] = self._stores.num_units
            counters["store_bytes"] = self._stores.num_bytes
        return counters

    def kv_policy_trace(self, every: int = 1) -> None:
        """Start to record which tokens every layer keeps, and drop an earlier recording.

        Args:
            every: record stride ends that are multiples of this many tokens.

        Raises:
            KVPolicyError: the policy's ``trace`` setting is off.
        """
        if not self._builders()[0].schedule.policy.trace:
            raise KVPolicyError('kv_policy: set "trace": true to record which tokens are kept')
        recorder = Recorder(every)
        for layer in self._attention_layers().values():
            layer.impl.recorder = recorder

    def kv_policy_kept(self) -> list[dict[str, Any]]:
        """Stop recording and return what was recorded.

        Each entry has the fields of ``Kept``, and ``window`` and ``chunked`` of its layer.
        """
        layers = {name: layer.impl for name, layer in self._attention_layers().items()}
        recorder = next(iter(layers.values())).recorder
        for impl in layers.values():
            impl.recorder = None
        found = []
        for kept in recorder.kept if recorder else ():
            own = layers[kept.layer].layer_config
            found.append({**asdict(kept), "window": own.window, "chunked": own.chunked})
        return found
