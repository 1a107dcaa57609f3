"""Faults in what attention does with values of a head size of their own."""

from collections.abc import Iterator

from tests.kernels.mutations.fault import KERNELS, OPS, Fault

_WIDER = "test_values_and_gradients[64-128-dtype0]"
_EVERY = "test_every_option_with_weights_and_the_gradient_of_the_mask[40-56-dtype0]"


def _of_values(file: str, test: str, name: str, old: str, new: str, failure: str = "") -> Fault:
    return Fault(name, f"{file}.py", old, new, f"tests/kernels/test_value_head_size.py::{test}", failure)


def faults() -> Iterator[Fault]:
    file = f"{KERNELS}/attention/forward"
    yield _of_values(file, _WIDER, "values cut to the keys' head size", "v_dims[None, :] < V", "v_dims[None, :] < K")
    file = f"{KERNELS}/attention/backward"
    yield _of_values(file, _WIDER, "dV in rows of dK", "dv_ptr + wide * stride_dv_s", "dv_ptr + wide * stride_dk_s")
    yield _of_values(
        file, _EVERY, "dV in heads of dK", "offset(hk, ALIGN, stride_dv_h)", "offset(hk, ALIGN, stride_dk_h)"
    )
    yield _of_values(
        file,
        "test_values_and_gradients[40-56-dtype0]",
        "dQ: output's gradient cut to the keys' head size",
        "stride_dout_t * ALIGN + v_dims[None, :], mask=real & in_value",
        "stride_dout_t * ALIGN + v_dims[None, :], mask=real & in_head",
    )
    yield _of_values(
        f"{KERNELS}/attention/mask_gradient",
        _EVERY,
        "gradient of the mask: values of the keys' head size",
        "stride_v_s * ALIGN + v_dims[None, :], mask=real_keys & in_value",
        "stride_v_s * ALIGN + v_dims[None, :], mask=real_keys & in_head",
    )
    yield _of_values(
        f"{KERNELS}/attention/decode",
        "test_decoding[40-72-dtype0]",
        "decoding: shares in rows of the keys' head size",
        "part_ptr + row[:, None] * V",
        "part_ptr + row[:, None] * K",
    )
    file = f"{OPS}/attention/fused"
    yield _of_values(
        file, _WIDER, "scale of the values' head size", "float(q.shape[-1] ** -0.5", "float(v.shape[-1] ** -0.5"
    )
    yield _of_values(
        file,
        "test_registered_ops_pass_opcheck[False]",
        "fake output of the queries' head size",
        "return _like(q, v), q.new_empty(rows",
        "return _like(q), q.new_empty(rows",
        failure=r"torch\.testing\._internal\.optests",
    )
