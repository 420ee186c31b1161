"""No Hopper kernel writes outside its outputs: their memory lies between guards, which must come back as they were.

The allocator hands out the best fitting free piece. Pieces of an output's size are allocated side by side, every second
one is given back, and the output is expected in one of the gaps. compute-sanitizer sees more
(tests/support/kernels/calls.py).
"""

import jax
import numpy as np
import pytest

from tests.support.kernels.calls import small_calls

pytestmark = pytest.mark.gpu

GUARD = 0xA5
ALIGNED = 256  # bytes; the allocator's granularity


def allocate(size):
    return jax.block_until_ready(jax.device_put(np.full(size, GUARD, np.uint8)))


@pytest.mark.parametrize("name", small_calls())
def test_guards_around_outputs_stay(name):
    function, arguments = small_calls()[name]()
    call = jax.jit(function).lower(*arguments).compile()
    outputs = jax.tree.leaves(call.out_info)
    sizes = sorted({-(-leaf.size * leaf.dtype.itemsize // ALIGNED) * ALIGNED for leaf in outputs})
    guards, gaps = [], set()
    for size in sizes:
        pieces = [allocate(size) for _ in range(2 * len(outputs) + 8)]
        gaps |= {piece.unsafe_buffer_pointer() for piece in pieces[1::2]}
        guards += pieces[::2]
        del pieces
    leaves = jax.tree.leaves(jax.block_until_ready(call(*arguments)))
    for guard in guards:
        assert (np.asarray(guard) == GUARD).all(), f"{name} wrote past an output"
    assert any(leaf.unsafe_buffer_pointer() in gaps for leaf in leaves), "no output lay between guards"
