"""Runs a function in two processes that talk through gloo, on the CPU."""

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, multiprocessing


def in_two_processes(work: Callable[[int, Path], dict], folder: Path) -> dict:
    """Calls ``work(rank, folder)`` in two new processes, and returns what the first returned."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(_process, args=(work, folder, port), nprocs=2)
    return torch.load(folder / "result.pt")


def _process(rank: int, work: Callable[[int, Path], dict], folder: Path, port: int) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    result = work(rank, folder)
    if rank == 0:
        torch.save(result, folder / "result.pt")
    distributed.barrier()
    distributed.destroy_process_group()
