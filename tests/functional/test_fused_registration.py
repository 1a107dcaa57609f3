"""Fused ops go to their launchers directly, and through the dispatcher where a mode or the profiler is active."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastformer import functional
from fastformer.functional import choice

pytestmark = [
    pytest.mark.skipif(not choice._TRITON, reason="needs Triton"),
    pytest.mark.usefixtures("triton_backend"),
]
X = torch.randn(4, 16)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_op():
    with Seen() as seen:
        found = functional.layer_norm(X, 16)
    assert torch.ops.fastformer.layer_norm.default in seen.ops
    assert torch.equal(found, functional.layer_norm(X, 16))


def test_the_profiler_names_the_op():
    with torch.profiler.profile() as profile:
        functional.layer_norm(X, 16)
    assert "fastformer::layer_norm" in {event.name for event in profile.events()}
