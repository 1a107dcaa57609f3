"""Adapters, checkpoint wrappers and sharded parameters: packed, or padded where they replace a module.

Letters: B batch, L positions, S sources, D model width.
"""

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
)

import fastformer
from fastformer.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer
from tests.nn.layer_cases import build
from tests.support.closeness import assert_close, random
from tests.support.masks import right
from tests.support.processes import leave, run_two, two_of_gloo

B, L, S, D = 3, 6, 5, 16
HIDDEN, SOURCE_HIDDEN = right([6, 2, 4], L), right([1, 5, 3], S)
CAUSAL = torch.ones(L, L, dtype=torch.bool).triu(1)


class Model(nn.Module):
    """A decoder of torch.nn with an encoder's name, as adapters and wrappers find them."""

    def __init__(self, kind: str = "decoder") -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"d_model": D, "nhead": 2, "dim_feedforward": 24}
        self.stack: Any = build(nn, f"Transformer{kind.capitalize()}", norm=False, **sizes)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        if isinstance(self.stack, nn.TransformerEncoder):
            return self.stack(x, CAUSAL, HIDDEN)
        return self.stack(x, memory, CAUSAL, None, HIDDEN, SOURCE_HIDDEN)  # type: ignore[no-any-return]


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the numbers of tokens that layers compute packed."""
    counts: list[int] = []
    for cls in (TransformerEncoderLayer, TransformerDecoderLayer):
        compose = cls.compose

        def composed(self: Any, x: Tensor, *attentions: Any, compose: Any = compose) -> Tensor:
            if x.dim() == 2:
                counts.append(len(x))
            return compose(self, x, *attentions)  # type: ignore[no-any-return]

        monkeypatch.setattr(cls, "compose", composed)
    return counts


def results(model: nn.Module) -> list[Tensor]:
    """Return the outputs at real positions, and all gradients."""
    torch.manual_seed(1)
    x, memory = random(B, L, D), random(B, S, D)
    model.zero_grad()
    out = model(x, memory)[~HIDDEN]
    out.pow(3).sum().backward()
    memories = [memory.grad] if memory.grad is not None else []
    return [out.detach(), x.grad, *memories, *(p.grad for p in model.parameters() if p.requires_grad)]  # type: ignore[list-item]


def wrap_layers(model: Model, wrap: Callable[[nn.Module], nn.Module]) -> None:
    model.stack.layers = nn.ModuleList(wrap(layer) for layer in model.stack.layers)


def _wrap_attention(model: Model) -> None:
    for layer in model.stack.layers:
        layer.self_attn = checkpoint_wrapper(layer.self_attn)


WRAPPED: dict[str, tuple[str, Callable[[Model], None]]] = {
    "checkpoints": ("layers.0 is a CheckpointWrapper", lambda model: wrap_layers(model, checkpoint_wrapper)),
    "reentrant checkpoints": (
        "layers.0 is a CheckpointWrapper",
        lambda model: wrap_layers(model, lambda layer: checkpoint_wrapper(layer, CheckpointImpl.REENTRANT)),
    ),
    "offloading": ("layers.0 is a OffloadWrapper", lambda model: wrap_layers(model, offload_wrapper)),
    "checkpoints of attention": ("layers.0.self_attn is a CheckpointWrapper", _wrap_attention),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("order", ["wrapped, converted", "converted, wrapped"])
def test_wrapped_layers_and_attention_run_padded_with_torchs_numbers(
    kind: str, wrapper: str, order: str, packed: list[int]
) -> None:
    torchs, model = Model(kind), Model(kind)
    reason, wrap = WRAPPED[wrapper]
    for step in order.split(", "):
        wrap(model) if step == "wrapped" else fastformer.convert(model)
    assert model.stack.obstacle() == reason
    assert_close(results(model), results(torchs), roundings=1e3)
    assert not packed
    with pytest.raises(RuntimeError, match=f"^{reason}, which decoding with a cache does not call"):
        model.stack.new_cache(B) if kind == "encoder" else model.stack.new_cache(random(B, S, D))


def adapt(peft: Any, model: nn.Module, targets: str | list[str]) -> Any:
    """Return a model with PEFT's adapters, whose weights are random."""
    config = peft.LoraConfig(target_modules=targets, r=2, init_lora_weights=False, lora_dropout=0.0)
    adapted = peft.get_peft_model(model, config).to(torch.float64)
    torch.manual_seed(3)
    for name, x in adapted.named_parameters():
        if "lora" in name:
            x.data = 0.1 * torch.randn(x.shape, dtype=torch.float64)
    return adapted


def assert_adapters_learn(adapted: nn.Module) -> None:
    gradients = [x.grad for name, x in adapted.named_parameters() if "lora" in name]
    assert gradients
    assert all(grad is not None and bool(grad.any()) for grad in gradients)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("targets", "order"),
    [
        (["linear1"], "adapted, converted"),
        (["out_proj"], "converted, adapted"),
        (["multihead_attn"], "converted, adapted"),
        ("all-linear", "converted, adapted"),
        (["linear1", "self_attn"], "adapted, converted"),
    ],
    ids=str,
)
def test_lora_changes_the_output_learns_and_equals_its_merged_weights(
    targets: str | list[str], order: str, packed: list[int]
) -> None:
    """Adapters of attention run padded, others packed and with a cache."""
    peft = pytest.importorskip("peft")
    model: nn.Module = Model()
    for step in order.split(", "):
        if step == "adapted":
            model = adapt(peft, model, targets)
        else:
            fastformer.convert(model)
    stack = model.base_model.model.stack
    has_obstacle = stack.obstacle() is not None
    assert has_obstacle == any("attn" in target for target in targets)
    outputs = results(model)
    assert bool(packed) != has_obstacle
    assert not torch.allclose(outputs[0], results(Model())[0], atol=1e-3)
    assert_adapters_learn(model)
    merged = copy.deepcopy(model).merge_and_unload()
    x, memory = random(B, L, D), random(B, S, D)
    for mode in (True, False):  # torch's own fast path in evaluation drops adapters of linear1 and linear2
        model.train(mode)
        merged.train(mode)
        with torch.no_grad():
            assert_close(model(x, memory)[~HIDDEN], merged(x, memory)[~HIDDEN], roundings=1e3)
            if has_obstacle:
                with pytest.raises(RuntimeError, match="attn is a MultiheadAttention, which decoding with a cache"):
                    stack.new_cache(memory)
            else:
                steps = [each.step(x, each.new_cache(memory)) for each in (stack, merged.stack)]
                assert_close(*steps, roundings=1e3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_merged_adapters_of_attention_learn(kind: str) -> None:
    """PEFT detaches merged weights when the modules of its attention are listed, which inspecting a stack does not."""
    peft = pytest.importorskip("peft")
    model = Model(kind)
    fastformer.convert(model)
    adapted = adapt(peft, model, ["self_attn"])
    adapted.merge_adapter()
    adapted(random(B, L, D), random(B, S, D))[~HIDDEN].pow(3).sum().backward()
    assert_adapters_learn(adapted)


def sharded(rank: int, folder: str) -> None:
    """Two processes, each with the same batch: gradients of sharded and of tensor-parallel layers are those of one."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    two_of_gloo(rank, folder)
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for kind, recomputed in itertools.product(("encoder", "decoder"), (False, True)):
        expected = results(Model(kind))
        model = Model(kind)
        fastformer.convert(model)
        model.stack.checkpoint_activations = recomputed
        for layer in model.stack.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert model.stack.obstacle() is None, model.stack.obstacle()
        gathered = [x.full_tensor() if isinstance(x, DTensor) else x for x in results(model)]
        assert_close(gathered, expected, roundings=1e3)
        model.stack.layers[0].register_forward_hook(lambda module, args, out: None)
        assert model.stack.obstacle() == "layers.0 has hooks"
    for kind in ("encoder", "decoder"):
        model = Model(kind)
        fastformer.convert(model)
        for layer in model.stack.layers:
            parallelize_module(layer, mesh, {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()})
        gathered = [x.full_tensor() if isinstance(x, DTensor) else x for x in results(model)]
        assert_close(gathered, results(Model(kind)), roundings=1e3)
        assert model.stack.obstacle() == "layers.0.linear1 has hooks"
    leave(rank, folder)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_layers_that_gather_their_own_parameters_run_packed(tmp_path: Path) -> None:
    run_two(sharded, tmp_path)
