"""BlockPool: the host's book of KV blocks: who holds each, and which blocks contain a known prefix.

It knows token ids and counts; it knows nothing of sequences, rows or devices.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

KEY_BYTES = 16


class BlockPool:
    """A block is held (by one or more holders) or free. A free block may still contain a published prefix: `match`
    finds it until `take` gives the block away. Free blocks are given away in this order: those without a known
    prefix, then those released longest ago; of one sequence's blocks the last first, so that a beginning, which
    more prompts share, outlives what follows it.

    A prefix is known by its key: the hash of the key before it and of a whole block's token ids. Equal keys mean
    equal salts and equal tokens from the start of the sequence: blake2b leaves no way to make two prefixes collide.
    """

    def __init__(self, num_blocks: int, block_size: int):
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._holders = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # the next to give away first
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # ---- holding

    def take(self, count: int) -> list[int]:
        """Give `count` blocks to one holder. The caller has made sure that as many are free."""
        assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} of {self.num_blocks} are free"
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)  # its contents are about to be written over
            self._holders[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Add a holder to blocks that `match` found."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._free[block]
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one holder of each of a sequence's blocks, which come in the sequence's order."""
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} is released, and nobody holds it"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if self._key_of[block] is None:
                    self._free.move_to_end(block, last=False)

    # ---- prefixes

    def chain(self, keys: list[bytes], tokens: Sequence[int], salt: str) -> None:
        """Extend `keys`, in place, to one key for each whole block of `tokens`."""
        size = self.block_size
        first, last = len(keys), len(tokens) // size
        if first == last:
            return
        # The salt enters as a hash: of a fixed length, so that no salt can look like another one and some tokens.
        key = keys[-1] if keys else blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest()
        ids = array("I", tokens[first * size : last * size])
        stride = size * ids.itemsize
        data = ids.tobytes()
        for start in range(0, len(data), stride):
            key = blake2b(key + data[start : start + stride], digest_size=KEY_BYTES).digest()
            keys.append(key)

    def match(self, keys: Sequence[bytes], limit: int) -> list[int]:
        """The blocks of the longest known prefix, of at most `limit` blocks. They are found, not yet held."""
        found: list[int] = []
        for key in keys[:limit]:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def cost(self, hits: Sequence[int], total: int) -> int:
        """By how much `num_free` falls when somebody holds `total` blocks, of which `hits` are shared."""
        return total - sum(self._holders[block] > 0 for block in hits)

    def publish(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """Say what blocks contain. Of several with the same contents the first keeps the key."""
        for block, key in zip(blocks, keys, strict=True):
            if key not in self._block_of:
                assert self._key_of[block] is None, f"block {block} contains another prefix already"
                self._block_of[key] = block
                self._key_of[block] = key

    def withdraw(self, blocks: Sequence[int]) -> None:
        """Take back what was published of blocks whose contents are in doubt."""
        for block in blocks:
            self._forget(block)

    def _forget(self, block: int) -> None:
        key, self._key_of[block] = self._key_of[block], None
        if key is not None:
            del self._block_of[key]
