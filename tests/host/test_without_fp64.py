"""The reference on a device without fp64, such as Apple's GPUs and some of Intel's: no tensor there may be fp64.

Modules run on "meta" tensors: tables of positions are made in fp64 on the CPU. Commands need values, so that there the
CPU itself stands for the device, and the table of positions is replaced.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastformer
from fastformer.apps.models import embeddings
from fastformer.host import devices
from fastformer.nn import Rotary
from fastformer.packing import Layout

pytest.importorskip("typer", reason="the command line needs the extra `apps`")

from fastformer.apps.cli.console import choose_device
from tests.support.command_line import fastformer as command
from tests.support.protocol_cases import CASES, D, H, Subject, _encode


class WithoutFp64(TorchDispatchMode):
    """Refuses fp64 tensors on a device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.device.type == self.device and x.dtype == torch.float64:
                raise TypeError(f"this device has no float64: {func}")
        return out


def without_fp64(device: str, monkeypatch: pytest.MonkeyPatch) -> WithoutFp64:
    monkeypatch.setattr(devices, "WITHOUT_FP64", (device,))
    return WithoutFp64(device)


def rotary_layer(_: Any, p: float) -> torch.nn.Module:
    return fastformer.TransformerEncoderLayer(D, H, 12, p, batch_first=True, rotary=Rotary())


MODULES = {**CASES, "rotary": Subject(rotary_layer, _encode, False)}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def move(x: Any) -> Any:
        return x.detach().to("meta") if isinstance(x, Tensor) else x.to("meta") if isinstance(x, Layout) else x

    subject = MODULES[name]
    module = subject.pair(dropout=0.1)[0].to("meta")
    arguments, options = subject.inputs(2, 9, torch.float32)
    with without_fp64("meta", monkeypatch):
        inputs = [move(x) for x in arguments], {key: move(x) for key, x in options.items()}
        out = subject.run(subject.function(module), inputs)
        out.sum().backward()
    assert out.is_meta


SMALL = (
    "--d-model 16 --heads 2 --feed-forward 32 --steps 2 --lr 0.01 "
    "--validate-every 2 --keep 1 --threads 1 --device cpu --run run"
)
TEXT = "\n".join(f"the {animal} sees the {other}" for animal in ("cat", "dog", "cow") for other in ("mouse", "bird"))
LABELS = "\n".join(f"{word}\tthe {word} bread {number}" for word in ("good", "bad") for number in range(12))
COMMANDS = {
    "translation": (
        "train --valid-size 4 --test-size 4 --train-size 100 --vocabulary 60 --no-joint --encoder-layers 1 "
        "--decoder-layers 1 --bleu-sentences 4",
        "translate --run run --beam 3 --scores --device cpu nine twelve",
        "score --run run --source text --target text --device cpu",
    ),
    "language": (
        "train lm --train-text text --held-out 0.2 --tokenizer words --layers 1 --context 8 --positions learned",
        "generate --run run --temperature 0.8 --top-p 0.9 --device cpu the",
        "evaluate --run run --device cpu",
    ),
    "classification": (
        "train classify --train-text labels --held-out 0.2 --layers 1",
        "classify --run run --device cpu the",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("application", COMMANDS)
def test_commands(application: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "sinusoidal_positions", lambda length, width, **_: torch.zeros(length, width))
    (tmp_path / "text").write_text(TEXT, encoding="utf-8")
    (tmp_path / "labels").write_text(LABELS, encoding="utf-8")
    train, *others = COMMANDS[application]
    for line in (f"{train} {SMALL}", *others):
        with without_fp64("cpu", monkeypatch):
            done = command(*line.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["mps", "xpu", "xpu:1"])
def test_the_command_line_takes_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = torch.device(name.partition(":")[0])
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: accelerator)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert choose_device(name) == name


def test_fp64_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with without_fp64("cpu", monkeypatch), pytest.raises(TypeError, match="no float64"):
        torch.ones(2, dtype=torch.float64)
    assert devices.widest_dtype(torch.device("cpu")) == torch.float32
