"""`warm_up` compiles the kernels that a step launches, and changes nothing else.

The test runs this file in a process of its own, where kernels are compiled for an H200 that is not there, and reads the
facts that it prints as JSON.
"""

import json
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastformer
from tests.support.python import python

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    pytest.importorskip("triton")
    cache = tmp_path_factory.mktemp("cache")
    process = python("-m", "tests.functional.test_warm_up", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(cache))
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout) | {"progress": process.stderr, "cached": len([*cache.glob("*/*.cubin")])}


def test_a_step_compiles_nothing_after_it(facts):
    assert facts["kernels"] == facts["compiled"] == facts["compiled in all"] == facts["cached"] > 5
    assert facts["again"] == 0
    assert facts["launched by the step"] > 5
    assert "{0} of {0} kernels compiled\n".format(facts["kernels"]) in facts["progress"]


def test_kernels_are_not_started_and_the_model_is_restored(facts):
    assert facts["launched"] == facts["gradients"] == 0
    assert facts["restored"]
    assert facts["loss"] == 0.0  # what kernels would write is 0


def facts_of_a_training_step() -> dict[str, Any]:
    """Warm up a training step twice, then run it."""
    import triton

    from benchmarks.host import null_driver

    null_driver.install()
    fastformer.set_backend("triton")
    compiled: list[str] = []
    losses: list[float] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **facts: compiled.append(facts["repr"])
    network = nn.Sequential(fastformer.FeedForward(16, 32, 0.1), fastformer.LayerNorm(16))
    model = nn.ModuleList([network, fastformer.LinearCrossEntropy(16, 8)])
    model.register_buffer("calls", torch.zeros(()))
    x, target = torch.randn(9, 16), torch.arange(9) % 8

    def step() -> Tensor:
        model.calls += 1
        loss = model[1](network(x), target)
        losses.append(loss.item())
        return loss

    launched, random = null_driver.launched(), torch.get_rng_state()
    facts: dict[str, Any] = {"kernels": fastformer.warm_up(model, step=step, workers=2), "compiled": len(compiled)}
    facts["again"] = fastformer.warm_up(model, step=step, progress=False)
    facts["launched"] = null_driver.launched() - launched
    facts["gradients"] = sum(parameter.grad is not None for parameter in model.parameters())
    facts["restored"] = torch.equal(random, torch.get_rng_state()) and model.calls.item() == 0
    facts["loss"] = losses[0]
    with suppress(FloatingPointError):  # without a GPU, results are whatever was in memory
        step().backward()
    facts["launched by the step"] = null_driver.launched() - launched
    return facts | {"compiled in all": len(compiled)}


if __name__ == "__main__":
    print(json.dumps(facts_of_a_training_step()))
