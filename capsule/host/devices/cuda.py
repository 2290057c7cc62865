"""Which devices a CUDA program sees, asked of the CUDA driver; no context is made, so no memory is taken."""

from __future__ import annotations

import ctypes
import uuid
from typing import Any

from capsule.core.errors import MachineError

STUB_LIBRARY = 34
NO_DEVICE = 100


def visible_uuids(cuda: Any = None) -> tuple[str, ...] | None:
    """Return the UUIDs of the devices that this process's environment lets CUDA see, as NVML writes them.

    None where the CUDA driver's library is absent. The environment counts as it is at the first call of a process.

    Raises:
        MachineError: the driver is there and does not answer.
    """
    try:
        cuda = cuda or ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = cuda.cuInit(0)
    if number == STUB_LIBRARY:
        return None
    if number == NO_DEVICE:
        return ()
    _check("cuInit", number)
    count = ctypes.c_int()
    _check("cuDeviceGetCount", cuda.cuDeviceGetCount(ctypes.byref(count)))
    return tuple(_uuid(cuda, ordinal) for ordinal in range(count.value))


def _uuid(cuda: Any, ordinal: int) -> str:
    """Return one device's UUID; of a MIG instance its own, which only the second version of the call gives."""
    device = ctypes.c_int()
    _check("cuDeviceGet", cuda.cuDeviceGet(ctypes.byref(device), ordinal))
    name = ctypes.create_string_buffer(256)
    _check("cuDeviceGetName", cuda.cuDeviceGetName(name, len(name), device))
    whole = _ask(cuda, "cuDeviceGetUuid", device)
    try:
        own = _ask(cuda, "cuDeviceGetUuid_v2", device)
    except AttributeError:
        own = whole  # a driver from before 11.4
    is_instance = own != whole or b" MIG " in name.value
    return f"{'MIG' if is_instance else 'GPU'}-{uuid.UUID(bytes=own)}"


def _ask(cuda: Any, function: str, device: ctypes.c_int) -> bytes:
    answer = (ctypes.c_ubyte * 16)()
    _check(function, getattr(cuda, function)(ctypes.byref(answer), device))
    return bytes(answer)


def _check(function: str, number: int) -> None:
    if number != 0:
        raise MachineError(
            f"the CUDA driver does not answer {function}: error {number}",
            hint="`nvidia-smi` says more about the driver and the device",
        )
