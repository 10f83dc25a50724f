"""BlockPool: who holds which KV block, and which blocks hold a known prefix. It knows no requests and no tensors."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

KEY_BYTES = 16


class BlockPool:
    """A block is free (no holder) or held by one or more. A free block may still contain a published prefix: `match`
    finds it until `take` gives it away, least recently released first, blocks without a prefix before all others."""

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.holders = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.key_of: list[bytes | None] = [None] * num_blocks
        self.block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self.free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # ---- holding

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks to one holder. The caller has checked `num_free`."""
        assert count <= len(self.free), f"{count} blocks taken of {len(self.free)} free"
        taken = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._forget(block)
            self.holders[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Add a holder to blocks that `match` found."""
        for block in blocks:
            if self.holders[block] == 0:
                del self.free[block]
            self.holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one holder of each; tails first, so that a prefix outlives what follows it."""
        for block in reversed(blocks):
            assert self.holders[block] > 0, f"block {block} released by nobody"
            self.holders[block] -= 1
            if self.holders[block] == 0:
                self.free[block] = None
                if self.key_of[block] is None:
                    self.free.move_to_end(block, last=False)

    # ---- prefixes

    def chain(self, keys: list[bytes], tokens: Sequence[int], salt: str) -> None:
        """Extend `keys` to one key for each whole block of `tokens`. A key is a blake2b-128 hash over the key before
        it and the block's ids, so that it names all that a block's KV depends on. The first hashes the salt."""
        size = self.block_size
        for i in range(len(keys), len(tokens) // size):
            before = keys[-1] if keys else hashlib.blake2b(salt.encode(), digest_size=KEY_BYTES).digest()
            ids = array("I", tokens[i * size : (i + 1) * size]).tobytes()
            keys.append(hashlib.blake2b(before + ids, digest_size=KEY_BYTES).digest())

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The longest run of leading blocks whose contents are already here."""
        found: list[int] = []
        for key in keys:
            block = self.block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def cost(self, hits: Sequence[int], total: int) -> int:
        """Free blocks used up by holding `total` blocks of which `hits` were matched."""
        return total - len(hits) + sum(self.holders[block] == 0 for block in hits)

    def publish(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """Say what each block now contains. The first block to say so keeps the key."""
        for block, key in zip(blocks, keys, strict=True):
            if key not in self.block_of and self.key_of[block] is None:
                self.block_of[key] = block
                self.key_of[block] = key

    def _forget(self, block: int) -> None:
        key, self.key_of[block] = self.key_of[block], None
        if key is not None:
            del self.block_of[key]
