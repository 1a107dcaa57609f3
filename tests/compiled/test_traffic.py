"""Sectors and bank conflicts: some kernels held to what is recorded."""

import pytest

pytest.importorskip("triton")

from tests.compiled import traffic
from tests.compiled.ptx.driver import session
from tests.compiled.traffic import CASES, figures, measure, worse
from tests.support.fused_op import needs_compiled

# The others are in `make traffic`: all take 70 s of a core for one GPU, nine tenths of them Triton's compilations.
PART = ["attention 64 bf16", "attention 64 bf16 decoding", "layer_norm 512 bf16", "feed_forward gelu 2048 bf16"]
PART += ["embedding 512 bf16", "linear_cross_entropy 4096 bf16"]


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
