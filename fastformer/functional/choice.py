"""Who runs a call: the fused kernel or the reference. The only place where an implementation is chosen."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fastformer import fused
from fastformer.backend import BackendError, get_backend
from fastformer.fused.attention import limit as attention_limit
from fastformer.fused.differentiation import Formula

OPS = (
    "attention",
    "attention_with_weights",
    "packed_attention",
    "layer_norm",
    "rms_norm",
    "dropout_add_layer_norm",
    "feed_forward",
    "embedding",
    "linear_cross_entropy",
)


def runs_fused(op: str, x: Tensor, limit: Callable[[], str | None] | None = None) -> bool:
    """Choose the implementation of one call: whether the fused kernel takes it.

    Args:
        op: its name in OPS.
        x: the tensor that decides.
        limit: says why this call is beyond the kernel, if its arguments are.

    Raises:
        BackendError: backend "triton" was asked for and cannot run this.
    """
    choice = get_backend()
    if choice == "reference" or (choice == "auto" and x.is_cpu):  # the latter without asking why
        return False
    reason = fused.unsupported(op, x)
    if reason is None and limit is not None:
        reason = limit()
    if reason is not None and choice == "triton":
        raise BackendError(f"backend 'triton' was asked for, but {reason}")
    return reason is None


def check_backend(x: Tensor) -> None:
    """Raise what the first call of any op would, so that nothing is begun that a backend could never do.

    Args:
        x: `[..., K]` as attention would see it: its device, its dtype and its head size K count.

    Raises:
        BackendError: backend "triton" was asked for and cannot run an op.
        ValueError: the environment variable names no backend.
    """
    for op in OPS:
        runs_fused(op, x, lambda: attention_limit(x, x, x))


def eager_formula(plain: Callable[..., Tensor | tuple[Tensor, ...]], *others: Tensor | None) -> Formula | None:
    """Hand an op's plain formula to its fused Function, for second derivatives; torch.compile has none.

    Args:
        plain: a function of the op's differentiable inputs.
        others: the tensors of the caller that it uses besides, which must be unchanged by then.
    """
    if torch.compiler.is_compiling():
        return None
    # Tensors made in inference mode have no version, and may not be changed where autograd could notice.
    versions = [(x, x._version) for x in others if x is not None and not x.is_inference()]
    if not versions:
        return plain

    def unchanged(*inputs: Tensor | None) -> Tensor | tuple[Tensor, ...]:
        for x, version in versions:
            if x._version != version:
                raise RuntimeError(
                    f"a tensor of shape {list(x.shape)}, needed for a second derivative, was modified by an inplace "
                    f"operation: it is at version {x._version}; expected version {version} instead"
                )
        return plain(*inputs)

    return unchanged


def explain(subject: nn.Module | Tensor) -> str:
    """Say which implementation would run each op on a tensor, or on a module's parameters, and why.

    Args:
        subject: a tensor, or a module (its first parameter stands for it).

    Returns:
        One line an op: `layer_norm: reference (…reason…)`.

    Raises:
        TypeError: subject is neither.
    """
    if isinstance(subject, nn.Module):
        x = next(subject.parameters(), torch.empty(0))
    elif isinstance(subject, Tensor):
        x = subject
    else:
        raise TypeError(f"subject must be a module or a tensor, not {type(subject).__name__}")
    choice = get_backend()
    lines = []
    for op in OPS:
        reason = "chosen" if choice == "reference" else fused.unsupported(op, x)
        if reason is None:
            lines.append(f"{op}: triton")
        elif choice == "triton":
            lines.append(f"{op}: raises ({reason})")
        else:
            lines.append(f"{op}: reference ({reason})")
    return "\n".join(lines)
