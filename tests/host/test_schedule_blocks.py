"""BlockPool: holders, the order in which free blocks are given away, and prefix keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.schedule.blocks import BlockPool


def keys_of(pool: BlockPool, tokens: list[int], salt: str = "") -> list[bytes]:
    keys: list[bytes] = []
    pool.chain(keys, tokens, salt)
    return keys


def fill(pool: BlockPool, tokens: list[int], salt: str = "") -> list[int]:
    """Hold and publish the whole blocks of `tokens`, as if they were computed."""
    keys = keys_of(pool, tokens, salt)
    blocks = pool.take(len(keys))
    pool.publish(blocks, keys)
    return blocks


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert BlockPool(4, 16).blocks_for(tokens) == blocks


def test_take_and_release() -> None:
    pool = BlockPool(4, 2)
    first, second = pool.take(3), pool.take(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert pool.num_free == 0
    pool.release(first)
    assert pool.num_free == 3
    assert sorted(pool.take(3)) == sorted(first)


def test_nobody_takes_more_than_is_free_nor_releases_what_nobody_holds() -> None:
    pool = BlockPool(4, 2)
    blocks = pool.take(2)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 of 4 are free"):
        pool.take(3)
    assert pool.num_free == 2
    pool.release(blocks)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.release(blocks)


def test_a_shared_block_is_free_when_the_last_holder_lets_go() -> None:
    pool = BlockPool(4, 2)
    blocks = fill(pool, [1, 2, 3, 4])
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_free == 2
    pool.release(blocks)
    assert pool.num_free == 4
    pool.share(blocks)  # free, and still known
    assert pool.num_free == 2


def test_free_blocks_go_in_order_of_their_worth() -> None:
    pool = BlockPool(6, 1)
    old, young, unknown = fill(pool, [1, 2]), fill(pool, [3, 4]), pool.take(1)
    (never,) = pool.take(1)
    pool.release([never])
    for blocks in (old, young, unknown):
        pool.release(blocks)
    assert pool.take(6) == [*unknown, never, old[1], old[0], young[1], young[0]]


def test_a_hit_makes_a_free_block_young_again() -> None:
    pool = BlockPool(2, 1)
    one, other = fill(pool, [1]), fill(pool, [2])
    pool.release(one)
    pool.release(other)
    pool.share(one)
    pool.release(one)
    assert pool.take(1) == other


def test_chain_gives_a_key_for_each_whole_block_and_goes_on_where_it_was() -> None:
    pool = BlockPool(1, 4)
    tokens = list(range(100, 119))
    keys: list[bytes] = []
    for length in range(len(tokens) + 1):
        pool.chain(keys, tokens[:length], "salt")
        assert len(keys) == length // 4
    assert keys == keys_of(pool, tokens, "salt")
    assert len(set(keys)) == 4
    assert all(len(key) == 16 for key in keys)


def test_a_key_covers_all_that_is_before_it() -> None:
    pool = BlockPool(1, 2)
    assert keys_of(pool, [1, 2, 3, 4])[1] != keys_of(pool, [9, 2, 3, 4])[1]
    assert keys_of(pool, [1, 2, 1, 2])[0] != keys_of(pool, [1, 2, 1, 2])[1]


SALTED = st.tuples(st.lists(st.integers(0, 3), max_size=8), st.text(max_size=3))


@given(SALTED, SALTED)
def test_A38_keys_are_equal_where_salts_and_tokens_are(
    one: tuple[list[int], str], other: tuple[list[int], str]
) -> None:
    pool = BlockPool(1, 2)
    for i, (left, right) in enumerate(zip(keys_of(pool, *one), keys_of(pool, *other), strict=False)):
        same = one[1] == other[1] and one[0][: 2 * i + 2] == other[0][: 2 * i + 2]
        assert (left == right) == same


def test_A38_no_salt_looks_like_another_salt_and_tokens() -> None:
    pool = BlockPool(1, 1)
    spelled = (0x41414141).to_bytes(4, "little").decode()
    assert keys_of(pool, [0x41414141, 5], "")[1] != keys_of(pool, [5], spelled)[0]
    assert keys_of(pool, [5], "a" * 16) != keys_of(pool, [5], "a" * 32)
    assert keys_of(pool, [5], "\ud800") != keys_of(pool, [5], "\ufffd")


def test_match_ends_at_the_first_unknown_block() -> None:
    pool = BlockPool(8, 2)
    blocks = fill(pool, [1, 2, 3, 4, 5, 6])
    keys = keys_of(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    assert pool.match(keys, 4) == blocks
    assert pool.match(keys, 2) == blocks[:2]
    assert pool.match(keys, 0) == []
    pool.withdraw(blocks[1:2])
    assert pool.match(keys, 4) == blocks[:1]
    assert pool.match(keys_of(pool, [3, 4]), 1) == []


def test_A37_a_block_that_was_given_away_does_not_match_its_old_contents() -> None:
    pool = BlockPool(2, 2)
    keys = keys_of(pool, [1, 2, 3, 4])
    pool.release(fill(pool, [1, 2, 3, 4]))
    assert len(pool.match(keys, 2)) == 2, "free, and still known"
    taken = pool.take(1)
    assert len(pool.match(keys, 2)) == 1, "the tail went first"
    pool.take(1)
    assert pool.match(keys, 2) == []
    pool.release(taken)
    assert pool.match(keys, 2) == []


def test_the_first_of_equal_blocks_keeps_the_key() -> None:
    pool = BlockPool(4, 2)
    first, second = fill(pool, [1, 2]), fill(pool, [1, 2])
    assert pool.match(keys_of(pool, [1, 2]), 1) == first
    pool.release(second)
    assert pool.take(1) == second, "a copy that nobody can find is given away first"


def test_withdrawn_blocks_may_be_published_anew() -> None:
    pool = BlockPool(2, 2)
    blocks, keys = fill(pool, [1, 2]), keys_of(pool, [1, 2])
    pool.withdraw(blocks)
    assert pool.match(keys, 1) == []
    pool.publish(blocks, keys)
    assert pool.match(keys, 1) == blocks


def test_cost_counts_free_hits_and_the_rest() -> None:
    pool = BlockPool(8, 1)
    held, freed = fill(pool, [1, 2]), fill(pool, [3, 4])
    pool.release(freed)
    for hits, total, cost in [([], 3, 3), (held, 5, 3), (freed, 5, 5)]:
        assert pool.cost(hits, total) == cost
        before = pool.num_free
        pool.share(hits)
        blocks = hits + pool.take(total - len(hits))
        assert before - pool.num_free == cost
        pool.release(blocks)
