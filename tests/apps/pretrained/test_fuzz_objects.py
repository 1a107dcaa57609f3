"""Models of transformers that somebody changed after they were made: refused in a line, or the same logits.

One to two changes a model: hooks, parts of somebody's own, numbers set by hand, ties, dtypes, settings.
"""

import dataclasses
import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from fastformer.apps.pretrained import from_transformers
from tests.apps.pretrained.test_from_transformers import FP32, apart, ours_of, theirs_of
from tests.apps.pretrained.tiny_models import ALL, build
from tests.fuzz import fuzz

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow


def linear(model: Any, random: Random) -> Any:
    return random.choice([x for x in model.modules() if type(x).__name__ in ("Linear", "Conv1D")])


def layers(model: Any) -> nn.ModuleList:
    return next(x for x in model.modules() if isinstance(x, nn.ModuleList) and len(x) > 1)


def hook(model: Any, random: Random) -> None:
    part = random.choice([x for x in model.modules() if not isinstance(x, nn.ModuleList)])
    part.register_forward_hook(lambda module, args, out: out * 1.5 if isinstance(out, torch.Tensor) else None)


def own_forward(model: Any, random: Random) -> None:
    part = linear(model, random)
    before = part.forward
    part.forward = lambda *args: before(*args) * 1.5


def subclass(model: Any, random: Random) -> None:
    part = linear(model, random)
    before = type(part)
    part.__class__ = type("Own", (before,), {"forward": lambda self, x: before.forward(self, x) * 1.5})


def replaced(model: Any, random: Random) -> None:
    places = [(x, name) for x in model.modules() for name, part in x.named_children() if not list(part.parameters())]
    if places:
        setattr(*random.choice(places), nn.Tanh())


def attribute(model: Any, random: Random) -> None:
    kinds = (int, float, bool)
    found = [(x, n) for x in model.modules() for n, v in vars(x).items() if type(v) in kinds and not n.startswith("_")]
    part, name = random.choice([(x, n) for x, n in found if n not in ("training", "call_super_init")])
    value = getattr(part, name)
    setattr(part, name, not value if isinstance(value, bool) else value * 2 + (0.01 if isinstance(value, float) else 1))


def setting(model: Any, random: Random) -> None:
    found = {f.name: getattr(model.config, f.name, None) for f in dataclasses.fields(type(model.config))}
    name = random.choice([name for name, value in found.items() if type(value) in (int, float, bool)])
    value = found[name]
    drawn = not value if isinstance(value, bool) else random.choice((value * 2 + 1, -value, 0))
    setattr(model.config, name, drawn if isinstance(value, bool | int) else random.choice((drawn, float("nan"))))


def buffer(model: Any, random: Random) -> None:
    found = list(model.buffers())
    if found:
        x = random.choice(found)
        x.copy_(x * 1.5 if x.is_floating_point() else x.flip(-1))


def dtype(model: Any, random: Random) -> None:
    drawn = random.choice((torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int8, torch.complex64))
    linear(model, random).weight = nn.Parameter(linear(model, random).weight.detach().to(drawn), requires_grad=False)


CHANGES: dict[str, Callable[[Any, Random], Any]] = {
    "hook": hook,
    "forward": own_forward,
    "subclass": subclass,
    "replaced": replaced,
    "attribute": attribute,
    "setting": setting,
    "buffer": buffer,
    "dtype": dtype,
    "meta": lambda model, random: linear(model, random).to("meta"),
    "parametrised": lambda model, random: parametrize.register_parametrization(
        linear(model, random), "weight", nn.Softplus()
    ),
    "pruned": lambda model, random: prune.l1_unstructured(linear(model, random), "weight", amount=0.5),
    "limited": lambda model, random: setattr(model.get_input_embeddings(), "max_norm", 0.5),
    "shortened": lambda model, random: layers(model).pop(1),
    "turned": lambda model, random: layers(model).append(layers(model).pop(0)),
    "more": lambda model, random: model.add_module("more", nn.Linear(2, 2)),
    "harmless": lambda model, random: random.choice((model.train, lambda: model.requires_grad_(False), model.double))(),
}


def test_objects(request: pytest.FixtureRequest) -> None:
    def check(number: int) -> str:
        random = Random(number)
        theirs = build(random.choice(list(ALL)))
        drawn = [random.choice(list(CHANGES)) for _ in range(random.choice((1, 1, 2)))]
        with torch.no_grad():
            for name in drawn:
                try:
                    CHANGES[name](theirs, random)
                except Exception:
                    return "no such change"  # torch and transformers refuse some themselves
            ours = fuzz.attempt(lambda: from_transformers(theirs), (ValueError,), number)
            if ours is None:
                return "refused"
            try:
                expected = theirs_of(theirs.eval())
            except Exception:  # of a model that its owner broke
                return "broken"
            difference = apart(ours_of(ours.eval()), expected)
        assert not difference > FP32, f"{drawn}: {difference}"  # NaN is theirs too
        return "converted"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fuzz.each(range(request.config.getoption("--fuzz")), check, {"refused": 0.4, "converted": 0.05})
