"""What somebody's function is held by, and what tools put into models, classes and files that no layer calls."""

import functools
import types

import pytest
import torch

pytest.importorskip("transformers")

from torch import Tensor, nn
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP

from fastformer.integrations.transformers import padding_free
from tests.integrations.test_packed_models import assert_same, outcome
from tests.integrations.tiny_transformers import ROUNDINGS, batch, both_ways, count_packed, tiny
from tests.support.closeness import assert_close


@pytest.fixture
def seen(monkeypatch):
    return count_packed(monkeypatch)


def changed(x: Tensor) -> Tensor:
    """Another first position in each row, which packed tokens have once."""
    return torch.cat([x[:, :1] + 1, x[:, 1:]], 1)


class Changing(nn.Module):
    def forward(self, x):
        return changed(x)


class ChangingLinear(nn.Linear):
    def forward(self, x):
        return changed(super().forward(x))


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return changed(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


@functools.cache
def operator():
    return torch.library.custom_op("packed_own_code::changed", changed, mutates_args=())


class Descriptor:
    def __get__(self, instance, owner=None):
        return changed


INSTEAD = {
    "a function of autograd": lambda: Function.apply,
    "a method of torch's of a module": lambda: Changing().__call__,
    "a method of torch's of a linear layer": lambda: ChangingLinear(16, 16)._call_impl,
    "a module in a function of torch's": lambda: torch.no_grad()(Changing()),
    "a module in a part of a function": lambda: functools.partial(nn.Module.__call__, Changing()),
    "TorchScript": lambda: torch.jit.script(changed),
    "a trace": lambda: torch.jit.trace(changed, (torch.randn(3, 4, 5),)),
    "an operator": operator,
    "a part of an operator": lambda: functools.partial(operator()),
    "an operator by its name": lambda: operator() and torch.ops.packed_own_code.changed,
    "an overload": lambda: operator() and torch.ops.packed_own_code.changed.default,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("way", INSTEAD)
def test_functions_of_ones_own_that_libraries_hold(way, seen):
    found, inputs = [], batch("llama", "right")
    for model in both_ways("llama"):
        model.model.layers[1].mlp.forward = INSTEAD[way]()
        with torch.no_grad():
            found.append(model(**inputs).logits[inputs["attention_mask"].bool()])
    assert_close(found[1], found[0], ROUNDINGS)
    assert len(seen) == 1


@pytest.mark.parametrize(
    "method",
    [
        functools.partialmethod(lambda self, x: changed(x)),
        functools.singledispatchmethod(lambda self, x: changed(x)),
        Descriptor(),
        Changing(),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_else_a_class_may_hold_for_a_method(method, seen, monkeypatch):
    monkeypatch.setattr(LlamaMLP, "forward", method)
    found, inputs = [], batch("llama", "left")
    for model in both_ways("llama"):
        found.append(outcome(model, inputs))
    assert_same(found[1], found[0])
    assert not seen


def test_a_function_that_an_activation_holds(seen):
    found, inputs = [], batch("bert", "right")
    for model in both_ways("bert"):
        model.bert.encoder.layer[1].intermediate.intermediate_act_fn.act = changed
        found.append(outcome(model, inputs))
    assert_same(found[1], found[0])
    assert len(seen) == 1


class Odd:
    """Something to call that answers no question."""

    def __call__(self, x):
        return changed(x)

    def __getattr__(self, name):
        raise RuntimeError("asked for " + name)

    def __eq__(self, other):
        raise RuntimeError("compared")

    __hash__ = None


def test_objects_that_answer_no_question(seen):
    found, inputs = [], batch("llama", "right")
    for model in both_ways("llama"):
        model.model.layers[1].mlp.forward = functools.partial(Odd())
        found.append(model(**inputs).logits[inputs["attention_mask"].bool()])
    assert_close(found[1], found[0], ROUNDINGS)
    assert len(seen) == 1


def reset_less(monkeypatch):
    """As models are loaded faster, and as attention is replaced in other places than layers that packed ones have."""
    monkeypatch.setattr(nn.Linear, "reset_parameters", lambda self: None)


def other_attention(monkeypatch):
    theirs = nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        nn.functional, "scaled_dot_product_attention", lambda *args, **options: theirs(*args, **options)
    )


def other_loss(monkeypatch):
    theirs = nn.functional.cross_entropy
    monkeypatch.setattr(nn.functional, "cross_entropy", lambda *args, **options: theirs(*args, **options))


@pytest.mark.parametrize("change", [reset_less, other_attention, other_loss])
def test_what_no_layer_calls_changes_nothing(change, seen, monkeypatch):
    model = tiny("llama", "eager")
    padding_free(model)
    change(monkeypatch)
    model(**batch("llama", "right"))
    assert len(seen) == 2


def test_methods_of_a_module_that_no_forward_calls(seen):
    """As tools for quantised weights print them, and frozen parts stay in evaluation mode."""
    model = tiny("llama", "eager")
    padding_free(model)
    part = model.model.layers[1].mlp.down_proj
    part.extra_repr = types.MethodType(lambda self: "weights of 4 bits", part)
    part.train = lambda mode=True: part
    model(**batch("llama", "right"))
    assert len(seen) == 2


def test_a_part_that_was_compiled_leaves_its_file_as_it_was(seen):
    """Dynamo puts what it compiled into the file of what it compiled."""
    model, inputs = tiny("llama", "eager"), batch("llama", "right")
    torch.compile(tiny("llama", "eager").model.layers[0].mlp, backend="eager")(torch.randn(1, 2, 16))
    padding_free(model)
    before = set(vars(modeling_llama))
    torch.compile(tiny("llama", "eager"), backend="eager")(**inputs)
    assert any("compiled_fn" in name for name in set(vars(modeling_llama)) | before)
    seen.clear()
    model(**inputs)
    assert len(seen) == 2


def test_a_forward_that_was_compiled(seen):
    found, inputs = [], batch("llama", "right")
    for model in both_ways("llama"):
        mlp = model.model.layers[1].mlp
        mlp.forward = torch.compile(mlp.forward, backend="eager")
        with torch.no_grad():
            found.append(model(**inputs).logits[inputs["attention_mask"].bool()])
    assert_close(found[1], found[0], ROUNDINGS)
    assert len(seen) == 2
