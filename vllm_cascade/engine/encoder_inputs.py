# SPDX-License-Identifier: Apache-2.0
"""Encoder inputs (images, video, audio) for which the encoder has no room in a step.

vLLM ends a chunk before such an input. Whether there is room depends on other requests, and a
stride must not. So the scheduler aligns that end to a stride's end, or lets the request wait.
"""

from collections.abc import Set

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request


def held_inputs(cache: EncoderCacheManager, request: Request, start: int) -> set[int]:
    """Inputs in the encoder's cache that a request keeps there while it waits at ``start``.

    Those that end before ``start`` are freed when the steps in flight have run.
    """
    places = [feature.mm_position for feature in request.mm_features]
    held = cache.get_cached_input_ids(request)
    return {i for i in held if places[i].offset + places[i].length > start}


def needed_room(request: Request, start: int, end: int, held: Set[int]) -> int:
    """Room in the encoder for the inputs of tokens ``start .. end - 1`` that are not held."""
    sizes = {}
    for i, feature in enumerate(request.mm_features):
        place = feature.mm_position
        if i not in held and place.offset < end and start < place.offset + place.length:
            sizes[feature.identifier] = place.get_num_embeds()
    return sum(sizes.values())


def release_unreached(
    cache: EncoderCacheManager, request: Request, end: int, held: Set[int]
) -> None:
    """Release the inputs that vLLM took from the cache for a chunk that now ends before them.

    A waiting request that held them could wait for room that another one holds.
    """
    for i in cache.get_cached_input_ids(request) - held:
        if request.mm_features[i].mm_position.offset >= end:
            cache.free_encoder_input(request, i)


def whole_inputs(request: Request, start: int, most: int, aligned: int, ahead: int) -> int:
    """Tokens of a chunk with ``--disable-chunked-mm-input``, if strides alone allow ``aligned``.

    vLLM then gives a request no chunk that ends inside an input, and ends chunks ``ahead`` tokens
    before it. A chunk that must end with a stride inside an input would never be scheduled.

    Args:
        most: tokens of the chunk that vLLM has chosen.
        ahead: tokens after a chunk that a drafting model reads in the same step.
    """
    places = [feature.mm_position for feature in request.mm_features]
    here = (p.offset + p.length - start for p in places if start <= p.offset <= start + ahead)
    return max(aligned, *(length for length in here if length <= most), 0)
