"""Compares the engine model's shape with kernels that ran on a GPU.

    measure.py, on a machine with a GPU ─▶ h200.json ─▶ fit ─▶ cli: a table

`measure` needs PyTorch with CUDA and nothing of Perilune, so that one file can be copied to such a machine.
"""
