"""How torch is loaded. Each test has a process of its own, where nothing was called before."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

# Children start where MKL is loaded and nothing of its vector library was called, but by the backend; without that call
# about one in thirty gets roots that are right to 12 bits.
RACE = """
import os, threading
import numpy as np
import torch
from flagos_backend.process import torch_loading

torch_loading.load()
torch.ones(2, 2) @ torch.ones(2, 2)
x = torch.from_numpy(np.arange(2, 6, dtype=np.float32))
true = np.sqrt(x.double().numpy())

def child():
    roots, barrier = [None] * 3, threading.Barrier(3)
    def root(thread):
        barrier.wait()
        roots[thread] = torch.sqrt(x)
    threads = [threading.Thread(target=root, args=(i,)) for i in range(3)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    os._exit(any(np.abs(r.numpy() / true - 1).max() > 1e-6 for r in roots))

wrong = 0
for _ in range(400):
    process = os.fork()
    if not process: child()
    wrong += os.waitpid(process, 0)[1] != 0
print(wrong)
"""


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL, whose first call it is about")
def test_threads_that_first_meet_in_the_vector_library_compute_right() -> None:
    process = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == "0"
