"""Weights on their way: every bit arrives or the set is refused, with a reason, and nobody sees half of one."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.fleet.transport.weights import (
    CHUNK_BYTES,
    DTYPES,
    ByteChunk,
    Holder,
    Manifest,
    Package,
    Publisher,
    Ref,
    WeightsError,
    assemble,
    bytes_of,
    checksum,
    put_all,
    split,
)


class ShelfStore:
    """A store without processes: chunks are copied in, and read-only on their way out, as Ray has it."""

    def __init__(self) -> None:
        self.chunks: list[list[np.ndarray[Any, Any]]] = []
        self.is_open = threading.Event()
        self.is_open.set()

    def put(self, chunk: ByteChunk) -> Ref:
        assert self.is_open.wait(10)
        self.chunks.append([array.copy() for array in chunk])
        for array in self.chunks[-1]:
            array.flags.writeable = False
        return len(self.chunks) - 1

    def get(self, refs: Sequence[Ref], seconds: float) -> list[ByteChunk]:
        return [list(self.chunks[ref]) for ref in refs]


def some_weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = {name: torch.randn(5, 7, generator=generator) for name in ("embed", "q", "k", "norm", "head")}
    values["q"] = values["q"].bfloat16()
    return values


def packed(version: int, weights: Mapping[str, Tensor], chunk_bytes: int = 200) -> tuple[Manifest, list[list[Any]]]:
    store = ShelfStore()
    package = put_all(store, version, weights, chunk_bytes)
    return package.manifest, [[array.copy() for array in chunk] for chunk in store.chunks]


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert bytes_of(found[name]).tobytes() == bytes_of(tensor).tobytes(), name


# --- checksum ---------------------------------------------------------------------------------------------------------


@given(data=st.binary(max_size=700), place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_any_flipped_bit_changes_the_checksum(data: bytes, place: int, bit: int) -> None:
    before = np.frombuffer(data, np.uint8)
    assert checksum(before) == checksum(before.copy()) != checksum(before, seed=1)
    if data:
        after = before.copy()
        after[place % len(data)] ^= 1 << bit
        assert checksum(after) != checksum(before)


@given(data=st.binary(min_size=1, max_size=400), added=st.integers(1, 300))
def test_the_length_counts(data: bytes, added: int) -> None:
    assert checksum(np.frombuffer(data, np.uint8)) != checksum(np.frombuffer(data + bytes(added), np.uint8))


@pytest.mark.parametrize("distance", [8, 64, 128, 1024])
def test_words_that_change_places_are_noticed(distance: int) -> None:
    """A plain sum is blind to that; so is it to two signs that flip."""
    data = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
    swapped, flipped = data.copy(), data.copy()
    swapped[:8], swapped[distance : distance + 8] = data[distance : distance + 8], data[:8]
    flipped[[7, 7 + distance]] ^= 0x80
    assert len({checksum(data), checksum(swapped), checksum(flipped)}) == 3


# --- round trip -------------------------------------------------------------------------------------------------------

SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)


@given(
    kinds=st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES), max_size=12),
    chunk_bytes=st.integers(1, 600),
    data=st.randoms(use_true_random=False),
)
def test_every_bit_arrives(kinds: list[tuple[str, tuple[int, ...]]], chunk_bytes: int, data: Any) -> None:
    weights = {}
    for number, (dtype, shape) in enumerate(kinds):
        size = int(np.prod(shape)) * DTYPES[dtype].itemsize
        bits = torch.frombuffer(bytearray(data.randbytes(size) or b"?"), dtype=torch.uint8)[:size]
        weights[f"w{number}"] = bits.clone().view(DTYPES[dtype]).reshape(shape)
    manifest, chunks = packed(3, weights, chunk_bytes)
    assert_equal(assemble(manifest, chunks), weights)
    num_bytes = sum(entry.num_bytes for entries in manifest.chunks for entry in entries)
    assert num_bytes == sum(tensor.nbytes for tensor in weights.values())


def test_tensors_that_do_not_lie_in_one_piece() -> None:
    base = torch.randn(6, 8)
    weights = {"transposed": base.T, "sliced": base[:, 1::2], "parameter": torch.nn.Parameter(base), "one": base[0, 0]}
    manifest, chunks = packed(0, weights)
    assert_equal(assemble(manifest, chunks), weights)


def test_what_arrives_is_not_copied_and_nobody_is_warned() -> None:
    store = ShelfStore()
    package = put_all(store, 0, some_weights())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = assemble(package.manifest, store.get(package.refs, 1))
    places = [array.ctypes.data for chunk in store.chunks for array in chunk]
    assert [tensor.data_ptr() for tensor in found.values()] == places


def test_nothing_is_copied_on_the_way_in() -> None:
    weights = torch.randn(4, 4)
    assert bytes_of(weights).ctypes.data == weights.data_ptr()


def test_chunks_end_once_they_are_full() -> None:
    weights = {
        name: torch.zeros(size, dtype=torch.uint8) for name, size in zip("abcdef", (5, 5, 20, 1, 9, 2), strict=True)
    }
    assert list(split(weights, 10)) == [["a", "b"], ["c"], ["d", "e"], ["f"]]
    assert list(split({}, 10)) == []


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="w is complex64; weights can be float64"):
        packed(0, {"w": torch.zeros(2, dtype=torch.complex64)})


# --- faults -----------------------------------------------------------------------------------------------------------


@given(chunk=st.integers(0, 100), place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_one_wrong_bit_is_refused(chunk: int, place: int, bit: int) -> None:
    manifest, chunks = packed(4, some_weights())
    arrays = chunks[chunk % len(chunks)]
    array = arrays[place % len(arrays)]
    array[place % array.size] ^= 1 << bit
    with pytest.raises(WeightsError, match=r"version 4: \w+ is damaged"):
        assemble(manifest, chunks)


def test_what_is_cut_or_missing_is_refused() -> None:
    manifest, chunks = packed(4, some_weights())
    assert len(chunks) > 1
    with pytest.raises(WeightsError, match=f"{len(chunks) - 1} chunks of {len(chunks)} arrived"):
        assemble(manifest, chunks[:-1])
    with pytest.raises(WeightsError, match=r"chunk 0 should hold \d tensors"):
        assemble(manifest, [chunks[0][:-1], *chunks[1:]])
    with pytest.raises(WeightsError, match="version 4: embed has 139 bytes, not 140"):
        assemble(manifest, [[chunks[0][0][:-1], *chunks[0][1:]], *chunks[1:]])


@pytest.mark.parametrize("wrong", [None, b"bytes", np.zeros(35, np.float32), np.zeros((140, 1), np.uint8)])
def test_what_is_not_bytes_is_refused(wrong: Any) -> None:
    manifest, chunks = packed(4, some_weights())
    with pytest.raises(WeightsError, match="embed did not arrive as bytes"):
        assemble(manifest, [[wrong, *chunks[0][1:]], *chunks[1:]])


def test_versions_do_not_mix() -> None:
    """Neither chunks of one with the manifest of the other, nor manifests, even where all bytes are the same."""
    weights = {name: torch.ones(50) for name in "abc"}
    manifest, chunks = packed(4, weights)
    _, changed = packed(5, {name: 2 * tensor for name, tensor in weights.items()})
    with pytest.raises(WeightsError, match="c is damaged or of another version"):
        assemble(manifest, [*chunks[:2], changed[2]])
    other, _ = packed(5, weights)
    with pytest.raises(WeightsError, match="b is damaged or of another version"):
        assemble(Manifest.of(4, (manifest.chunks[0], *other.chunks[1:])), chunks)


def test_a_damaged_manifest_is_refused() -> None:
    manifest, chunks = packed(4, some_weights())
    (first, *rest), *others = manifest.chunks
    for wrong in (
        replace(manifest, version=5),
        replace(manifest, chunks=((replace(first, name="other"), *rest), *others)),
        replace(manifest, chunks=((replace(first, shape=(7, 5)), *rest), *others)),
    ):
        with pytest.raises(WeightsError, match=r"the manifest of version \d is damaged"):
            assemble(wrong, chunks)


# --- publisher and holder ---------------------------------------------------------------------------------------------


class Decoder:
    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.fails_after: int | None = None

    def load(self, weights: Mapping[str, Tensor]) -> None:
        for number, (name, tensor) in enumerate(weights.items()):
            if number == self.fails_after:
                raise MemoryError
            self.weights.setdefault(name, torch.empty_like(tensor)).copy_(tensor)


def test_publishing_goes_on_beside_the_caller() -> None:
    store, decoder = ShelfStore(), Decoder()
    publisher, holder = Publisher(store), Holder(store, decoder.load)
    store.is_open.clear()
    publisher.publish(1, some_weights())
    with pytest.raises(TimeoutError):
        publisher.wait(0)
    store.is_open.set()
    assert holder.take(publisher.wait(10)) and publisher.wait(0)
    assert holder.version == 1
    assert_equal(decoder.weights, some_weights())
    publisher.close()


def test_a_warm_store_is_published_to_as_any_other() -> None:
    store = ShelfStore()
    publisher = Publisher(store)
    publisher.warm(2**20)
    publisher.publish(1, some_weights())
    assert_equal(assemble(publisher.wait(10).manifest, store.chunks[1:]), some_weights())
    assert store.chunks[0][0].size == CHUNK_BYTES
    publisher.close()


def test_a_failed_publication_is_raised_where_it_is_waited_for() -> None:
    publisher = Publisher(ShelfStore())
    publisher.publish(1, {"w": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(ValueError, match="complex64"):
        publisher.wait(10)
    publisher.publish(2, some_weights())
    assert publisher.wait(10).manifest.version == 2
    publisher.close()


def test_weights_that_change_while_they_are_published_are_refused() -> None:
    class Slow(ShelfStore):
        def put(self, chunk: ByteChunk) -> Ref:
            weights["embed"].zero_()
            return super().put(chunk)

    weights, store = some_weights(), Slow()
    package = put_all(store, 1, weights)
    with pytest.raises(WeightsError, match="embed is damaged"):
        Holder(store, Decoder().load).take(package)


def test_versions_only_go_forwards() -> None:
    store, decoder = ShelfStore(), Decoder()
    holder = Holder(store, decoder.load)
    old, new = (put_all(store, version, some_weights(version)) for version in (1, 2))
    assert holder.take(new) and not holder.take(new) and not holder.take(old)
    assert holder.version == 2
    assert_equal(decoder.weights, some_weights(2))


def test_refused_weights_leave_the_old_ones() -> None:
    store, decoder = ShelfStore(), Decoder()
    holder = Holder(store, decoder.load)
    holder.take(put_all(store, 1, some_weights(1), 200))
    new = put_all(store, 2, some_weights(2), 200)
    mixed = Package(new.manifest, (*new.refs[:-1], len(new.refs) - 1))  # the last chunk is that of version 1
    with pytest.raises(WeightsError, match="version 2: head is damaged or of another version"):
        holder.take(mixed)
    assert holder.version == 1
    assert_equal(decoder.weights, some_weights(1))
    assert holder.take(new)


def test_a_load_that_fails_half_way_leaves_no_version() -> None:
    store, decoder = ShelfStore(), Decoder()
    holder = Holder(store, decoder.load)
    holder.take(put_all(store, 1, some_weights(1)))
    decoder.fails_after = 2
    package = put_all(store, 2, some_weights(2))
    with pytest.raises(MemoryError):
        holder.take(package)
    assert holder.version is None
    decoder.fails_after = None
    assert holder.take(package) and holder.version == 2
