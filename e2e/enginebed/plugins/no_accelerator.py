"""A vLLM plugin for machines without an accelerator.

MooncakeConnector asks torch for the current device and makes CUDA events, also where KV lies in host memory.
Here there is one device, 0, and an event is over when it is recorded, which is true of work on a CPU.
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
