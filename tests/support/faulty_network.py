"""Network links that can be broken: TCP proxies that cut, hold back, delay, lose and throttle what passes.

They do what a broken network does to TCP, seen from its ends: a lost packet comes late, and all behind it; a direction
without packets is silent, and what was sent meanwhile arrives when it works again; a reset loses what was under way.
"""

import asyncio
import contextlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

HOST = "127.0.0.1"
UP, DOWN = "up", "down"
"""Directions: to the broker, and from it."""
_RETRANSMISSION_S = 0.2
"""Least time after which TCP sends a lost packet again; it doubles with every loss."""
_PACKET_BYTES = 1448
_CHUNK_BYTES = 16 * 1024


@dataclass(frozen=True)
class Weather:
    """State of a link."""

    refused: bool = False
    """Connections are reset, and none is accepted."""
    held: frozenset[str] = frozenset()
    """Directions in which nothing arrives for now."""
    delay_s: float = 0.0
    """Time on the way, each way."""
    loss: float = 0.0
    """Share of packets lost."""
    bytes_per_s: float = float("inf")


FINE = Weather()


class Link:
    """One address through which clients reach a port of this machine."""

    def __init__(self, target_port: int, seed: int = 0) -> None:
        """Listen at a free port, from now until `close`."""
        self._target_port = target_port
        self._rng = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._weather = FINE
        self._changed = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self.passed_bytes = 0
        self._thread = threading.Thread(target=self._loop.run_forever, name="link", daemon=True)
        self._thread.start()
        self._server = self._wait_for(asyncio.start_server(self._accept, HOST, 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    @property
    def address(self) -> str:
        """Address for clients."""
        return f"{HOST}:{self.port}"

    def become(self, weather: Weather) -> None:
        """Change the state of the link."""
        self._wait_for(self._become(weather))

    @contextmanager
    def during(self, weather: Weather) -> Iterator[None]:
        """Put the link into a state while the block runs."""
        self.become(weather)
        try:
            yield
        finally:
            self.become(FINE)

    def close(self) -> None:
        """Stop listening, and end every connection."""
        self._wait_for(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _wait_for(self, work):  # type: ignore[no-untyped-def]
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _become(self, weather: Weather) -> None:
        self._weather = weather
        self._changed.set()
        self._changed = asyncio.Event()
        if weather.refused:
            self._reset()

    def _reset(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _close(self) -> None:
        self._server.close()
        self._reset()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._weather.refused:
            writer.transport.abort()
            return
        try:
            there_reader, there = await asyncio.open_connection(HOST, self._target_port)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, there}
        self._writers |= ends
        pumps = {
            asyncio.create_task(self._pump(reader, there, UP)),
            asyncio.create_task(self._pump(there_reader, writer, DOWN)),
        }
        self._pumps |= pumps
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.transport.abort()
        for pump in pumps:
            pump.cancel()
        self._writers -= ends
        self._pumps -= pumps

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: str) -> None:
        """Pass on what arrives in one direction, in order."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        delivery = asyncio.create_task(self._deliver(under_way, writer, direction))
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(_CHUNK_BYTES):
                    await under_way.put((self._loop.time(), data))
            await under_way.put((self._loop.time(), b""))
            await delivery
        finally:
            delivery.cancel()

    async def _deliver(
        self, under_way: "asyncio.Queue[tuple[float, bytes]]", writer: asyncio.StreamWriter, direction: str
    ) -> None:
        with contextlib.suppress(OSError):
            while True:
                sent_s, data = await under_way.get()
                weather = self._weather
                await asyncio.sleep(max(0.0, sent_s + weather.delay_s - self._loop.time()) + self._lateness(len(data)))
                while direction in self._weather.held:
                    await self._changed.wait()
                if not data:
                    return
                self.passed_bytes += len(data)
                writer.write(data)
                await writer.drain()

    def _lateness(self, size: int) -> float:
        """Time that losses and the bandwidth of the link cost."""
        weather = self._weather
        late_s = size / weather.bytes_per_s
        for _packet in range(0, size, _PACKET_BYTES):
            again_s = _RETRANSMISSION_S
            while self._rng.random() < weather.loss:
                late_s += again_s
                again_s *= 2
        return late_s
