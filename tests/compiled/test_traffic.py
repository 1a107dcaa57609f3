"""Sectors and bank conflicts: some kernels held to what is recorded, and kernels that are wrong on purpose."""

import pytest
import torch

triton = pytest.importorskip("triton")
from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tests.compiled import traffic
from tests.compiled.ptx.driver import session
from tests.compiled.traffic import CASES, figures, measure, worse
from tests.support.fused_op import needs_compiled

# The others are in `make traffic`: all take 70 s of a core for one GPU, nine tenths of them Triton's compilations.
PART = ["attention 64 bf16", "attention 64 bf16 decoding", "layer_norm 512 bf16", "feed_forward gelu 2048 bf16"]
PART += ["embedding 512 bf16", "linear_cross_entropy 4096 bf16"]


@triton.jit
def copy_strided(x_ptr, y_ptr, STRIDE: tl.constexpr):
    at = tl.arange(0, 128)
    tl.store(y_ptr + at, tl.load(x_ptr + at * STRIDE))


@gluon.jit
def transpose(x_ptr, y_ptr, PHASES: gl.constexpr):
    """A tile of 32 x 32 written in rows to shared memory, and read in columns: swizzled in PHASES, or not with 1."""
    in_rows: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    in_columns: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
    rows, columns = gl.arange(0, 32, gl.SliceLayout(1, in_rows)), gl.arange(0, 32, gl.SliceLayout(0, in_rows))
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], gl.SwizzledSharedLayout(1, 1, PHASES, [1, 0]))
    tile.store(gl.load(x_ptr + rows[:, None] * 32 + columns[None, :]))
    rows, columns = gl.arange(0, 32, gl.SliceLayout(1, in_columns)), gl.arange(0, 32, gl.SliceLayout(0, in_columns))
    gl.store(y_ptr + columns[None, :] * 32 + rows[:, None], tile.load(in_columns))


@needs_compiled
@pytest.mark.parametrize(("stride", "sectors"), [(1, 1.0), (2, 1.5), (8, 4.5)])
def test_strided_loads_take_more_sectors(stride, sectors):
    """Of 16 sectors for the load and 16 for the store, the load takes `stride` times as many, up to one a number."""
    x, y = torch.randn(128 * stride), torch.zeros(128)
    found = measure(session, lambda: copy_strided[(1,)](x, y, stride) and y)
    assert torch.equal(y, x[::stride])
    assert figures(found)["copy_strided"][0] == sectors


@needs_compiled
@pytest.mark.parametrize(("phases", "conflicts"), [(1, 32), (4, 8), (32, 1)])
def test_columns_of_a_tile_that_is_not_swizzled_conflict(phases, conflicts):
    x, y = torch.randn(32, 32), torch.zeros(32, 32)
    found = measure(session, lambda: transpose[(1,)](x, y, phases, num_warps=4) and y)
    assert torch.equal(y, x.T)
    assert max(t.ratio for place, t in found.items() if place.space == "shared") == conflicts
    assert all(t.ratio == 1 for place, t in found.items() if place.space == "global")


@needs_compiled
@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize("name", PART)
def test_no_kernel_is_worse_than_recorded(name):
    recorded = traffic.read(session.arch)
    if not recorded:
        pytest.skip("nothing is recorded for this Triton and GPU")
    assert list(worse(figures(measure(session, CASES[name])), recorded[name])) == []


def test_what_is_worse_or_not_recorded_is_reported():
    recorded = {"k": (1.0, 512.0, 1.0)}
    assert list(worse({"k": (1.0, 512.0, 1.0)}, recorded)) == []
    assert list(worse({"k": (1.1, 256.0, 8.0)}, recorded)) == [
        "k: sectors over needed 1.0 -> 1.1",
        "k: bytes of a request 512.0 -> 256.0",
        "k: wavefronts over needed 1.0 -> 8.0",
    ]
    assert list(worse(recorded, {})) == ["k: not recorded"]
    assert list(worse({}, recorded)) == ["k: recorded, and not launched"]
