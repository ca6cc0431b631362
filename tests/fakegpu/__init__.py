"""A GPU for tests on machines without one: training steps on "cuda:0" in a CPU build of torch, counted, not computed.

`run_on_fake_gpu` (run.py) calls functions of steps.py in a process of its own, whose torch has guard.cpp loaded before
it, torch.cuda answering for one device (cuda.py), and a dispatch mode (mode.py) in which tensors on the GPU are fake
and those on the host are real. It counts kernels, waits of the host and copies, each with the line that asked for it.
It cannot tell speed, memory of a real allocator, or a kernel's limits.
"""
