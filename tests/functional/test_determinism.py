"""The same call twice under `torch.use_deterministic_algorithms(True)`: the same bits, forward and backward.

The same run twice from a seed is in `test_train_resume`, the kernels' own order of sums in
`test_fused_attention_backward`.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import fastformer
from fastformer.apps.language.model import language_model_loss
from fastformer.apps.translation.model import translation_loss
from tests.support import language_task, translation_task
from tests.support.closeness import gradients
from tests.support.fused_calls import CALLS, leaves, tensors
from tests.support.fused_op import DEVICE, needs_kernels

BACKENDS = ["reference", pytest.param("triton", marks=needs_kernels)]


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("op", CALLS)
def test_an_op_twice(op: str, dropout_p: float, backend: str) -> None:
    if dropout_p and not CALLS[op].dropout:
        pytest.skip("the op has no dropout")
    n = 37
    inputs, extra = leaves(op, n, DEVICE), CALLS[op].extra(n, DEVICE)
    runs = []
    with fastformer.backend(backend):
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            out = tensors(CALLS[op].call(extra, dropout_p, *inputs))
            runs.append([*out, *gradients(out, inputs)])
    first, second, other = runs
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True)) == (dropout_p == 0.0)


def train(kind: str, seed: int) -> list[Tensor]:
    """Loss and all parameters after a step from a seed, with dropout, label smoothing and clipping."""
    task = translation_task if kind == "translation" else language_task
    settings = {"encoder_layers": 1, "decoder_layers": 1} if kind == "translation" else {"layers": 1}
    model = task.random_model(seed=seed, dropout=0.2, **settings).train().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    lengths = [(5, 3), (1, 4)] if kind == "translation" else [5, 0, 1]
    batch = task.random_batch(lengths).to(DEVICE)  # type: ignore[arg-type]
    loss = (translation_loss if kind == "translation" else language_model_loss)(model, batch, 0.1) / batch.tokens
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return [loss.detach(), *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["translation", "language"])
def test_a_training_step_twice(kind: str, backend: str) -> None:
    with fastformer.backend(backend):
        first, second = train(kind, 1), train(kind, 1)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with fastformer.backend("reference"):
        assert not torch.equal(first[0], train(kind, 2)[0])
