"""Faults in the rotary op."""

from collections.abc import Iterator

from tests.kernels.mutations.fault import KERNELS, OPS, Fault, at


def faults() -> Iterator[Fault]:
    file, op = f"{KERNELS}/rotary/kernels", f"{OPS}/rotary/op"
    test = "rotary.py::test_{}".format

    def values(convention: str, shape: str) -> str:
        return test(f"values_and_gradients[{convention}-{shape}-torch.float32]")

    heads, masked, partial = "shape1-of_positions1-64", "shape2-of_positions2-40", "shape3-of_positions3-12"
    yield at(
        file, values("half", heads), "rotary: the gradient is turned on", ".to(tl.float32) * sign", ".to(tl.float32)"
    )
    yield at(op, values("half", heads), "rotary: the angle keeps its sign", "-ctx.sign)", "ctx.sign)")
    yield at(
        file,
        values("half", heads),
        "rotary: every program has the first heads",
        "heads = tl.program_id(1) * BLOCK_H + ",
        "heads = ",
    )
    yield at(
        file,
        values("half", masked),
        "rotary: the second half begins behind the tile",
        "second = tl.load(x_ptrs + PAIRS + pairs",
        "second = tl.load(x_ptrs + BLOCK_R + pairs",
    )
    yield at(
        file,
        values("interleaved", heads),
        "rotary: neighbours are turned the other way",
        "tl.join(first * cos - second * sin, second * cos + first * sin)",
        "tl.join(first * cos + second * sin, second * cos - first * sin)",
    )
    yield at(
        file,
        values("half", partial),
        "rotary: what is not turned is not copied",
        "tl.static_range(R, K, 2 * BLOCK_R)",
        "tl.static_range(K, K, 2 * BLOCK_R)",
    )
    yield at(
        file,
        values("half", partial),
        "rotary: strides are taken for whole vectors",
        "math.gcd(16 // x.element_size(), *of_x)",
        "16 // x.element_size()",
    )
    yield at(
        file,
        values("half", "shape7-of_positions7-16"),
        "rotary: every text has the positions of the first",
        "b * stride_positions_b + t",
        "b * 0 + t",
    )
    yield at(
        file,
        test("heads_of_a_joint_projection[half]"),
        "rotary: heads are neighbours",
        "heads.to(tl.int64)[None, :, None] * stride_x_h",
        "heads.to(tl.int64)[None, :, None] * (K // ALIGN)",
    )
    yield at(
        file,
        test("positions_that_are_no_row_are_not_a_number"),
        "rotary: rows before the first are read",
        "((positions >= 0) & (positions < P))",
        "(positions < P)",
    )
    yield at(
        file,
        test("the_first_heads_are_not_copied"),
        "rotary: the heads of a projection are copied",
        "x, cos, sin = inner_contiguous(x)",
        "x, cos, sin = x.contiguous()",
    )
    yield at(
        op,
        test("x_is_not_saved_for_backward"),
        "rotary: x is kept",
        "ctx.save_for_backward(*tables)",
        "ctx.save_for_backward(*tables, inputs[0])",
    )
