# SPDX-License-Identifier: MIT OR Apache-2.0
"""Messages that call a function on the receiving rank, like entry methods in Charm++. The wire format is that of mpgpu/entry.hpp."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any, TypeVar

from ._memory import memory_of
from ._message import ANY, Message, MessageInfo, Messenger, Receive, _tags
from ._streams import Stream
from .errors import ArgumentError, MessageTruncated
from .typing import Array, StreamLike

# Wire format of a header message: its metadata, and the descriptor and size of each part (array) with which its data begin.
_MARK = 0x7972746E65706D00
_HEAD = struct.Struct("=QII")
_PART = struct.Struct("=64sQ")
_MOST_METADATA = 256

_Function = Callable[["Arrival"], Awaitable[None]]
Entry = TypeVar("Entry", bound=_Function)


class Arrival:
    """Message that has arrived. It is passed to the function that is registered for its tag. A message consists of arguments (bytes) and
    parts (arrays).
    """

    __slots__ = ("_descriptors", "_messenger", "_placed", "arguments", "rank", "sizes", "tag")

    rank: int
    """Rank that sent the message."""
    tag: int
    """Tag of the message."""
    arguments: bytes
    """Arguments, which were sent in addition to the parts (arrays)."""
    sizes: tuple[int, ...]
    """Size of each part, bytes."""

    def __init__(self, messenger: Messenger, info: MessageInfo, head: bytes | None) -> None:
        self._messenger = messenger
        self.rank, self.tag = info.rank, info.tag
        self._descriptors: list[bytes] | None = None
        self._placed = asyncio.Event()
        if head is None:
            self.arguments, self.sizes = info.metadata, (info.bytes,) if info.bytes else ()
            return
        _, count, size = _HEAD.unpack(info.metadata)
        if len(head) != count * _PART.size + size:
            raise ArgumentError(f"a message of rank {self.rank}, tag {self.tag}: {len(head)} bytes are not the header of an entry message")
        table = [_PART.unpack_from(head, at * _PART.size) for at in range(count)]
        self.arguments = head[count * _PART.size :]
        self.sizes = tuple(size for _, size in table)
        self._descriptors = [descriptor for descriptor, _ in table]

    def into(self, *parts: Array, stream: StreamLike | None = None) -> Awaitable[list[MessageInfo]]:
        """Receives the parts of the message into the arrays ``parts``, on devices or the host, after earlier work in ``stream``. ``await``
        the result before you read the arrays. The receive starts immediately.

        If this message was sent by :meth:`Messenger.send` or has one part, further messages for the same function are delayed until this
        method is called.

        Raises:
            The exceptions of :meth:`Messenger.receive`.
        """
        if len(parts) != len(self.sizes) or self._placed.is_set():
            raise ArgumentError(
                f"{len(parts)} arrays: the message has {len(self.sizes)} parts; pass one array for each part", argument="parts"
            )
        if self._descriptors is None:
            moving = [self._messenger.receive(x, self.rank, self.tag, stream) for x in parts]
        else:
            moving = [self._messenger._fetch(of, x, stream) for of, x in zip(self._descriptors, parts)]
        self._placed.set()
        return asyncio.gather(*(_ended(one) for one in moving))


async def _ended(message: Receive) -> MessageInfo:
    return await message


class SentEntry:
    """Request for the completion of :meth:`Entries.send`. ``await`` it, or call :meth:`synchronize`, before the sent arrays are reused."""

    __slots__ = ("_messages",)

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages

    def synchronize(self) -> None:
        """Blocks until the memory of all sent arrays may be reused. Raises the exceptions of :meth:`Message.synchronize`."""
        for message in self._messages:
            message.synchronize()

    def __await__(self) -> Generator[Any, None, None]:
        for message in self._messages:
            yield from message.__await__()


class Entries:
    """Table of functions that are called for messages with given tags.

        entries = mpgpu.Entries(messenger)

        @entries.on_message(BAR)
        async def bar(message):                       # called when the message has arrived
            grid = torch.empty(message.sizes[0] // 4, device="cuda")
            await message.into(grid)                  # sets the destination and waits for the data
            ...

        server = asyncio.create_task(entries.serve())
        await entries.send(rank, BAR, b"arguments", [grid])

    Use an object in one event loop only. Do not receive messages with these tags in any other way.
    """

    __slots__ = ("_control", "_functions", "_messenger")

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        # Stream for header messages, because they need not wait for the program's work.
        self._control = Stream(0, context=messenger.context)
        self._functions: list[tuple[int, int, _Function]] = []

    def on_message(self, tag: int, *, mask: int = 2**63 - 1) -> Callable[[Entry], Entry]:
        """Registers the decorated ``async`` function for messages whose tag equals ``tag`` in all bits that are set in ``mask``."""

        # Invalid tags are rejected here, not in `serve`.
        _tags(tag, mask)

        def register(function: Entry) -> Entry:
            self._functions.append((tag, mask, function))
            return function

        return register

    def send(self, rank: int, tag: int, arguments: bytes = b"", parts: Sequence[Array] = (), stream: StreamLike | None = None) -> SentEntry:
        """Sends a message with ``arguments`` and ``parts`` to rank ``rank``. Does not block.

        Args:
            rank, tag, stream: arguments with the same meaning, and the same errors, as for :meth:`Messenger.send`.
            arguments: any number of bytes. They are read during the call.
            parts: arrays on devices or the host, as many as the receiving function expects.
        """
        messenger = self._messenger
        if len(parts) <= 1 and len(arguments) <= _MOST_METADATA and all(memory_of(x, "a part").nbytes for x in parts):
            part: Array = parts[0] if parts else bytearray()
            return SentEntry([messenger.send(part, rank, tag, stream if parts else self._control, metadata=arguments)])
        described: list[tuple[bytes, int, Message]] = []
        try:
            for x in parts:
                described.append(messenger._describe(x, stream))
            table = b"".join(_PART.pack(descriptor, size) for descriptor, size, _ in described)
            # The request is dropped. The message continues and keeps its memory alive.
            messenger.send(table + arguments, rank, tag, self._control, metadata=_HEAD.pack(_MARK, len(described), len(arguments)))
        except BaseException:
            for _, _, released in described:
                released.cancel()  # no rank will fetch this part
            raise
        return SentEntry([released for _, _, released in described])

    async def serve(self) -> None:
        """Receives messages and calls the registered functions, until the task is cancelled. Raises the exceptions of these functions."""
        loop = asyncio.get_running_loop()
        failed: asyncio.Future[None] = loop.create_future()
        tasks: set[asyncio.Task[None]] = set()

        def ended(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None and not failed.done():
                failed.set_exception(error)

        def begin(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            task = loop.create_task(work)
            tasks.add(task)
            task.add_done_callback(ended)
            return task

        for tag, mask, function in self._functions:
            begin(self._serve(tag, mask, function, begin))
        try:
            await failed
        finally:
            left = list(tasks)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _serve(
        self, tag: int, mask: int, function: _Function, begin: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    ) -> None:
        while True:
            # A receive of 0 bytes returns the properties of the next message and leaves the message in the queue.
            coming = self._messenger.receive(bytearray(), ANY, tag, self._control, mask=mask)
            try:
                info = await coming
            except MessageTruncated:
                found = coming.info
                if found is None:
                    raise
                info = found
            head = None
            if len(info.metadata) == _HEAD.size and _HEAD.unpack(info.metadata)[0] == _MARK:
                head = bytearray(info.bytes)
                await self._messenger.receive(head, info.rank, info.tag, self._control)
            arrival = Arrival(self._messenger, info, None if head is None else bytes(head))
            task = begin(_called(function, arrival))
            if head is None and arrival.sizes:
                placed = asyncio.ensure_future(arrival._placed.wait())
                await asyncio.wait([task, placed], return_when=asyncio.FIRST_COMPLETED)
                placed.cancel()


async def _called(function: _Function, arrival: Arrival) -> None:
    await function(arrival)
    if arrival.sizes and not arrival._placed.is_set():
        parts = len(arrival.sizes)
        raise ArgumentError(f"a message of rank {arrival.rank}, tag {arrival.tag}: the called function has not placed all {parts} parts")
