"""Devices: copies from the CPU in one transfer, CUDA graphs, and devices without fp64.

Where values matter, the CPU stands for the other device; where not, "meta" does. Apple's GPUs and some of Intel's have
no fp64: no tensor there may be fp64, tables of positions are made on the CPU.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import fastformer
from fastformer.apps.language.model import language_model_loss
from fastformer.apps.models import embeddings
from fastformer.apps.translation.model import translation_loss
from fastformer.functional import packed_attention
from fastformer.host import cuda_graphs, devices
from fastformer.host.devices import send
from fastformer.nn import Rotary
from fastformer.packing import Layout
from tests.support import language_task
from tests.support.command_line import fastformer as command
from tests.support.gpu import MARKS, no_host_sync
from tests.support.protocol_cases import CASES, D, H, Subject, _encode
from tests.support.recorded_steps import TapeRecorder
from tests.support.translation_task import random_batch, random_model

PAIRS = [(3, 5), (2, 2), (7, 1)]
BATCHES: dict[str, tuple[Any, Any, Any]] = {
    "translation": (random_model, partial(random_batch, PAIRS), translation_loss),
    "translation, padded": (random_model, partial(random_batch, PAIRS, packed=False), translation_loss),
    "language": (
        language_task.random_model, partial(language_task.random_batch, [5, 1, 9, 0, 3]), language_model_loss
    ),
}  # fmt: skip
every_batch = pytest.mark.parametrize("name", BATCHES)


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have transfers to "meta" end on the CPU, so that their values can be compared."""
    original = Tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.clone() if args and args[0] == torch.device("meta") else original(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "to", to)


@pytest.mark.usefixtures("staged")
@every_batch
def test_the_loss_and_its_gradients_are_the_same_after_the_transfer(name: str) -> None:
    make_model, make_batch, loss = BATCHES[name]
    model, batch = make_model(), make_batch()
    expected = loss(model, batch)
    expected_gradients = torch.autograd.grad(expected, list(model.parameters()))
    moved = batch.to("meta")
    actual = loss(model, moved)
    assert torch.equal(actual, expected)
    assert all(map(torch.equal, torch.autograd.grad(actual, list(model.parameters())), expected_gradients))
    assert torch.equal(loss(model, moved.to("cpu")), expected)


@pytest.mark.usefixtures("staged")
def test_values_shapes_and_dtypes_arrive_in_one_aligned_buffer() -> None:
    a, b = torch.arange(6).view(2, 3), torch.tensor([1.5, -2.0], dtype=torch.float64)
    c, d, e = torch.tensor([True, False, True]), torch.tensor(7, dtype=torch.int32), torch.empty(0, 4)
    strided = a.view(-1)[::2], a[0, ::3], torch.empty(0).as_strided((0,), (0,))
    tensors = a, b, c, a, d, e, a.t(), *strided
    arrived = send("meta", *tensors)
    for x, y in zip(arrived, tensors, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)
    assert arrived[0] is arrived[3]
    assert len({x.untyped_storage().data_ptr() for x in arrived}) == 1
    start = arrived[0].untyped_storage().data_ptr()
    assert not any((x.data_ptr() - start) % 128 for x in arrived if x.numel())  # kernels like them so


class Transfers(TorchDispatchMode):
    """Collects the tensors of the CPU that are copied to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        source, target = (
            (args[1], args[0]) if func is torch.ops.aten.copy_.default else (args[0] if args else None, out)
        )
        if isinstance(source, Tensor) and isinstance(target, Tensor) and source.is_cpu and not target.is_cpu:
            self.sources.append(source)
        return out


def test_the_groups_of_packed_attention_arrive_in_one_transfer() -> None:
    layout, key_layout = (Layout.from_lengths(lengths, "meta") for lengths in ([200, 3, 0, 4], [9, 200, 1, 5]))
    q, k = (torch.empty(x.total, 2, 8, device="meta") for x in (layout, key_layout))
    with Transfers() as transfers:
        packed_attention(q, k, k, layout, key_layout, alignment="bottom_right", causal=True)
    assert len(transfers.sources) == 1


class TestOnAGpu:
    pytestmark = MARKS

    @every_batch
    @pytest.mark.parametrize("backend", ["auto", "triton"])
    def test_the_host_waits_for_nothing(self, name: str, backend: Any) -> None:
        """Sync debug mode sees a copy that waits from pageable memory only where it blocks: the memory is looked at."""
        make_model, make_batch, loss = BATCHES[name]
        model, batch = make_model().cuda(), make_batch()

        def step() -> None:
            loss(model, batch.to("cuda", non_blocking=True)).backward()

        with fastformer.backend(backend):
            step()
            with no_host_sync(), Transfers() as transfers:
                step()
        assert all(x.is_pinned() for x in transfers.sources)
        # In fp32 "auto" takes SDPA, whose groups of sequences each layer sends again under a mode.
        assert len(transfers.sources) == 1 or backend == "auto"

    def test_pinned_memory_is_not_used_again_before_its_copy_is_done(self) -> None:
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)  # the copies wait behind this, some tens of milliseconds
        sent = [send("cuda", torch.full((1 << 16,), i))[0] for i in range(20)]
        assert [int(x.sum()) for x in sent] == [i << 16 for i in range(20)]


def test_a_capture_that_fails_is_a_warning_of_one_line_with_its_reason() -> None:
    class Interrupted(TapeRecorder):
        def capture(self, step: Any) -> Any:
            raise KeyboardInterrupt

    with pytest.warns(RuntimeWarning, match=r"^all goes on without CUDA graphs, .*not captured: operation not"):
        assert cuda_graphs.capture_or_warn(TapeRecorder(), lambda: torch.ones(1).item(), "all") is None
    with pytest.raises(KeyboardInterrupt):
        cuda_graphs.capture_or_warn(Interrupted(), lambda: None, "all")


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
def test_modules_make_no_fp64_where_there_is_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = MODULES[name]
    module = subject.pair(dropout=0.1)[0].to("meta")
    call = tree_map_only(
        (Tensor, Layout), lambda x: x.detach().to("meta") if isinstance(x, Tensor) else x.to("meta"),
        subject.inputs(2, 9, torch.float32),
    )  # fmt: skip
    with without_fp64("meta", monkeypatch):
        out = subject.run(subject.function(module), call)
        out.sum().backward()
    assert out.is_meta


def test_fp64_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with without_fp64("cpu", monkeypatch), pytest.raises(TypeError, match="no float64"):
        torch.ones(2, dtype=torch.float64)
    assert devices.widest_dtype(torch.device("cpu")) == torch.float32


SMALL = (
    "--d-model 16 --heads 2 --feed-forward 32 --steps 2 --lr 0.01 "
    "--validate-every 2 --keep 1 --threads 1 --device cpu --run run"
)
TEXT = "\n".join(f"the {animal} sees the {other}" for animal in ("cat", "dog", "cow") for other in ("mouse", "bird"))
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
}


@pytest.mark.slow
@pytest.mark.parametrize("application", COMMANDS)
def test_commands_make_no_fp64_where_there_is_none(
    application: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("typer", reason="the command line needs the extra `apps`")
    monkeypatch.setattr(embeddings, "sinusoidal_positions", lambda length, width, **_: torch.zeros(length, width))
    (tmp_path / "text").write_text(TEXT, encoding="utf-8")
    train, *others = COMMANDS[application]
    for line in (f"{train} {SMALL}", *others):
        with without_fp64("cpu", monkeypatch):
            done = command(*line.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["mps", "xpu:1"])
def test_the_command_line_takes_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("typer", reason="the command line needs the extra `apps`")
    from fastformer.apps.cli.console import choose_device

    accelerator = torch.device(name.partition(":")[0])
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: accelerator)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert choose_device(name) == name
