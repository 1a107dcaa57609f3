"""What torch.fx and torch.jit.script make of models with our modules: what they could before, or a word on how."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastformer

BLOCKS = {
    "feed-forward": nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)),
    "layer norm": nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)),
    "rms norm": nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)),
}
MODELS = {
    **BLOCKS,
    "attention": nn.MultiheadAttention(8, 2),
    "layer": nn.TransformerEncoderLayer(8, 2, 16),
    "decoder layer": nn.TransformerDecoderLayer(8, 2, 16),
    "stack": nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
    "decoder": nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 2),
    "transformer": nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
}


def converted(model: nn.Module) -> nn.Module:
    ours = copy.deepcopy(model).eval()
    fastformer.convert(ours)
    assert any(type(module).__module__.startswith("fastformer") for module in ours.modules())
    return ours


@pytest.mark.parametrize("block", BLOCKS)
def test_fx_traces_what_it_traced_before(block: str) -> None:
    x, ours = torch.randn(3, 8), converted(BLOCKS[block])
    traced = torch.fx.symbolic_trace(ours)
    torch.testing.assert_close(traced(x), BLOCKS[block](x))
    assert list(traced.state_dict()) == list(ours.state_dict())


class Around(nn.Module):
    """A model with such a part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.last = nn.ModuleList([part]), nn.Linear(8, 8)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        (part,) = self.part
        if isinstance(part, nn.MultiheadAttention):
            x = part(x, x, x, key_padding_mask=hidden)[0]
        elif isinstance(part, nn.TransformerEncoder | nn.TransformerEncoderLayer):
            x = part(x, src_key_padding_mask=hidden)
        elif isinstance(part, nn.Transformer):
            x = part(x, x, src_key_padding_mask=hidden, memory_key_padding_mask=hidden)
        elif isinstance(part, nn.TransformerDecoder | nn.TransformerDecoderLayer):
            x = part(x, x, tgt_key_padding_mask=hidden)
        else:
            x = part(x)
        return self.last(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("model", MODELS)
def test_fx_writes_down_a_part_as_a_call_of_it(model: str) -> None:
    ours = converted(Around(MODELS[model]))
    traced = torch.fx.symbolic_trace(ours)
    x, hidden = torch.randn(3, 3, 8), torch.ones(3, 3).triu(1) > 0
    torch.testing.assert_close(traced(x, hidden), ours(x, hidden), rtol=0, atol=0)
    assert list(traced.state_dict()) == list(ours.state_dict())
    theirs = torch.fx.symbolic_trace(Around(MODELS[model]))
    if model not in BLOCKS:
        assert [node.target for node in traced.graph.nodes] == [node.target for node in theirs.graph.nodes]


class Doubled(fastformer.TransformerEncoderLayer):
    """Somebody's own forward around ours."""

    def forward(self, src: Tensor, *masks: Tensor | None, **more: Tensor | None) -> Tensor:
        return super().forward(2 * src, *masks, **more)


def _double(module: nn.Module, arguments: tuple[Tensor, ...], out: Tensor) -> Tensor:
    return 2 * out


# What the trace would write down, and the call that is written down do again.
TWICE = {
    "hook": lambda layer: layer.register_forward_hook(_double),
    "pre-hook": lambda layer: layer.register_forward_pre_hook(lambda module, x: 2 * x[0]),
    "forward of the instance": lambda layer: setattr(layer, "forward", lambda x, f=layer.forward, **more: f(2 * x)),
    "forward of a subclass": lambda layer: setattr(layer, "__class__", Doubled),
}


@pytest.mark.parametrize("change", TWICE)
def test_fx_does_nothing_twice(change: str) -> None:
    ours = converted(Around(MODELS["layer"]))
    TWICE[change](ours.get_submodule("part.0"))
    with pytest.raises(torch.fx.proxy.TraceError, match="has hooks or a forward of its own"):
        torch.fx.symbolic_trace(ours)

    class AsCalls(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, nn.TransformerEncoderLayer)

    x, hidden = torch.randn(3, 3, 8), torch.ones(3, 3).triu(1) > 0
    traced = torch.fx.GraphModule(ours, AsCalls().trace(ours))
    torch.testing.assert_close(traced(x, hidden), ours(x, hidden), rtol=0, atol=0)


class Odd(nn.Module):
    """A model whose part gets what is no plain proxy: an attribute of one, or a constant and one."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.constant = part, torch.ones(3, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.part, nn.MultiheadAttention):
            return self.part(self.constant, x, x)[0] + self.part(x.mT, x, x)[0]  # type: ignore[no-any-return]
        if isinstance(self.part, nn.TransformerDecoderLayer | nn.TransformerDecoder | nn.Transformer):
            return self.part(self.constant, x) + self.part(x.mT, self.constant)  # type: ignore[no-any-return]
        return self.part(x.mT)  # type: ignore[no-any-return]


@pytest.mark.parametrize("model", MODELS)
def test_fx_takes_attributes_and_constants(model: str) -> None:
    ours, x = converted(Odd(MODELS[model])), torch.randn(3, 8, 8)
    torch.testing.assert_close(torch.fx.symbolic_trace(ours)(x), ours(x))


@pytest.mark.parametrize("model", MODELS)
def test_what_fx_wrote_down_is_torchs_too(model: str) -> None:
    ours = converted(Around(MODELS[model]))
    traced = torch.fx.symbolic_trace(ours)
    x, hidden = torch.randn(3, 3, 8), torch.zeros(3, 3) > 0
    expected = ours(x, hidden)
    fastformer.revert(ours)
    torch.testing.assert_close(traced(x, hidden), expected)


@pytest.mark.parametrize("block", BLOCKS)
def test_fx_quantises_what_it_quantised_before(block: str) -> None:
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import prepare_fx

    x = torch.randn(3, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that torchao takes its place
        prepared = prepare_fx(converted(BLOCKS[block]), get_default_qconfig_mapping(), (x,))
    torch.testing.assert_close(prepared(x), BLOCKS[block](x))


@pytest.mark.parametrize("model", MODELS)
def test_script_is_told_to_revert_and_then_compiles(model: str) -> None:
    ours = converted(MODELS[model])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        with pytest.raises(TypeError, match=r"torch.jit.script cannot compile fastformer\.\w+: call fastformer.revert"):
            torch.jit.script(nn.Sequential(ours))
        fastformer.revert(ours)
        torch.jit.script(ours)


def traced(part: nn.Module) -> Any:
    return torch.jit.trace(part, torch.randn(3, 8))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(
    ("name", "compiled"),
    [(name, way) for name in ("linear1", "norm1", "self_attn.out_proj") for way in (torch.jit.script, traced)]
    + [("self_attn", torch.jit.script)],
)
def test_a_part_that_was_compiled_by_jit_is_called(name: str, compiled: Any, order: str) -> None:
    x, hidden = torch.randn(2, 3, 8), torch.tensor([[False, False, True], [False] * 3])
    model = copy.deepcopy(MODELS["stack"]).eval()
    expected, part = model(x, src_key_padding_mask=hidden), compiled(copy.deepcopy(model.layers[0].get_submodule(name)))
    if order == "after":
        fastformer.convert(model)
    model.set_submodule(f"layers.0.{name}", part)
    fastformer.convert(model)
    torch.testing.assert_close(model(x, src_key_padding_mask=hidden)[~hidden], expected[~hidden])
    with pytest.raises(RuntimeError, match=r"layers\.0"):
        model.new_cache(2)
