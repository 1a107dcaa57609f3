"""Casts and dropout seeds of a training step: parameters cast together have the bits of autocast's own casts."""

import contextlib
import copy
import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fastformer
from fastformer import backend, functional
from fastformer.apps.train import Processes, TrainConfig
from fastformer.apps.train.update import Update
from fastformer.apps.translation.model import translation_loss
from fastformer.host.autocast import cast_parameters_together
from fastformer.host.autograd_function import draw_seeds_together, dropout_seed
from tests.support import translation_task
from tests.support.fused_op import DEVICE, needs_kernels
from tests.support.translation_task import random_batch

BF16 = torch.bfloat16
LOSS = functools.partial(translation_loss, label_smoothing=0.1)
BATCHES = [random_batch([(3, 2), (1, 4)]), random_batch([(5, 5)], seed=1)]
CONFIG = TrainConfig(steps=1, precision="bf16")
random_model = functools.partial(translation_task.random_model, encoder_layers=1, decoder_layers=1)


def gradients(model, together):
    """Return the gradients of two batches, added up, and how many ops cast a list."""
    update = Update(copy.deepcopy(model), LOSS, CONFIG, Processes.current())
    assert update._cast
    if not together:
        update._cast = []
    torch.manual_seed(0)
    with torch.profiler.profile() as profile:
        update.gradients(BATCHES)
    casts = sum(event.name == "aten::_foreach_copy_" for event in profile.events())
    return [p.grad for p in update.parameters], casts


@pytest.mark.parametrize(
    ("changes", "implementation"),
    [
        ({}, "reference"),
        ({"embeddings": "separate", "output_bias": True, "norm_first": False}, "reference"),
        pytest.param({"dropout": 0.3, "bias": False}, "triton", marks=[needs_kernels, pytest.mark.slow]),
    ],
    ids=str,
)
def test_gradients_have_the_bits_of_autocast(changes, implementation):
    model = random_model(**changes).train().to(DEVICE)
    model.decoder.checkpoint_activations = "embeddings" in changes
    with backend(implementation):
        (actual, casts), (expected, casts_of_autocast) = (gradients(model, together) for together in (True, False))
    assert (casts, casts_of_autocast) == (4, 0)  # forward and backward of each batch
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == torch.float32
        assert torch.equal(x, y)


def clamp_in_place(module, args):
    for p in module.parameters():
        p.data.clamp_(-0.05, 0.05)


def replace_data(module, args):
    for p in module.parameters():
        p.data = p.data.clamp(-0.05, 0.05)


def loss_that_freezes_the_encoder(model, batch):
    model.encoder.requires_grad_(False)
    loss = LOSS(model, batch)
    model.encoder.requires_grad_(True)
    return loss


def loss_with_a_penalty_on_gradients(model, batch):
    loss = LOSS(model, batch)
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + sum(x.pow(2).sum() for x in grads)


@pytest.mark.parametrize(
    ("loss", "place", "hook"),
    [
        (LOSS, "", clamp_in_place),
        (LOSS, "decoder.layers.0", replace_data),
        (loss_that_freezes_the_encoder, "", None),
        (loss_with_a_penalty_on_gradients, "", None),
    ],
)
def test_hooks_and_losses_of_users_see_the_parameters(loss, place, hook):
    """Parameters written through `.data`, frozen, or differentiated twice, against autocast's own casts."""
    model = random_model().train().to(DEVICE)
    if hook is not None:
        model.get_submodule(place).register_forward_pre_hook(hook)
    other, batch = copy.deepcopy(model), BATCHES[0].to(DEVICE)
    Update(model, loss, CONFIG, Processes()).gradients([batch])
    with torch.autocast(DEVICE, BF16):
        value = loss(other, batch)
    (value / batch.tokens).backward()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert (p.grad is q.grad is None) or torch.equal(p.grad, q.grad)


def test_modules_hold_copies_within_the_forward_pass_alone():
    linear = torch.nn.Linear(3, 4, device=DEVICE)
    linear.bias.requires_grad_(False)
    attention = fastformer.MultiheadAttention(8, 2, sinks=True, device=DEVICE)
    modules = [linear, attention]
    before = [dict(module.named_parameters(recurse=False)) for module in modules]
    with contextlib.suppress(KeyError), cast_parameters_together(modules, BF16):
        assert torch.equal(linear.weight, before[0]["weight"].to(BF16))
        assert attention.in_proj_weight.dtype == BF16
        assert linear.bias is before[0]["bias"]  # has no gradient
        assert attention.sinks is before[1]["sinks"]  # is in no matrix product
        raise KeyError
    for module, parameters in zip(modules, before, strict=True):
        assert all(getattr(module, name) is p for name, p in parameters.items())


def test_seeds_drawn_together_are_distinct_and_follow_manual_seed():
    x, runs = torch.zeros(1, device=DEVICE), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        with draw_seeds_together():
            seeds = [dropout_seed(x) for _ in range(100)]
        assert all(s.shape == (1,) and s.dtype == torch.int64 and s.data_ptr() % 16 == 0 for s in seeds)
        runs.append([int(s) for s in seeds])
    assert runs[0] == runs[1]
    assert not set(runs[0]) & set(runs[2])
    assert len(set(runs[0])) == 100


@needs_kernels
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True], ids=["the loop draws together", "the layers draw together"])
def test_recomputation_drops_the_same_elements(inside, reentrant):
    """The gradient of dropout(x) is 0 where dropout made 0; with another mask it would not be."""

    def dropped(x):
        with backend("triton"), draw_seeds_together() if inside else contextlib.nullcontext():
            return functional.dropout_add_layer_norm(x, torch.zeros_like(x), 32, dropout_p=0.5)[1] ** 2

    x = torch.ones(8, 32, device=DEVICE).requires_grad_()
    with draw_seeds_together():
        dropout_seed(x)
        y = checkpoint(dropped, x, use_reentrant=reentrant)
    y.sum().backward()
    assert torch.equal(y == 0, x.grad == 0)
    assert 0 < int((y == 0).sum()) < y.numel()


@needs_kernels
@pytest.mark.slow
def test_a_loss_that_seeds_twice_draws_the_same_dropout_twice():
    differences = []

    def loss(model, batch):
        losses = []
        for _ in range(2):
            torch.manual_seed(7)
            losses.append(translation_loss(model, batch))
        differences.append((losses[0] - losses[1]).item())
        return sum(losses)

    update = Update(random_model(dropout=0.5).train().to(DEVICE), loss, TrainConfig(steps=1), Processes())
    with backend("triton"):
        update.gradients(BATCHES[:1])
    assert differences == [0.0]
