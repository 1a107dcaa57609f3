"""Every registered op against torch's opcheck, with the arguments of real calls."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastformer
from fastformer import functional
from fastformer.host.autograd_function import LAUNCHERS
from fastformer.packing import Layout
from tests.support.closeness import gradients
from tests.support.fused_calls import CALLS, leaves, tensors
from tests.support.fused_op import DEVICE, needs_kernels

N = 5


class OpCalls(TorchDispatchMode):
    """Keeps the arguments of each registered op, once for each choice of dtypes, settings and given tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: dict[str, dict[tuple[object, ...], tuple[object, ...]]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fastformer":
            given = tuple(x.detach() if isinstance(x, Tensor) else x for x in args)
            key = tuple((x.dtype, x.dim()) if isinstance(x, Tensor) else str(x) for x in given)
            self.arguments.setdefault(func.overloadpacket.__name__, {}).setdefault(key, given)
        return func(*args, **(kwargs or {}))


def attend(op, *options: Tensor, shapes=((2, 2, 5, 16), (2, 1, 7, 16), (2, 1, 7, 24)), **settings) -> None:
    """Two query heads of one key head, values of a head size of their own; options that are trained, and others."""
    inputs = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes]
    outputs = tensors(op(*inputs, *options, **settings))
    gradients(outputs, [*inputs, *(x for x in options if x.requires_grad)])


@pytest.fixture(scope="module")
def op_calls() -> dict[str, list[tuple[object, ...]]]:
    """The arguments of every registered op in calls of all ops, with other options, and of other gradients."""
    layout, key_layout = (Layout.from_lengths(lengths, DEVICE) for lengths in ([5, 3], [4, 3]))
    lengths = torch.tensor([5, 0], device=DEVICE)
    with fastformer.backend("triton"), OpCalls() as seen:
        for op, call in CALLS.items():
            extra = call.extra(N, DEVICE)
            inputs = leaves(op, N, DEVICE)
            # All gradients in 16 bits and with dropout, then each alone.
            for expected in (range(len(inputs)), *([i] for i in range(len(inputs)))):
                dtype, p = (torch.float32, 0.0) if len(expected) == 1 else (torch.float16, 0.5 if call.dropout else 0.0)
                given = [x.detach().to(dtype).requires_grad_(i in expected) for i, x in enumerate(inputs)]
                gradients(tensors(call.call(extra, p, *given)), [given[i] for i in expected])
        mask = torch.randn(5, 7, device=DEVICE, requires_grad=True)
        attend(functional.attention, mask, dropout_p=0.1, key_lengths=lengths, causal=True)
        attend(functional.attention_with_weights, mask, window=(2, 1))
        packed = {"shapes": ((8, 2, 16), (7, 1, 16), (7, 1, 24)), "layout": layout, "key_layout": key_layout}
        attend(functional.packed_attention, **packed, causal=True)
        with torch.no_grad():
            q, k = (torch.randn(2, 2, n, 16, device=DEVICE) for n in (1, 7))
            functional.attention(q, k, k, key_lengths=lengths)
        x, ids = torch.randn(4, 16, device=DEVICE), torch.arange(4, device=DEVICE)
        functional.embedding(ids, x)
        functional.layer_norm(x, 16)
        functional.rms_norm(x, 16)
        functional.dropout_add_layer_norm(x, x.half(), 16)
        w1, w2 = torch.randn(32, 16, device=DEVICE, requires_grad=True), torch.randn(16, 32, device=DEVICE)
        for activation, recompute in (("relu", False), ("gelu", True)):
            gradients(functional.feed_forward(x, w1, None, w2, None, activation=activation, recompute=recompute), [w1])
        gradients(functional.feed_forward(x, w1, None, w2[:, :16], None, activation="geglu", dropout_p=0.5), [w1])
        gradients(functional.linear_cross_entropy(x, w1, ids, reduction="none"), [w1])
    return {op: [*calls.values()] for op, calls in seen.arguments.items()}


@needs_kernels
@pytest.mark.parametrize("name", LAUNCHERS)
def test_registered_ops_pass_opcheck(name, op_calls):
    """Of the first call what torch.compile makes of it too; of all the schema, and the results' shapes and dtypes."""
    op, utils = getattr(torch.ops.fastformer, name).default, {"test_utils": ("test_schema", "test_faketensor")}
    for i, arguments in enumerate(op_calls[name]):
        # Rows of the gradient of a mask end with columns that are not written: no two results are equal.
        everything = i == 0 and name != "attention_mask_gradient"
        torch.library.opcheck(op, arguments, **({} if everything else utils))
