"""The same kernels of vLLM on every CPU. To be imported before vLLM, in each process that runs an engine.

With AMX, a matrix product rounds a row differently beside other rows, so a prompt whose beginning is known is answered differently from one
that is computed as a whole, up to another token, with or without offloading. Tests that compare answers bit for bit need kernels that do
not. What AMX writes into a cache is looked at in `test_certified.py`, which calls the operation itself.
"""

from __future__ import annotations

import os

# oneDNN reads it when it is first used. Both have to say so: vLLM's AMX kernels need the permission that oneDNN's ask the system for.
os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"

import torch

torch.cpu._is_amx_tile_supported = lambda: False
