"""What is remembered of the prefix cache of a server; where requests go by it is in test_server_engine.py."""

import numpy as np
import pytest

from ludic.engines import server_pool
from ludic.engines.server_pool import Prefixes, hash_blocks

TOKENS = np.arange(64, dtype=np.int32)


def test_a_hash_depends_on_all_tokens_up_to_the_end_of_its_block_and_on_the_salt() -> None:
    hashes = hash_blocks(TOKENS, "run:1")
    assert len(set(hashes)) == 4
    assert hash_blocks(TOKENS[:50], "run:1") == hashes[:3]  # the rest is no whole block
    for changed, num_equal in ((0, 0), (15, 0), (16, 1), (63, 3)):
        tokens = TOKENS.copy()
        tokens[changed] += 1
        equal = [one == other for one, other in zip(hash_blocks(tokens, "run:1"), hashes, strict=True)]
        assert equal == [True] * num_equal + [False] * (4 - num_equal)
    assert not set(hash_blocks(TOKENS, "run:2")) & set(hashes)
    assert hash_blocks(TOKENS[:15], "run:1") == []


def test_equal_blocks_at_other_places_are_other_blocks() -> None:
    assert len(set(hash_blocks(np.zeros(64, np.int32), "run:1"))) == 4


def test_blocks_count_from_the_first_one_on() -> None:
    hashes, prefixes = hash_blocks(TOKENS, "run:1"), Prefixes()
    assert prefixes.count(hashes) == 0
    prefixes.add(hashes[1:2])
    assert prefixes.count(hashes) == 0
    prefixes.add(hashes[:3])
    assert prefixes.count(hashes) == 3
    prefixes.clear()
    assert prefixes.count(hashes) == 0


def test_the_last_blocks_of_what_was_used_first_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "_MOST_BLOCKS", 6)
    old, new, prefixes = hash_blocks(TOKENS, "run:1"), hash_blocks(TOKENS, "run:2"), Prefixes()
    prefixes.add(old)
    prefixes.add(new)
    assert (prefixes.count(old), prefixes.count(new)) == (2, 4)
    prefixes.add(old[:2])
    prefixes.add(hash_blocks(TOKENS[:32], "run:3"))
    assert (prefixes.count(old), prefixes.count(new)) == (2, 2)
