"""Execute compiled kernels on a CPU: the PTX that Triton makes of them, run with numpy, every access checked.

Between a source, which the interpreter runs, and a GPU lie layouts, vector loads, asynchronous copies, barriers and
wgmma. `text` reads PTX; `program` (with `emitter`, `opcodes`, `arithmetic`) makes a Python function of each basic
block; `machine` launches a grid, and runs all threads of some blocks in step, on `global_memory` and `shared_memory`,
with `warps` and `wgmma`; `driver` is what Triton launches with.

It differs from a GPU in what is not specified: approximations (ex2, rsqrt) are rounded from more exact values, tensor
cores add in fp32, warps run in step, and threads of one warp are never in a race. It knows the instructions that Triton
makes of fastformer's kernels for sm_80, sm_89 and sm_90; any other one raises `PtxError`. It says nothing about time,
nor about what ptxas makes of the PTX.
"""
