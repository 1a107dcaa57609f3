"""load_state_dict: what it says, returns and calls is what torch's class of the same name does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastformer
from tests.support.protocol_cases import CASES, DROP_INS, OWN

State = dict[str, Tensor]


def last(state: State) -> str:
    return list(state)[-1]


def without_the_first(module: nn.Module, state: State) -> State:
    return dict(list(state.items())[1:])


def with_another(module: nn.Module, state: State) -> State:
    return {**state, "other.weight": torch.ones(1), "bias2": torch.ones(1)}


def too_large(module: nn.Module, state: State) -> State:
    return {**state, last(state): torch.ones(*state[last(state)].shape, 2)}


def everything(module: nn.Module, state: State) -> State:
    first = next(iter(state))
    changed = with_another(module, too_large(module, state))
    return {name: value for name, value in changed.items() if name != first}


def no_tensor(module: nn.Module, state: State) -> Any:
    return {**state, last(state): [1.0]}


def of_another_dtype(module: nn.Module, state: State) -> State:
    return {name: value.double() for name, value in state.items()}


def under_a_prefix(module: nn.Module, state: State) -> State:
    """A hook takes away what DistributedDataParallel puts before names."""

    def strip(_: nn.Module, given: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in [name for name in given if name.startswith(f"{prefix}module.")]:
            given[prefix + name.removeprefix(f"{prefix}module.")] = given.pop(name)

    module.register_load_state_dict_pre_hook(strip)
    return {f"module.{name}": value for name, value in state.items()}


def reported_by_a_hook(module: nn.Module, state: State) -> State:
    """A hook afterwards says what it misses, and forgives what was not to be there."""

    def report(_: nn.Module, keys: Any) -> None:
        keys.missing_keys.append("of the hook")
        keys.unexpected_keys.clear()

    module.register_load_state_dict_post_hook(report)
    return with_another(module, state)


def renamed_when_stored(module: nn.Module, state: State) -> State:
    """A hook of state_dict gives a name of an older version."""
    module.register_state_dict_post_hook(
        lambda _, state, prefix, meta: state.update({"old": state.pop(last(state))}) if not prefix else None
    )
    return module.state_dict()


CHANGES: dict[str, Callable[[nn.Module, State], Any]] = {
    f.__name__.replace("_", " "): f
    for f in (
        without_the_first,
        with_another,
        too_large,
        everything,
        no_tensor,
        of_another_dtype,
        under_a_prefix,
        reported_by_a_hook,
        renamed_when_stored,
    )
}


def outcome(module: nn.Module, change: str, **settings: bool) -> Any:
    """What loading returns or raises, and the state afterwards."""
    torch.manual_seed(5)
    state: Any = {name: torch.rand_like(value) for name, value in module.state_dict().items()}
    given = CHANGES[change](module, state)
    try:
        result = module.load_state_dict(given, **settings)
        told: Any = type(result).__name__, result.missing_keys, result.unexpected_keys, repr(result)
    except Exception as error:
        told = type(error), str(error)
    parameters = {name: (p.dtype, p.requires_grad, type(p), p.tolist()) for name, p in module.named_parameters()}
    return told, parameters


@pytest.mark.parametrize("name", DROP_INS)
@pytest.mark.parametrize("change", CHANGES)
def test_drop_ins_say_and_return_what_torchs_do(name, change):
    for settings in ({}, {"strict": False}, {"assign": True}, {"strict": False, "assign": True}):
        ours, torchs = DROP_INS[name].pair()
        assert outcome(ours, change, **settings) == outcome(torchs, change, **settings)


@pytest.mark.parametrize("name", DROP_INS)
def test_it_is_torchs_own_method(name):
    """Nothing of it is replaced, in any part: what tomorrow's torch says, ours will say."""
    ours, torchs = DROP_INS[name].pair()
    for one, other in zip(ours.modules(), torchs.modules(), strict=True):
        for method in ("load_state_dict", "_load_from_state_dict", "state_dict", "_save_to_state_dict"):
            assert getattr(type(one), method) is getattr(type(other), method), (type(one), method)


@pytest.mark.parametrize("name", OWN)
def test_ours_name_every_mistake_at_once(name):
    module, _ = OWN[name].pair()
    names = list(module.state_dict())
    told, _ = outcome(module, "everything")
    assert told[0] is RuntimeError
    assert told[1].startswith(f"Error(s) in loading state_dict for {type(module).__name__}:\n")
    assert f'Missing key(s) in state_dict: "{names[0]}". ' in told[1]
    assert 'Unexpected key(s) in state_dict: "other.weight", "bias2". ' in told[1]
    assert f"size mismatch for {names[-1]}: copying a param with shape" in told[1]


@pytest.mark.parametrize("name", OWN)
def test_ours_return_the_keys_that_do_not_fit(name):
    module, _ = OWN[name].pair()
    first = next(iter(module.state_dict()))
    told, _ = outcome(module, "without the first", strict=False)
    assert told[:3] == ("_IncompatibleKeys", [first], [])
    told, _ = outcome(module, "with another", strict=False)
    assert told[:3] == ("_IncompatibleKeys", [], ["other.weight", "bias2"])
    told, _ = outcome(module, "under a prefix")
    assert told[3] == "<All keys matched successfully>"


@pytest.mark.parametrize("name", CASES)
def test_values_are_cast_or_assigned(name):
    module, _ = CASES[name].pair()
    wide = {key: value.double() for key, value in module.state_dict().items()}
    before = dict(module.named_parameters())
    module.load_state_dict(wide)
    after = dict(module.named_parameters())
    assert all(after[key] is p and p.dtype == torch.float32 for key, p in before.items())
    module.load_state_dict(wide, assign=True)
    after = dict(module.named_parameters())
    assert after.keys() == before.keys()  # what was tied still is
    assert all(p.dtype == torch.float64 and p.requires_grad for p in after.values())
    assert all(torch.equal(p, wide[key]) for key, p in after.items())


@pytest.mark.parametrize("name", CASES)
def test_a_module_without_memory_is_filled_by_assigning(name):
    """As large checkpoints are loaded: made on "meta", then values are assigned, and it computes the same."""
    case = CASES[name]
    module, _ = case.pair()
    with torch.device("meta"):
        filled = case.make(fastformer, 0.0)
    filled.load_state_dict(module.state_dict(), assign=True)
    given = case.inputs(3, 5, torch.float32)
    assert torch.equal(case.run(case.function(filled), given), case.run(case.function(module), given))
