"""What somebody puts into a packed model of Hugging Face's sees batches: forwards of his own, other parts, wrappers."""

import functools

import pytest
import torch

pytest.importorskip("transformers")

from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP

from fastformer.integrations.transformers import padded, padding_free
from tests.integrations.test_packed_models import assert_same, outcome
from tests.integrations.tiny_transformers import ROUNDINGS, batch, count_packed, tiny
from tests.support.closeness import assert_close


@pytest.fixture
def seen(monkeypatch):
    return count_packed(monkeypatch)


def with_first_position_changed(forward):
    """A forward that changes the first position of each row, which packed tokens have once."""

    @functools.wraps(forward)
    def changed(*args, **kwargs):
        output = forward(*args, **kwargs)
        first, *others = output if isinstance(output, tuple) else (output,)
        first = torch.cat([first[:, :1] + 1, first[:, 1:]], 1)
        return (first, *others) if isinstance(output, tuple) else first

    return changed


class Around(nn.Module):
    """A module around another."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return with_first_position_changed(self.inner)(*args, **kwargs)


def patch(model, path):
    part = model.get_submodule(path)
    part.forward = with_first_position_changed(part.forward)


def replace(model, path):
    model.set_submodule(path, Around(model.get_submodule(path)))


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(
    ("change", "path"),
    [
        (patch, ""),
        *((change, path) for path in (".mlp", ".self_attn", ".mlp.down_proj") for change in (patch, replace)),
    ],
)
def test_what_is_put_into_a_layer_sees_batches(change, path, order, seen):
    found, inputs = [], batch("llama", "right")
    for pack in (False, True):
        model = tiny("llama", "eager")
        if pack and order == "after":
            assert padding_free(model).packed
        change(model, f"model.layers.1{path}")
        if pack and order == "before":
            padding_free(model)
        found.append(outcome(model, inputs))
    assert_same(found[1], found[0])
    assert len(seen) == (0 if change is replace and order == "before" else len(model.model.layers) - 1)


def test_a_forward_put_into_a_class(monkeypatch, seen):
    monkeypatch.setattr(LlamaMLP, "forward", with_first_position_changed(LlamaMLP.forward))
    inputs = batch("llama", "left")
    expected = outcome(tiny("llama", "eager"), inputs)
    model = tiny("llama", "eager")
    padding_free(model)
    assert_same(outcome(model, inputs), expected)
    assert not seen


def test_a_module_put_around_a_layer_raises_and_is_padded_the_next_time(seen):
    found, inputs = [], batch("llama", "right")
    for pack in (False, True):
        model = tiny("llama", "eager")
        if pack:
            padding_free(model)
        replace(model, "model.layers.1")
        if pack:
            with pytest.raises(RuntimeError, match="layer 1 of LlamaModel is a Around around one that runs packed"):
                model(**inputs)
            seen.clear()
            assert not padding_free(model).packed
        found.append(outcome(model, inputs))
    assert_same(found[1], found[0])
    assert not seen


def test_undone_within_a_module_that_was_put_around_the_first_layer(seen):
    model = tiny("llama", "eager")
    padding_free(model)
    replace(model, "model.layers.0")
    padded(model)
    model(**batch("llama", "right"))
    assert not seen


def first_position_changed(module, args):
    return (with_first_position_changed(lambda x: x)(args[0]), *args[1:])


@pytest.mark.parametrize("prepend", [False, True])
@pytest.mark.parametrize("index", [0, 1])
def test_hooks_that_were_there_before(index, prepend, seen):
    found, inputs = [], batch("llama", "right")
    for pack in (False, True):
        model = tiny("llama", "eager", num_hidden_layers=3)
        model.model.layers[index].register_forward_pre_hook(first_position_changed, prepend=prepend)
        if pack:
            padding_free(model)
        found.append(outcome(model, inputs))
    assert_same(found[1], found[0])
    assert len(seen) == 2


def test_a_hook_that_is_put_before_all_others_raises_until_it_is_packed_again(seen):
    found, inputs = [], batch("llama", "right")
    for pack in (False, True):
        model = tiny("llama", "eager", num_hidden_layers=3)
        if pack:
            padding_free(model)
        model.model.layers[1].register_forward_pre_hook(first_position_changed, prepend=True)
        if pack:
            with pytest.raises(RuntimeError, match="before all others of a LlamaDecoderLayer"):
                model(**inputs)
            seen.clear()
            padding_free(model)
        found.append(outcome(model, inputs))
    assert_same(found[1], found[0])
    assert len(seen) == 2


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("which", ["layers.0.", "layers.1.", "layers.2."])
def test_many_parameters_of_one_layer_at_once(which, seen):
    """Layers behind it get what stands for many under vmap, though their masks do not: they run padded."""
    found, inputs = [], batch("llama", "right")
    del inputs["labels"]
    for pack in (False, True):
        model = tiny("llama", "eager", num_hidden_layers=3)
        if pack:
            padding_free(model)
        parameters = {name: x.detach() for name, x in model.named_parameters()}
        two = {name: torch.stack([x, 1.1 * x]) for name, x in parameters.items() if which in name}

        def run(its, model=model, parameters=parameters):
            return torch.func.functional_call(model, {**parameters, **its}, (), {**inputs, "use_cache": False}).logits

        found.append(torch.func.vmap(run)(two)[:, inputs["attention_mask"].bool()])
    assert_close(found[1], found[0], ROUNDINGS)
    assert seen


class Changing(nn.Module):
    """Something to call, whose forward changes the first position of each row."""

    forward = staticmethod(with_first_position_changed(lambda x, *_: x))


def with_hook_of_accelerate(layer):
    hooks = pytest.importorskip("accelerate.hooks")

    class Hook(hooks.ModelHook):
        def post_forward(self, module, output):
            return with_first_position_changed(lambda: output)()

    hooks.add_hook_to_module(layer.mlp, hooks.SequentialHook(Hook()))


def with_torchs_function_around(layer):
    own = with_first_position_changed(layer.mlp.forward)
    layer.mlp.forward = functools.partial(torch.utils.checkpoint.checkpoint, own, use_reentrant=False)


def with_closure_of_torch(layer):
    layer.mlp.forward = torch.no_grad()(functools.partial(with_first_position_changed(layer.mlp.forward)))


def with_called_instance(layer):
    layer.mlp.forward = Changing()


def with_another_method(layer):
    its = layer.input_layernorm
    its._call_impl = with_first_position_changed(its._call_impl)


@pytest.mark.parametrize(
    "change",
    [
        with_hook_of_accelerate,
        with_torchs_function_around,
        with_closure_of_torch,
        with_called_instance,
        with_another_method,
    ],
)
def test_forwards_that_hold_what_is_somebodys(change, seen):
    found, inputs = [], batch("llama", "right")
    for pack in (False, True):
        model = tiny("llama", "eager")
        if pack:
            padding_free(model)
        change(model.model.layers[1])
        found.append(outcome(model, inputs))
    assert_same(found[1], found[0])
    assert len(seen) == 1


def with_first_row_doubled(function):
    """A function whose outputs are others in the first row, which packed tokens have alone."""
    return lambda *args, **options: tuple(torch.cat([2 * x[:1], x[1:]]) for x in function(*args, **options))


@pytest.mark.parametrize(
    ("owner", "name", "change"),
    [
        *(
            (kind, name, with_first_position_changed)
            for kind in (nn.Linear, LlamaMLP)
            for name in ("forward", "__call__")
        ),
        (type(ACT2FN["silu"]), "forward", with_first_position_changed),
        (modeling_llama.LlamaRMSNorm, "forward", with_first_position_changed),
        (modeling_llama, "apply_rotary_pos_emb", with_first_row_doubled),
        (nn.functional, "silu", with_first_position_changed),
    ],
)
@pytest.mark.parametrize("order", ["before", "after"])
def test_what_is_put_into_a_class_or_a_file(owner, name, change, order, monkeypatch, seen):
    found, inputs = [], batch("llama", "right")
    for pack in (False, True):
        with monkeypatch.context() as patch:
            model = tiny("llama", "eager")
            if pack and order == "after":
                padding_free(model)
                outcome(model, inputs)
                assert len(seen) == 2
                model.zero_grad()
            patch.setattr(owner, name, change(getattr(owner, name)))
            if pack and order == "before":
                padding_free(model)
            found.append(outcome(model, inputs))
    assert_same(found[1], found[0])
    assert len(seen) == (2 if order == "after" else 0)
