"""Spreads jobs over child processes, which end with this process, even on an error, Ctrl-C or kill -9."""

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
    """A child process ended without a result, because the system or a user killed it."""

    exit_code = 1


def spread(work: Callable[[J], R], jobs: Sequence[J], processes: int) -> Iterator[R]:
    """Yield the result of `work` for each job, in the order in which jobs finish, with at most `processes` processes.

    Function and jobs must be picklable. An exception in `work` is raised here, with its traceback as a note; after
    that, or once the caller stops iterating, the child processes are killed. Raises ProcessLost.
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
    """Return the result of `work` in a child process. Raises the same errors as `spread`."""
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

    The child ends when this process ends, for whatever reason; it ignores Ctrl-C.
    """
    # Do not fork: the child would have librdkafka's locks without its threads.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run_child, args=(serve, theirs), daemon=True)
    # Starting the tracker unblocks SIGINT, so it must run before SIGINT is blocked.
    resource_tracker.ensure_running()
    # Start the child in another thread, because KeyboardInterrupt is raised only in the main thread: it would interrupt
    # the start halfway, and the child would print a traceback.
    with ThreadPoolExecutor(1) as starter:
        # The pool waits only for threads that it has registered, and Ctrl-C may arrive between a thread's start and its
        # registration, so start the thread with a job that does nothing.
        starter.submit(int).result()
        starter.submit(_start, process).result()
    theirs.close()
    return ours, process


def _start(process: BaseProcess) -> None:
    """Start a child that ignores Ctrl-C: a terminal sends it to every process, but this process ends the child."""
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
        f"a process of this command ended with {process.exitcode} before it had answered; check for a lack of memory"
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
