"""What kernels of different ranks tell each other, and how they wait: always with a limit.

What runs on GPUs alone is PTX here: reading and writing a word so that what was written before it is seen, too. Waits
look at the clock once in 1,024 tries. One that is given up leaves a note for the host, and all later ones do not wait.
"""

from __future__ import annotations

from pagebus.kernels.common.triton import constant, tl, triton

try:
    from triton.language.extra.cuda import globaltimer
except ImportError:  # no Triton here
    globaltimer = None

TRIES: tl.constexpr = constant(1024)
"""Between two looks at the clock."""
CELL_0, CELLS_PER_FORM, WORDS_PER_BLOCK = constant(64), constant(256), constant(8)
"""As in ``peers.py``."""


@triton.jit
def begin_call(state_ptr, block, FORM: tl.constexpr):
    """The number of this call of a form, from 1 on, and whether to wait at all: 1, or 0 after a failure."""
    call = tl.load(state_ptr + CELL_0 + FORM * CELLS_PER_FORM + block) + 1
    return call, 1 - tl.load(state_ptr)


@triton.jit
def end_call(state_ptr, call, block, grid, FORM: tl.constexpr):
    """Count the call, in the cells that no other block of this grid reads: each call may have another grid."""
    cell = tl.arange(0, CELLS_PER_FORM)
    tl.store(state_ptr + CELL_0 + FORM * CELLS_PER_FORM + cell, call, mask=cell % grid == block)


@triton.jit
def slot_address(table_ptr, rank, index, START: tl.constexpr, SLOT: tl.constexpr):
    """The address, int64, of slot ``index`` of an area in a rank's region."""
    return tl.load(table_ptr + rank) + START + tl.cast(index, tl.int64) * SLOT


@triton.jit
def pointer_to(address, TYPE: tl.constexpr):
    """An address, which 16 divides, as a pointer."""
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), 16)


@triton.jit
def note_failure(table_ptr, state_ptr, sender, call, block, FORM: tl.constexpr, WORLD: tl.constexpr):
    """Tell the host, and all later waits, that a sender was missing."""
    note = tl.load(table_ptr + WORLD).to(tl.pointer_type(tl.int32))
    if tl.load(state_ptr, volatile=True) == 0:
        tl.store(note + 1, FORM)
        tl.store(note + 2, sender)
        tl.store(note + 3, call)
        tl.store(note + 4, block)
        tl.store(note, 1)
        tl.store(state_ptr, 1)


@triton.jit
def look_at_clock(tries, deadline, patience_ns):
    """The time in ns at which to give up, 0 before the first look, and whether to go on waiting: 1 or 0."""
    patience = 1
    if tries % TRIES == 0:
        now = globaltimer()
        if deadline == 0:
            deadline = now + patience_ns
        else:
            if now > deadline:
                patience = 0
    return deadline, patience


@triton.jit
def signal(address, value, thread):
    """Write a word of a peer, int32, so that who reads it sees all that this block has written before. Behind a barrier
    of the block; done by one thread."""
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred chosen;
            .reg .u32 own;
            mov.u32 own, %tid.x;
            setp.eq.u32 chosen, own, $3;
            @chosen st.release.sys.global.u32 [$1], $2;
            mov.u32 $0, 0;
        }
        """,
        "=r,l,r,r",
        [address, value, thread],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def acquire(addresses):
    """Words, int32, whose writers' earlier writes are seen from here on by the threads that read them."""
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.u32 $0, [$1];", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def signal_all(table_ptr, rank, block, value, START: tl.constexpr, WORLD: tl.constexpr, turn=0):
    """Tell the same block of all other ranks that what it needs in the next turn is written."""
    cell = turn * CELLS_PER_FORM + block
    tl.debug_barrier()
    for step in tl.static_range(1, WORLD):
        peer = (rank + step) % WORLD
        word = tl.load(table_ptr + peer) + START + (cell * WORDS_PER_BLOCK + rank) * 4
        signal(word, value, (step - 1) % 4 * 32)  # of different warps, as far as there are


@triton.jit
def wait_all(
    table_ptr, state_ptr, rank, block, value, patience, patience_ns,
    START: tl.constexpr, FORM: tl.constexpr, WORLD: tl.constexpr, turn=0,
):  # fmt: skip
    """Wait until the same block of all other ranks has told ``value``, or a later one, in a turn. Returns the patience
    left."""
    cell = turn * CELLS_PER_FORM + block
    sender = tl.arange(0, WORDS_PER_BLOCK)
    words = tl.load(table_ptr + rank) + START + (cell * WORDS_PER_BLOCK + sender) * 4
    awaited = (sender < WORLD) & (sender != rank)
    behind = awaited & (acquire(words) - value < 0)
    missing = tl.max(tl.where(behind, sender, -1), axis=0)
    tries, deadline, waits = 0, tl.full((), 0, tl.int64), patience
    while (missing >= 0) & (waits > 0):
        behind = awaited & (acquire(words) - value < 0)
        missing = tl.max(tl.where(behind, sender, -1), axis=0)
        tries += 1
        deadline, waits = look_at_clock(tries, deadline, patience_ns)
    if waits < patience:
        note_failure(table_ptr, state_ptr, missing, value, block, FORM, WORLD)
    tl.debug_barrier()
    return waits


@triton.jit
def wait_for_data(
    pointers, mask, hole, table_ptr, state_ptr, sender, call, block, patience, patience_ns,
    FORM: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    """Read until nothing is a hole, then leave holes behind. Returns what arrived, and the patience left. Each element
    must belong to one thread alone: at least as many elements as threads."""
    bits = tl.load(pointers, mask=mask, other=0, volatile=True)
    missing = tl.max((bits == hole).to(tl.int32), axis=0)
    tries, deadline, waits = 0, tl.full((), 0, tl.int64), patience
    while (missing > 0) & (waits > 0):
        bits = tl.load(pointers, mask=mask, other=0, volatile=True)
        missing = tl.max((bits == hole).to(tl.int32), axis=0)
        tries += 1
        deadline, waits = look_at_clock(tries, deadline, patience_ns)
    if waits < patience:
        note_failure(table_ptr, state_ptr, sender, call, block, FORM, WORLD)
    tl.store(pointers, tl.full(bits.shape, 0, bits.dtype) + hole, mask=mask)
    return bits, waits


@triton.jit
def wait_for_words(
    pointers, mask, table_ptr, state_ptr, sender, call, block, patience, patience_ns,
    FORM: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    """Read words of 64 bits until all have ``call`` in their upper half. Returns the lower ones, int32, and the
    patience left."""
    pairs = tl.load(pointers, mask=mask, other=0, volatile=True)
    missing = tl.max((mask & ((pairs >> 32).to(tl.int32) != call)).to(tl.int32), axis=0)
    tries, deadline, waits = 0, tl.full((), 0, tl.int64), patience
    while (missing > 0) & (waits > 0):
        pairs = tl.load(pointers, mask=mask, other=0, volatile=True)
        missing = tl.max((mask & ((pairs >> 32).to(tl.int32) != call)).to(tl.int32), axis=0)
        tries += 1
        deadline, waits = look_at_clock(tries, deadline, patience_ns)
    if waits < patience:
        note_failure(table_ptr, state_ptr, sender, call, block, FORM, WORLD)
    return pairs.to(tl.int32), waits
