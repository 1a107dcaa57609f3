"""Deliberate faults in the kernels and their wrappers, each of which a test must catch.

    python -m tests.kernels.mutations                               # all, `make faults`
    python -m tests.kernels.mutations --jobs 2 --only embedding     # those with a word in their name or file

A copy of the repository gets one fault at a time; the test that stands beside the fault must then fail by an assertion.
A fault that survives is a gap in the tests. All of it runs in Triton's interpreter, also where there is a GPU; faults
that it cannot show, such as two blocks that write one row, run compiled (tests/compiled), after their test has passed
in the interpreter with the fault.
"""

from tests.kernels.mutations import (
    attention_backward,
    attention_call,
    attention_distances,
    attention_forward,
    attention_scores,
    attention_values,
    embedding,
    feed_forward,
    linear_cross_entropy,
    norms,
    rotary,
)

FAULTS = [
    *attention_forward.faults(),
    *attention_scores.faults(),
    *attention_backward.faults(),
    *attention_call.faults(),
    *attention_values.faults(),
    *attention_distances.faults(),
    *norms.faults(),
    *feed_forward.faults(),
    *linear_cross_entropy.faults(),
    *embedding.faults(),
    *rotary.faults(),
]
