"""Spreads jobs over child processes, none of which outlives an error, Ctrl-C or kill -9 of this process."""

import itertools
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from rollstream.topics.errors import RollstreamError

J = TypeVar("J")
R = TypeVar("R")


class ProcessLost(RollstreamError):
    """A child process ended without a result: it was killed by the system or by a user."""

    exit_code = 1


def spread(work: Callable[[J], R], jobs: Sequence[J], processes: int) -> Iterator[R]:
    """Yield the result of `work` for each job, in the order they finish, with at most `processes` processes.

    Function and jobs must be picklable. An exception of `work` is raised here, with its traceback as a note; after
    that, or once the caller stops iterating, no further job starts.
    """
    if min(processes, len(jobs)) < 2:
        yield from map(work, jobs)
        return
    waiting = iter(jobs)
    running: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(min(processes, len(jobs))):
            pipe, process = start_child(partial(_serve, work))
            running[pipe] = process
        for pipe, job in zip(running, waiting, strict=False):
            _send(pipe, running[pipe], job)
        busy = set(running)
        while busy:
            ready = connection.wait(list(busy))
            for pipe in [pipe for pipe in running if pipe in ready]:
                answer = _receive(pipe, running[pipe])
                busy.discard(pipe)
                for job in itertools.islice(waiting, 1):
                    _send(pipe, running[pipe], job)
                    busy.add(pipe)
                yield answer
    finally:
        for process in running.values():
            process.kill()
            process.join()


def run_apart(work: Callable[[J], R], job: J) -> R:
    """Return the result of `work` in a child process. An exception is raised as by `spread`, ProcessLost if it ends."""
    pipe, process = start_child(partial(_serve, work))
    try:
        _send(pipe, process, job)
        answer: R = _receive(pipe, process)
    finally:
        process.kill()
        process.join()
    return answer


def start_child(serve: Callable[[Connection], object]) -> tuple[Connection, BaseProcess]:
    """Start a process that calls `serve`, which must be picklable, with its end of a pipe; return the other end.

    It ends when this process ends, however that happens; Ctrl-C does not reach it.
    """
    # Do not fork: the child would have librdkafka's locks without its threads.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run_child, args=(serve, theirs), daemon=True)
    # The start of the tracker unblocks SIGINT, so it must run before SIGINT is blocked.
    resource_tracker.ensure_running()
    # KeyboardInterrupt is raised in the main thread only: a child that was started but not told what to do prints a
    # traceback.
    with ThreadPoolExecutor(1) as starter:
        # Only a thread that the pool knows is waited for, and Ctrl-C may come between its start and that.
        starter.submit(int).result()
        starter.submit(_start, process).result()
    theirs.close()
    return ours, process


def _start(process: BaseProcess) -> None:
    """Start a child that ignores Ctrl-C, which at a terminal reaches every process; this process ends the children."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _send(pipe: Connection, process: BaseProcess, job: object) -> None:
    try:
        pipe.send(job)
    except BrokenPipeError:
        raise _lost(process) from None


def _receive(pipe: Connection, process: BaseProcess) -> Any:
    try:
        done, answer = pipe.recv()
    except EOFError:
        raise _lost(process) from None
    if not done:
        raise answer
    return answer


def _lost(process: BaseProcess) -> ProcessLost:
    process.join()
    return ProcessLost(
        f"a process of this command ended with {process.exitcode} before it had answered; was memory short?"
    )


def _run_child(serve: Callable[[Connection], object], pipe: Connection) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    serve(pipe)


def _serve(work: Callable[[Any], object], pipe: Connection) -> None:
    """Serve jobs in the child until the parent closes the pipe."""
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, work(job))
        except Exception as error:
            error.add_note(traceback.format_exc())
            answer = (False, error)
        pipe.send(answer)


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)
