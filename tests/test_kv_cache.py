"""Pages: nobody loses one, nobody gets another's, and their bytes are what the accounts say."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.kernels.cpu.simd import LANES
from paceline.model.config import ModelConfig
from paceline.model.kv_cache import KVCache, PagePool, token_bytes

PAGE = KVCache.page_size

# --- the book ---------------------------------------------------------------------------------------------------------


class PagesAndOwners(RuleBasedStateMachine):
    """The pool beside the plainest model of it: owners, each with a list of pages."""

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.owners: list[list[int]] = []

    @property
    def counts(self) -> Counter[int]:
        return Counter(page for pages in self.owners for page in pages)

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.pool.num_free))
        before = self.counts
        pages = self.pool.take(count)
        assert len(set(pages)) == count and not any(before[page] for page in pages)
        self.owners.append(pages)

    @rule()
    def take_too_many(self) -> None:
        with pytest.raises(AssertionError, match="make room"):
            self.pool.take(self.pool.num_free + 1)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from(self.owners))
        prefix = pages[: data.draw(st.integers(0, len(pages)))]
        self.pool.share(prefix)
        self.owners.append(list(prefix))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.pool.release(pages)

    @precondition(lambda self: any(self.owners))
    @rule(data=st.data())
    def grow_or_shrink(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from([pages for pages in self.owners if pages]))
        if self.pool.num_free and data.draw(st.booleans()):
            pages += self.pool.take(1)
        else:
            self.pool.release([pages.pop()])

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "pool"):
            counts = self.counts
            self.pool.check_integrity(self.owners)
            assert self.pool.num_free == self.pool.num_pages - len(counts)
            for page in range(self.pool.num_pages):
                assert self.pool.is_shared(page) == (counts[page] > 1)

    def teardown(self) -> None:
        for pages in getattr(self, "owners", []):
            self.pool.release(pages)
        if hasattr(self, "pool"):
            self.pool.check_integrity([])
            assert sorted(self.pool.take(self.pool.num_pages)) == list(range(self.pool.num_pages))


TestPagesAndOwners = PagesAndOwners.TestCase
TestPagesAndOwners.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def pool_with_owners() -> tuple[PagePool, list[list[int]]]:
    """Six pages: two owners share a page, one page each is their own, the rest is free."""
    pool = PagePool(6)
    first = pool.take(2)
    pool.share(first[:1])
    return pool, [first, [first[0], *pool.take(1)]]


def test_sound_books_pass() -> None:
    pool, owned = pool_with_owners()
    pool.check_integrity(owned)


def test_a_lost_page_is_noticed() -> None:
    pool, owned = pool_with_owners()
    owned[1].pop()
    with pytest.raises(AssertionError, match="1 owners on the books, 0 found"):
        pool.check_integrity(owned)


def test_a_second_owner_who_never_asked_is_noticed() -> None:
    pool, owned = pool_with_owners()
    owned[1].append(owned[0][1])
    with pytest.raises(AssertionError, match="1 owners on the books, 2 found"):
        pool.check_integrity(owned)


def test_a_page_used_after_release_is_noticed() -> None:
    pool, owned = pool_with_owners()
    pool.release(owned[1])
    with pytest.raises(AssertionError, match="owners on the books"):
        pool.check_integrity(owned)


def test_a_page_missing_from_the_free_list_is_noticed() -> None:
    pool, owned = pool_with_owners()
    pool._free.pop()
    with pytest.raises(AssertionError, match="both free and owned, or neither"):
        pool.check_integrity(owned)


def test_a_page_free_and_owned_is_noticed() -> None:
    pool, owned = pool_with_owners()
    pool._free.append(owned[0][0])
    with pytest.raises(AssertionError, match="both free and owned, or neither"):
        pool.check_integrity(owned)


def test_a_page_free_twice_is_noticed() -> None:
    pool, owned = pool_with_owners()
    pool._free.append(pool._free[0])
    with pytest.raises(AssertionError, match="free twice"):
        pool.check_integrity(owned)


def test_an_owner_of_a_page_that_does_not_exist_is_noticed() -> None:
    pool, owned = pool_with_owners()
    with pytest.raises(AssertionError):
        pool.check_integrity([*owned, [pool.num_pages]])


def test_a_page_cannot_be_released_or_shared_without_an_owner() -> None:
    pool = PagePool(3)
    (page,) = pool.take(1)
    pool.release([page])
    with pytest.raises(AssertionError, match="only owned pages"):
        pool.share([page])
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([page])


# --- the memory -------------------------------------------------------------------------------------------------------


def small_config(num_layers: int = 3, num_kv_heads: int = 2, head_dim: int = 14) -> ModelConfig:
    sizes = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": num_layers}
    heads = {"num_attention_heads": 2 * num_kv_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}
    return ModelConfig.from_hf({"model_type": "qwen3", **sizes, **heads})


def numbered_cache(num_pages: int) -> KVCache:
    """A cache in which every float is different."""
    cache = KVCache.allocate(small_config(), num_pages)
    cache.keys[:] = np.arange(cache.keys.size).reshape(cache.keys.shape)
    cache.values[:] = -np.arange(cache.values.size).reshape(cache.values.shape)
    return cache


def token_at(cache: KVCache, slot: int) -> np.ndarray:
    """Everything the cache holds of one token, over all layers."""
    page, offset = divmod(slot, PAGE)
    return np.concatenate([cache.keys[:, page, :, :, offset].ravel(), cache.values[:, page, :, offset].ravel()])


@given(
    num_layers=st.integers(1, 4),
    num_kv_heads=st.integers(1, 5),
    head_dim=st.integers(1, 70).map(lambda pairs: 2 * pairs),
    num_pages=st.integers(1, 9),
)
def test_token_bytes_are_the_bytes_of_the_memory(
    num_layers: int, num_kv_heads: int, head_dim: int, num_pages: int
) -> None:
    config = small_config(num_layers, num_kv_heads, head_dim)
    cache = KVCache.allocate(config, num_pages)
    assert cache.num_pages == num_pages
    assert cache.num_bytes == cache.keys.nbytes + cache.values.nbytes == num_pages * cache.page_bytes
    assert cache.page_bytes == PAGE * token_bytes(config)
    assert token_at(cache, 0).nbytes == token_bytes(config)


def test_values_are_padded_to_whole_vectors_and_keys_are_not() -> None:
    cache = KVCache.allocate(small_config(), 2)
    assert cache.keys.shape == (3, 2, 2, 14, PAGE)
    assert cache.values.shape == (3, 2, 2, PAGE, -(-14 // LANES) * LANES)
    assert PAGE % LANES == 0, "vectors of keys must not cross pages"


def test_a_copied_page_is_equal_and_separate() -> None:
    cache = numbered_cache(4)
    before = [[token_at(cache, slot) for slot in range(page * PAGE, (page + 1) * PAGE)] for page in range(4)]
    cache.copy_page(3, 1)
    for page, source in enumerate((0, 3, 2, 3)):
        for offset in range(PAGE):
            assert (token_at(cache, page * PAGE + offset) == before[source][offset]).all()
    cache.keys[:, 1], cache.values[:, 1] = 0, 0
    assert (token_at(cache, 3 * PAGE) == before[3][0]).all()


@settings(max_examples=60)
@given(data=st.data())
def test_moves_are_made_one_after_the_other(data: st.DataObject) -> None:
    cache = numbered_cache(3)
    slots = st.lists(st.integers(0, 3 * PAGE - 1), min_size=0, max_size=12)
    sources = data.draw(slots)
    targets = data.draw(st.lists(st.integers(0, 3 * PAGE - 1), min_size=len(sources), max_size=len(sources)))
    expected = [token_at(cache, slot) for slot in range(3 * PAGE)]
    cache.move(sources, targets)
    for source, target in zip(sources, targets, strict=True):
        expected[target] = expected[source]
    for slot, token in enumerate(expected):
        assert (token_at(cache, slot) == token).all()


def test_an_accepted_path_moves_down_without_overwriting_itself() -> None:
    cache = numbered_cache(2)
    before = [token_at(cache, slot) for slot in range(2 * PAGE)]
    path = [PAGE - 1, PAGE, PAGE + 2, PAGE + 3]
    cache.move(path, range(PAGE - 3, PAGE + 1))
    for target, source in zip(range(PAGE - 3, PAGE + 1), path, strict=True):
        assert (token_at(cache, target) == before[source]).all()


def test_a_move_needs_a_target_for_each_source() -> None:
    with pytest.raises(ValueError):
        numbered_cache(1).move([1, 2], [0])
