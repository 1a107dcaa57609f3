"""Which implementation takes a call: by request, in all threads, under torch.compile, and of attention on each GPU.

Calls on a GPU are decided on fake tensors by the name of the GPU.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import fastformer
from fastformer import functional
from fastformer.backend import BackendError
from fastformer.functional import choice, preferences
from fastformer.functional import warm_up as warm_up_module
from fastformer.functional.attention import op
from fastformer.functional.preferences import Preference
from fastformer.packing import Layout
from fastformer_kernels.host import architecture
from tests.kernels.norm_cases import cuda_autocast
from tests.support.python import python

NVIDIA = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
B, H, T, K = 2, 4, 200, 64


@pytest.fixture
def run(monkeypatch):
    """Return a function that calls another one on fake tensors of a GPU, and returns what ran it."""
    if not choice._TRITON:
        pytest.skip("without Triton the reference takes every call")
    taken = []

    def fused(q, *_: object) -> tuple[Tensor, None]:
        taken.append("triton")
        return q, None

    def sdpa(q, k, v, *_: object, **rules: object) -> Tensor:
        taken.append("sdpa")
        return q

    monkeypatch.setattr(op.fused, "attention", fused)
    monkeypatch.setattr(op.fused, "packed_attention", lambda *arguments: fused(*arguments)[0])
    monkeypatch.setattr(op.packed_reference, "packed_attention", lambda q, *_: q)
    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    # Positions of a GPU cannot be compared without one.
    monkeypatch.setattr(op.reference, "allowed_positions", lambda *_: None)
    monkeypatch.setattr(op.reference, "blank_padding", lambda q, k, v, rules: (q, k, v))
    monkeypatch.setattr(choice, "FAULT_OF_LAUNCHERS", None)
    monkeypatch.setattr(choice, "_INTERPRETED", False)

    def run(target, call, backend="auto"):
        taken.clear()
        monkeypatch.setattr(choice, "target_of", lambda device: target)
        with fastformer.backend(backend), FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
            call()
        (implementation,) = taken or ["reference"]
        return implementation

    return run


def attend(queries=T, keys=T, kv_heads=H, size=K, dtype=torch.bfloat16, training=False, rules=lambda: {}):
    shapes = [(B, H, queries, size), (B, kv_heads, keys, size), (B, kv_heads, keys, size)]
    functional.attention(*(torch.empty(shape, dtype=dtype, requires_grad=training) for shape in shapes), **rules())


def counted() -> Tensor:
    return torch.ones(B, dtype=torch.int64)


def trained() -> Tensor:
    return torch.ones(T, T, requires_grad=True)


FP32 = {"dtype": torch.float32}
CORNER = {"keys": T + 1, "rules": lambda: {"causal": True, "alignment": "bottom_right"}}
CALLS = {
    "plain": ({}, "sdpa"),
    "causal": ({"rules": lambda: {"causal": True}}, "sdpa"),
    "dropout": ({"rules": lambda: {"dropout_p": 0.1}}, "sdpa"),
    "training": ({"training": True}, "sdpa"),
    "long": ({"queries": 16_384, "keys": 16_384}, "sdpa"),
    "fp32": (FP32, "sdpa"),
    "head size 264": ({"size": 264}, "sdpa"),  # beyond the kernels
    "grouped": ({"kv_heads": 2}, "sdpa"),
    "grouped, fp32": ({"kv_heads": 2, **FP32}, "triton"),
    "decoding": ({"queries": 1}, "triton"),
    "all weights dropped": ({"rules": lambda: {"dropout_p": 1.0}}, "triton"),
    "causal, scale 0": ({"rules": lambda: {"causal": True, "scale": 0.0}}, "triton"),
    "bottom right": (CORNER, "triton"),
    "bottom right, fp32": ({**CORNER, **FP32}, "sdpa"),
    "window": ({"rules": lambda: {"window": (2, 0)}}, "triton"),
    "window, fp32": ({**FP32, "rules": lambda: {"window": (2, 0)}}, "triton"),
    "lengths": ({"rules": lambda: {"key_lengths": counted()}}, "triton"),
    "lengths, fp32": ({**FP32, "rules": lambda: {"key_lengths": counted()}}, "sdpa"),
    "mask": ({"rules": lambda: {"mask": torch.ones(T, T)}}, "triton"),
    "mask, fp32": ({**FP32, "rules": lambda: {"mask": torch.ones(T, T)}}, "sdpa"),
    "trained mask, fp32": ({**FP32, "rules": lambda: {"mask": trained()}}, "triton"),
    "key mask": ({"rules": lambda: {"key_mask": torch.ones(B, T, dtype=torch.bool)}}, "triton"),
    "softcap": ({"rules": lambda: {"softcap": 9.0}}, "triton"),
    "sinks": ({"rules": lambda: {"sinks": torch.ones(H)}}, "triton"),
    "bias": ({"rules": lambda: {"distance_bias": torch.ones(H, 2 * T - 1)}}, "triton"),
}


# Exact fp32 is three products of tf32 there, up to a head size of 128.
ON_SM_90 = dict.fromkeys(("fp32", "bottom right, fp32", "lengths, fp32", "mask, fp32"), "triton")


@pytest.mark.parametrize("target", NVIDIA)
def test_auto_leaves_plain_calls_to_sdpa(target, run):
    taken_by = {name: run(target, lambda name=name: attend(**CALLS[name][0])) for name in CALLS}
    expected = {name: expected for name, (_, expected) in CALLS.items()}
    assert taken_by == expected | (ON_SM_90 if target == "sm_90" else {})


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({"queries": 64, "keys": 64, "size": 128}, "triton"),
        ({"queries": 65, "keys": 65, "size": 128}, "sdpa"),
        ({"queries": 128, "keys": 128, "training": True}, "triton"),
        ({"queries": 129, "keys": 129, "training": True}, "sdpa"),
        ({"queries": 64, "keys": 64, "training": True, **FP32}, "sdpa"),
        ({"queries": 65, "keys": 65, "training": True, **FP32}, "triton"),
        ({"size": 128, **FP32, "rules": lambda: {"key_lengths": counted()}}, "triton"),
        ({"size": 136, **FP32, "rules": lambda: {"key_lengths": counted()}}, "sdpa"),
        ({"size": 32, "training": True}, "triton"),
    ],
)
def test_auto_takes_what_was_faster_on_an_h200(call, expected, run):
    assert run("sm_90", lambda: attend(**call)) == expected


@pytest.mark.parametrize("target", ["sm_75", "gfx90a", "gfx942", "gfx1100", "gfx1201"])
def test_auto_takes_no_kernel_where_none_is_measured_and_backend_triton_does(target, run):
    assert run(target, attend) == "sdpa"
    assert run(target, lambda: attend(rules=lambda: {"softcap": 9.0})) == "reference"
    if target.startswith("gfx"):
        assert run(target, attend, backend="triton") == "triton"
        with FakeTensorMode():
            lines = fastformer.explain(torch.empty(2, device="cuda")).splitlines()
        reason = f"rotary is not measured on this GPU, {target}; backend 'triton' runs the kernels"
        assert f"rotary: reference ({reason})" in lines
    with pytest.raises(BackendError, match="not gfx1030"):
        run("gfx1030", attend, backend="triton")


def test_without_a_c_compiler_no_kernel_is_chosen_and_none_is_compiled(run, monkeypatch):
    """Triton builds the code that launches kernels with it."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    fault = choice._fault_of_launchers()
    monkeypatch.setattr(choice, "FAULT_OF_LAUNCHERS", fault)
    monkeypatch.setattr(warm_up_module, "FAULT_OF_LAUNCHERS", fault)
    assert run("sm_90", lambda: attend(rules=lambda: {"softcap": 9.0})) == "reference"
    with pytest.raises(BackendError, match="needs a C compiler"):
        run("sm_90", attend, backend="triton")
    with pytest.raises(BackendError, match="needs a C compiler"):
        run("sm_90", lambda: fastformer.warm_up(torch.nn.LayerNorm(2)))
    with FakeTensorMode():  # `fastformer info` prints the same lines
        lines = fastformer.explain(torch.empty(2, device="cuda"))
    assert "layer_norm: reference (layer_norm needs a C compiler" in lines
    monkeypatch.setenv("CC", "/opt/cc")
    assert choice._fault_of_launchers() is None


@pytest.mark.parametrize("name", ["decoding", "plain"])
def test_an_activated_flash_implementation_takes_plain_calls(name, run, monkeypatch):
    monkeypatch.setattr(torch.nn.attention._registry, "_FLASH_ATTENTION_ACTIVE", ("FA4", None))
    assert run("sm_90", lambda: attend(**CALLS[name][0])) == "sdpa"
    assert run("sm_90", lambda: attend(**CALLS["softcap"][0])) == "triton"
    assert run("sm_90", lambda: attend(**CALLS["grouped, fp32"][0])) == "triton"  # flash takes 16 bits


def test_the_backend_and_determinism_decide_first(run):
    assert run("sm_90", attend, backend="triton") == "triton"
    assert run("sm_90", attend, backend="reference") == "sdpa"
    torch.use_deterministic_algorithms(True)
    try:
        assert run("sm_90", attend) == "triton"
    finally:
        torch.use_deterministic_algorithms(False)


def test_auto_interprets_no_kernel_on_a_gpu(run, monkeypatch):
    """With TRITON_INTERPRET=1 Triton would copy all tensors to the CPU, where products in bf16 are wrong."""
    call, expected = CALLS["softcap"]
    assert run("sm_90", lambda: attend(**call)) == expected == "triton"
    monkeypatch.setattr(choice, "_INTERPRETED", True)
    assert run("sm_90", lambda: attend(**call)) == "reference"
    assert run("sm_90", lambda: attend(**call), backend="triton") == "triton"


def test_kernels_that_multiply_in_tf32_keep_calls_with_padding(run, monkeypatch):
    call, expected = CALLS["lengths, fp32"]
    precision = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert run("sm_80", lambda: attend(**call)) == "triton"
        monkeypatch.setattr(choice, "WITHOUT_TF32", {"sm_80"})
        assert run("sm_80", lambda: attend(**call)) == expected
    finally:
        torch.backends.cuda.matmul.fp32_precision = precision
    assert run("sm_80", lambda: attend(**call)) == expected


def test_autocast_decides_by_the_dtype_that_it_computes_in(run):
    with cuda_autocast():
        assert run("sm_90", lambda: attend(dtype=torch.float32)) == "sdpa"


def test_a_measured_row_decides_by_use_head_size_and_length(run, monkeypatch):
    row = Preference(("sm_90",), (torch.bfloat16,), ("inference",), 64, 1024, 1.1, "measured", "2027-01-01", "here")
    monkeypatch.setattr(preferences, "PREFERENCES", (row, *preferences.PREFERENCES))
    for arguments in ({}, {"queries": 1024, "keys": 1024}):
        assert run("sm_90", lambda arguments=arguments: attend(**arguments)) == "triton"
    for arguments in ({"size": 72}, {"keys": 1025}, {"training": True}, {"dtype": torch.float16}):
        assert run("sm_90", lambda arguments=arguments: attend(**arguments)) == "sdpa"
    assert run("sm_80", attend) == "sdpa"


@pytest.mark.parametrize(
    ("target", "dtype", "keeps"),
    [("sm_90", torch.bfloat16, True), ("sm_90", torch.float32, True), ("sm_80", torch.float32, False)],
)
@pytest.mark.parametrize("lengths", [[T] * B, [T, T - 1]])
def test_packed_sequences_of_one_length_are_a_plain_call(lengths, target, dtype, keeps, run):
    """Others stay with the kernels where these multiply on tensor cores."""
    layout = Layout.from_lengths(lengths)

    def call() -> None:
        x = torch.empty(layout.total, H, K, dtype=dtype)
        names = ("offsets", "positions", "slots", "origin")
        on_gpu = replace(
            layout, **{name: torch.empty(getattr(layout, name).shape, dtype=torch.int64) for name in names}
        )
        functional.packed_attention(x, x, x, on_gpu, causal=True)

    plain = target == "sm_90" and dtype == torch.float32  # the kernels are faster in plain calls, too
    assert run(target, call) == ("triton" if plain or (keeps and not layout.full) else "reference")


def test_explain_says_what_sdpa_takes_and_why(monkeypatch):
    monkeypatch.setattr(choice, "_INTERPRETED", False)
    for target, reason in (
        ("sm_90", "0.73 of SDPA's speed in training on sm_90, measured 2026-11-26"),
        ("sm_120", "not known"),
    ):
        monkeypatch.setattr(choice, "target_of", lambda device, target=target: target)
        with FakeTensorMode():
            x = torch.empty(2, dtype=torch.bfloat16, device="cuda")
            auto = fastformer.explain(x).splitlines()
            with fastformer.backend("triton"):
                assert "attention: triton" in fastformer.explain(x).splitlines()
            fp32 = fastformer.explain(x.float()).splitlines()
        assert auto[0].startswith("attention: triton; sdpa for plain calls (")
        if target == "sm_120":
            assert fp32[0].startswith("attention: triton; sdpa for calls without window, softcap, bias and sinks (")
        else:
            assert fp32[0] == "attention: triton"
        assert reason in auto[0]
        assert "layer_norm: triton" in auto


DOUBLE = torch.randn(2, 3).double()  # no kernel takes fp64, on a GPU or in Triton's interpreter


@pytest.fixture
def restored():
    before = fastformer.get_backend()
    yield
    fastformer.set_backend(before)


@pytest.mark.slow
def test_the_environment_is_the_default_and_its_mistakes_are_named():
    code = "from fastformer.backend import backend, get_backend\nwith backend('auto'): pass\nprint(get_backend())"
    assert python("-c", code, FASTFORMER_BACKEND="reference").stdout.strip() == "reference"
    process = python("-c", code, FASTFORMER_BACKEND="tritn")
    assert process.returncode != 0
    assert "FASTFORMER_BACKEND is 'tritn'; it must be one of auto, triton, reference" in process.stderr


@pytest.mark.usefixtures("restored")
def test_context_beats_set_backend_and_nests():
    fastformer.set_backend("reference")
    with fastformer.backend("auto"):
        assert fastformer.get_backend() == "auto"
        with fastformer.backend("triton"):
            assert fastformer.get_backend() == "triton"
        assert fastformer.get_backend() == "auto"
    assert fastformer.get_backend() == "reference"


def test_the_choice_holds_in_all_threads():
    """Also in that of autograd, which on a GPU computes checkpointed activations again."""
    with fastformer.backend("triton"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(fastformer.get_backend).result() == "triton"


@pytest.mark.parametrize("choose", [fastformer.set_backend, lambda name: fastformer.backend(name).__enter__()])
def test_an_unknown_backend_raises_and_changes_nothing(choose):
    with pytest.raises(ValueError, match="backend is 'cuda'; it must be one of auto, triton, reference"):
        choose("cuda")
    assert fastformer.get_backend() == "auto"


def test_explain_says_what_would_run():
    for subject in (DOUBLE, nn.Linear(2, 2), nn.ReLU()):
        lines = fastformer.explain(subject).splitlines()
        assert [line.split(":")[0] for line in lines] == list(functional.OPS)
        assert all(": reference (" in line for line in lines)
    with fastformer.backend("triton"):
        assert "layer_norm: raises (" in fastformer.explain(DOUBLE)
    with fastformer.backend("reference"):
        assert "layer_norm: reference (chosen)" in fastformer.explain(DOUBLE)
    with pytest.raises(TypeError, match="subject must be a module or a tensor, not str"):
        fastformer.explain("x")


@pytest.mark.parametrize("installed", [True, False])
def test_explain_names_the_missing_gpu_before_triton(installed, monkeypatch):
    """Because to install Triton would change nothing."""
    monkeypatch.setattr(choice, "_TRITON", installed)
    monkeypatch.setattr(choice, "_INTERPRETED", False)
    assert all("needs a GPU" in line for line in fastformer.explain(torch.ones(2)).splitlines())


@pytest.mark.usefixtures("restored")
def test_compiled_code_follows_a_switch():
    compiled = torch.compile(lambda x: functional.layer_norm(x, 3), backend="eager")
    compiled(DOUBLE)
    with fastformer.backend("triton"), pytest.raises(RuntimeError, match="'triton' was asked for"):
        compiled(DOUBLE)
    compiled(DOUBLE)
    fastformer.set_backend("triton")
    with pytest.raises(RuntimeError, match="'triton' was asked for"):
        compiled(DOUBLE)


class Hopper(NamedTuple):
    """The properties of a GPU; torch.compile takes no SimpleNamespace made in a compiled function."""

    major: int = 9
    minor: int = 0


def test_torch_compile_reads_the_target_of_a_gpu_without_a_warning(monkeypatch):
    monkeypatch.setattr(architecture, "_targets", {})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Hopper())

    @torch.compile(backend="eager", fullgraph=True)
    def add_length(x):
        return x + len(choice.architecture_of(choice.target_of(0)))

    assert add_length(torch.zeros(())) == len("sm_90")
