"""One launch that splits a sum over programs: the last to arrive adds the parts, in a fixed order.

Each program writes its part to a workspace, then counts itself in. Who comes
last depends on timing; what it adds, and in which order, does not. A second
launch would cost more than the small sums take.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from triton_kernel_lab.ops._triton import tl, triton

__all__ = ["arrive", "counters", "lasting"]

# What programs of captured graphs count in: enough for tens of thousands of launches, 4 MiB.
_CAPTURED = 1 << 20
_streams: dict[tuple[torch.device, int], torch.Tensor] = {}
_arenas: dict[torch.device, tuple[torch.Tensor, int]] = {}


@triton.jit
def arrive(counter_ptr, parts):
    """Count this program in; whether it is the last of ``parts``, which then sees all that the others stored.

    The last one puts the counter back to zero for the next launch.
    """
    # The atomic is made by one thread: all others must have stored before it.
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == parts - 1
    if last:
        tl.store(counter_ptr, 0)
    # No thread reads the parts before that one has acquired them.
    tl.debug_barrier()
    return last


def counters(device: torch.device, n: int) -> torch.Tensor:
    """int32 [n] zeros on ``device`` for one launch on the current stream, which must leave them zero.

    Launches of one stream follow each other and share the same memory. A graph
    may later run beside anything, so a launch that is being captured gets
    counters of its own, out of memory that was set to zero before.
    """
    if device.type != "cuda":
        return torch.zeros(n, dtype=torch.int32, device=device)
    if _capturing(device):
        return _private(device, n)
    # The number alone: PyTorch's object round it costs the host a microsecond.
    stream = triton.runtime.driver.active.get_current_stream(device.index)
    kept = _streams.get((device, stream))
    if kept is None or kept.numel() < n:
        if device not in _arenas:
            _arenas[device] = lasting(device, lambda: torch.zeros(_CAPTURED, dtype=torch.int32, device=device)), 0
        size = max(n, 4096)
        kept = lasting(device, lambda: torch.zeros(size, dtype=torch.int32, device=device))
        _streams[device, stream] = kept
    return kept


def lasting(device: torch.device, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What ``make`` allocates on the current stream of a device, to be kept from call to call.

    While torch.compile warms up a CUDA graph, all that the thread allocates
    belongs to that graph and has to be gone afterwards. Another thread's does not.
    """
    if device.type != "cuda":
        return make()
    stream = torch.cuda.current_stream(device)

    def made() -> torch.Tensor:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(made).result()


def _capturing(device: torch.device) -> bool:
    """Whether the current stream of a device, which need not be the current one, is being captured."""
    if device.index in (None, torch.cuda.current_device()):
        return bool(torch.cuda.is_current_stream_capturing())
    with torch.cuda.device(device):
        return bool(torch.cuda.is_current_stream_capturing())


def _private(device: torch.device, n: int) -> torch.Tensor:
    """Counters that no other launch uses, for a launch under capture."""
    arena, used = _arenas.get(device, (None, 0))
    if arena is None or used + n > arena.numel():
        # Becomes a node of the graph that sets them to zero at each replay: right, and slower.
        return torch.zeros(n, dtype=torch.int32, device=device)
    _arenas[device] = arena, used + n
    return arena[used : used + n]
