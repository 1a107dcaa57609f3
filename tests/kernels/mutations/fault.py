"""What a deliberate fault is."""

from typing import NamedTuple

KERNELS, OPS = "kernels/fastformer_kernels", "fastformer/functional"
EXECUTED = r"tests\.compiled\.ptx\.machine\.KernelFault: \w+: "  # how what runs compiled fails


class Fault(NamedTuple):
    name: str
    file: str
    old: str  # occurs exactly once in the file
    new: str
    test: str  # which must fail
    failure: str = ""  # how it fails, where that is no assertion
    compiled: str = ""  # for what GPU, as only compiled code shows it; else it is interpreted


def at(file: str, test: str, name: str, old: str, new: str, failure: str = "", compiled: str = "") -> Fault:
    return Fault(name, f"{file}.py", old, new, f"tests/kernels/test_fused_{test}", failure, compiled)
