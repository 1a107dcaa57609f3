"""Tests of attention that several faults share."""

SMALL = "attention.py::test_shapes_and_causality[{}-shape1-dtype0]"
TILES = "attention.py::test_shapes_and_causality[{}-shape2-dtype0]"
MASKS = "attention_backward.py::test_gradients_use_the_mask_of_the_forward_pass[False-{}]"


def rule(name: str) -> str:
    return f"attention.py::test_rules[{name}]"
