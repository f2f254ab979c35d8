"""How many blocks the disk tier of a replica believes that its disk can hold."""

from __future__ import annotations

from pagebus.actors.scheduler.kv.disk_pool import WRITES_PER_TRY, DiskPool


class Disk:
    """Writes ever new contents to a disk with room for ``num_blocks``."""

    def __init__(self, pool: DiskPool, num_blocks: int) -> None:
        self.pool, self.num_blocks, self._count = pool, num_blocks, 0

    def write(self, count: int) -> int:
        """Write one after the other; returns how many have failed."""
        failed = 0
        for _ in range(count):
            self._count += 1
            content = self._count.to_bytes(16, "big")
            assert self.pool.begin(content, ()) is not None
            fits = len(self.pool.stored) < self.num_blocks
            self.pool.end(content, stored=fits)
            self.pool.check_integrity()
            failed += not fits
        return failed


def test_a_disk_that_was_full_is_used_again():
    """Also one on which nothing had been stored: else a moment without room would end the tier until a restart."""
    pool = DiskPool(100)
    disk = Disk(pool, 0)

    assert disk.write(10) == 10
    disk.num_blocks = 100

    assert disk.write(4 * WRITES_PER_TRY) == 0
    assert (pool.num_blocks, pool.usage) == (100, 1.0)


def test_a_full_disk_is_seldom_tried():
    """It keeps what it has room for; a failed write costs a block that was stored before."""
    pool = DiskPool(1000)
    disk = Disk(pool, 200)

    disk.write(300)
    failed = disk.write(100 * WRITES_PER_TRY)

    assert 0 < failed <= 100
    assert pool.num_blocks in (200, 201)


def test_a_healthy_disk_is_left_at_what_it_was_given():
    pool = DiskPool(100)

    assert Disk(pool, 200).write(10 * WRITES_PER_TRY) == 0
    assert pool.num_blocks == 100
