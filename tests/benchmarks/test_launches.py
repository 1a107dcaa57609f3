"""The launches of a training step, as `python -m benchmarks.host` counts them: no change may bring many back."""

import re

import pytest
import torch

from benchmarks.host.null_driver import Launches
from tests.support.python import python

MOST = 620  # of the step that CUDA graphs repeat, 6+6 layers in bf16; 570 when this was written
F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.slow
def test_a_step_in_16_bits_launches_few_kernels():
    pytest.importorskip("triton")
    ran = python("-m", "benchmarks.host", "--only", "launches", TRITON_INTERPRET="0")
    assert ran.returncode == 0, ran.stderr[-3000:]
    eager, graphed = (int(number) for number in re.findall(r"^launches.*?(\d+):", ran.stdout, re.MULTILINE))
    assert 400 < graphed <= MOST
    assert 400 < eager <= MOST + 40  # with layouts that are made in the step


def counted(step):
    with Launches() as seen:
        step()
    return seen.aten.total()


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda x: x.view(-1)[:3].t(), 0),
        (lambda x: torch.empty_like(x), 0),
        (lambda x: x.to(BF16), 1),
        (lambda x: x + x, 1),
        (lambda x: x.copy_(x), 1),
        (lambda x: torch.nn.functional.embedding(x.long(), x), 1 + 1),  # an op of ours has the same name
        (lambda x: torch._foreach_copy_([x] * 65, [x.to(BF16)] * 65), 1 + 2),  # 64 tensors a launch
        (lambda x: torch._foreach_add_([x] * 65, [x] * 65), 2),
        (lambda x: torch._foreach_add_([x] * 65, [x.to(BF16)] * 65), 1 + 65),  # no kernel for two dtypes
        (lambda x: torch._foreach_mul_([torch.zeros(321 * 65536)], 2.0), 1 + 2),  # 320 blocks a launch
    ],
)
def test_what_counts(step, expected):
    assert counted(lambda: step(torch.zeros(4, 4))) - 1 == expected  # the first is what is given


def test_a_backward_is_seen():
    x = torch.zeros(4, requires_grad=True)
    assert counted(lambda: (x * 2).sum().backward()) == 2 + 1 + 1  # two products, ones; expand is a view
