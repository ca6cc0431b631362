"""GPUs for tests on machines without one: they compute, on the host. What tests/fakegpu counts, this one runs.

A process whose variables are `environment(...)` (run.py) finds as many GPUs as it asks for: its CPU build of torch
has gpu.cpp loaded before it (machine/sitecustomize.py), torch.cuda answers (cuda.py), NCCL is there (nccl.cpp), and
`nvidia-smi` lists the cards. Whole commands of duoka run so and are held against a CPU's numbers: a tensor that was
left on the host, a look at memory without a copy, a collective over host memory end them as they would on a GPU.

It cannot tell speed, order between streams, a kernel's limits or its rounding; Triton, Liger and bitsandbytes do not
run on it.
"""
