"""Run by test_warm_up.py in a process of its own: what `warm_up` compiles for an H200 that is not there, as JSON."""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import triton
from torch import Tensor

import fastformer
from benchmarks.host import null_driver
from fastformer.apps.translation.model import translation_loss
from fastformer.apps.translation.search import SearchOptions, greedy_search
from tests.support.translation_task import random_batch, random_model

null_driver.install()
fastformer.set_backend("triton")
compiled: list[str] = []
triton.knobs.runtime.jit_post_compile_hook = lambda **facts: compiled.append(facts["repr"])

model = random_model(d_model=16, heads=2, feed_forward=32, encoder_layers=1, decoder_layers=1, dropout=0.1).train()
model.register_buffer("calls", torch.zeros(()))
batch = random_batch([(5, 7), (9, 3)])
losses: list[float] = []


def training_loss() -> Tensor:
    model.calls += 1
    loss = translation_loss(model, batch, 0.1)
    losses.append(loss.item())
    return loss


def search() -> Any:
    return greedy_search(model.eval(), batch.source, batch.source_lengths, SearchOptions(beam=1, max_length=4))


def facts(step: Callable[[], Any], differentiate: Callable[[Any], None]) -> dict[str, Any]:
    """Warm up twice, then run the step itself."""
    compiled.clear()
    launched, random, calls = null_driver.launched(), torch.get_rng_state(), model.calls.item()
    found: dict[str, Any] = {"kernels": fastformer.warm_up(model, step=step, workers=2), "compiled": len(compiled)}
    found["again"] = fastformer.warm_up(model, step=step, progress=False)
    found["launched"] = null_driver.launched() - launched
    found["gradients"] = sum(parameter.grad is not None for parameter in model.parameters())
    found["restored"] = torch.equal(random, torch.get_rng_state()) and model.calls.item() == calls
    with suppress(FloatingPointError):  # without a GPU, results are whatever was in memory
        differentiate(step())
    found["launched by the step"] = null_driver.launched() - launched
    return found | {"compiled in all": len(compiled)}


print(json.dumps({
    "training": facts(training_loss, lambda loss: loss.backward()) | {"loss": losses[0]},
    "search": facts(search, lambda _: None),
}))  # fmt: skip
