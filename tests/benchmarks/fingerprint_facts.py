"""Run by test_codegen.py in a process of its own, without the interpreter: fingerprints of one compilation, changed."""

import json
import os

import triton
import triton.language as tl
from codegen_faults import faults

from benchmarks.codegen import compilation
from benchmarks.codegen.compilation import find_cases, fingerprint, record

cases = [(name, call) for name, call in find_cases("codegen_faults") if name == "faults/sound attention"]
(row,), _ = record(cases, 90)
job, found = row.job, {}


def note(name, **changed):
    compilation._text_key.cache_clear()
    found[name] = fingerprint(job._replace(**changed))


def note_edited(name, function, old, new):
    source = function.src
    assert old in source
    function._unsafe_update_src(source.replace(old, new))
    note(name)
    function._unsafe_update_src(source)


note("the same")
note_edited("the kernel", faults.attention_kernel, "128)", "64)")
note_edited("a comment of the kernel", faults.attention_kernel, "n = start", "# a comment\n        n = start")
note_edited("a helper", faults.attention_weights, "exp2", "exp")
note_edited("a helper of the helper", faults.scaled, "SCALE", "2 * SCALE")
faults.SCALE = tl.constexpr(0.25)
note("a constant of the module")
faults.SCALE = tl.constexpr(0.5)
for name, value in (("num_warps", 8), ("num_stages", 3), ("enable_fp_fusion", False)):
    assert job.options[name] != value
    note(name, options=job.options | {name: value})
note("a constant", constants={key: 32 if value == 64 else value for key, value in job.constants.items()})
note("a dtype", signature=job.signature | {"q_ptr": "*fp16"})
note("divisibility", attributes={})
note("the architecture", arch=80)
os.environ["DISABLE_LLVM_OPT"] = "1"
note("a setting of the compiler")
del os.environ["DISABLE_LLVM_OPT"]
version, triton.__version__ = triton.__version__, "another"
note("Triton")
triton.__version__ = version
reader, compilation.reader = compilation.reader, faults  # another file
note("what reads the result")
compilation.reader = reader
faults.scaled.starting_line_number += 7
faults.attention_kernel.starting_line_number += 7
note("the lines")
tools = triton.backends.nvidia.compiler
tools.get_ptxas_version = lambda arch: "another"
note("ptxas")
print(json.dumps(found))
