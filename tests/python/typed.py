# SPDX-License-Identifier: MIT OR Apache-2.0
"""Program whose types `mypy --strict` checks with the installed package (tests/python/run). Lines that must be refused have an ignore
comment, which mypy reports if it is not needed."""

from __future__ import annotations

import mmap

import mpgpu
import numpy
import numpy.typing

array: numpy.typing.NDArray[numpy.float32] = numpy.zeros(4, numpy.float32)
buffer: mpgpu.Buffer = mpgpu.empty((2, 2), "f4", "cuda:0")
mpgpu.empty(4, numpy.float32, mpgpu.HOST)
mpgpu.empty(4, numpy.dtype("f4"), "cpu")
mpgpu.empty(4, float)
mpgpu.empty(4, 4.5)  # type: ignore[arg-type]
mpgpu.empty(4, device=1.5)  # type: ignore[arg-type]

for memory in (array, bytearray(16), memoryview(bytearray(16))):
    mpgpu.copy(buffer, memory)
mpgpu.copy(mmap.mmap(-1, 16), b"0123456789abcdef").synchronize()
mpgpu.copy(buffer, [1, 2])  # type: ignore[arg-type]
mpgpu.copy(buffer, 3)  # type: ignore[arg-type]

stream = mpgpu.Stream("cuda:0")
plan = mpgpu.Plan([(buffer, array)], relay_gpus=["cuda:1", 2], as_bytes=True)
plan.execute(stream).synchronize()
plan.execute(0)
plan.execute("default")  # type: ignore[arg-type]

mpgpu.copy_blocks(buffer, array, [0, 1], numpy.arange(2), stream=stream, multiprocessors=2, paced=False).synchronize()
mpgpu.copy_blocks([buffer, buffer], [array, array], range(2), buffer, context=plan.context)
mpgpu.copy_blocks(buffer, array, 3)  # type: ignore[arg-type]
mpgpu.copy_blocks(buffer, array, ["first"])  # type: ignore[list-item]
mpgpu.copy_blocks([1, 2], array)  # type: ignore[list-item]


class Alone:
    """Communicator of a single rank."""

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1

    def allgather(self, sendobj: bytes) -> list[bytes]:
        return [sendobj]


node = mpgpu.Node(Alone(), devices=["cuda:0"])
mpgpu.Node(object())  # type: ignore[arg-type]
node.plan_exchange([mpgpu.send_to(0, array), mpgpu.receive_from(0, buffer)])


async def messages() -> int:
    channel = mpgpu.Channel(node, 0)
    sent = channel.send(array)
    info = await channel.receive(buffer)
    await sent
    return info.bytes
