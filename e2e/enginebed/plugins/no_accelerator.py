"""A vLLM plugin for machines without an accelerator.

MooncakeConnector asks torch for the current device and makes CUDA events, also where KV lies in host memory.
Here there is one device, 0, and an event is over when it is recorded, which is true of work on a CPU.

And vLLM's processes wait for each other in a busy loop, until a second after the last message. Where engines
have no cores of their own these loops take most of them, so here they sleep between two looks.
"""


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


def _sleep_in_busy_loops() -> None:
    import time

    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(0.0005)
