"""A vLLM plugin for machines without an accelerator.

MooncakeConnector asks torch for the current device and makes CUDA events, also where KV lies in host memory.
Here there is one device, 0, and an event is over when it is recorded, which is true of work on a CPU.

And vLLM's processes wait for each other in a busy loop, until a second after the last message. Where engines
have no cores of their own these loops take most of them, so here they sleep between two looks. Mooncake waits
so for each KV transfer that it sends. Two of these loops take both cores of a small machine, so here an
engine sends one transfer after another.
"""

_WAIT_S = 1.0
"""For how long a transfer waits for the one before it, whose receiver may have stopped."""


class Event:
    """`torch.cuda.Event` of work that has ended."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record(self, *_: object) -> None:
        pass

    def wait(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def register() -> None:
    """Prepare a process of vLLM; every one calls this at its start."""
    import torch

    if not torch.accelerator.is_available():
        torch.accelerator.current_device_index = lambda: 0
        torch.cuda.Event = Event
        _sleep_in_busy_loops()
        _send_one_after_another()


def _sleep_in_busy_loops() -> None:
    import time

    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(0.0005)


def _send_one_after_another() -> None:
    from threading import Lock

    try:
        from mooncake.engine import TransferEngine
    except ImportError:
        return  # an engine that hands nothing over
    write, sending = TransferEngine.batch_transfer_sync_write, Lock()

    def alone(*args: object) -> int:
        mine = sending.acquire(timeout=_WAIT_S)
        try:
            return write(*args)
        finally:
            if mine:
                sending.release()

    TransferEngine.batch_transfer_sync_write = alone
