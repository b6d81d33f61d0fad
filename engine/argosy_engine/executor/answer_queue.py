"""AnswerQueue: sends a worker's answers in the order of the core's calls, each once it is known.

A thread of its own waits for the steps' tokens, so that the worker takes the next call meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from argosy_engine.errors import ConfigError, UtilityFailed
from argosy_engine.executor.worker_death import failure_of
from argosy_engine.executor.worker_messages import DIED, DONE, FAILED, PROGRESS, MessageWriter, WorkerFailure
from argosy_engine.messages.load_step import LoadStep

_PROGRESS_S = 0.5
"""Minimum interval between two messages on the progress of a phase of the load."""

logger = logging.getLogger("argosy.worker")


class AnswerQueue:
    """Answers of one worker, sent by a thread.

    Args:
        rank: the worker's, for the log.
        stream: where the answers go; only the thread writes to it.
    """

    def __init__(self, rank: int, stream: MessageWriter) -> None:
        self._rank = rank
        self._stream = stream
        self._encode = msgspec.msgpack.Encoder().encode
        self._told: tuple[str, float] = "", 0.0
        self._queue: queue.Queue[Callable[[], bytes | None]] = queue.Queue()
        threading.Thread(target=self._send, daemon=True, name="answers").start()

    def put_step(self, wait: Callable[[], Any], *, is_answered: bool) -> None:
        """Answer with the output of a launched step. A step that fails ends the process.

        Args:
            wait: waits for the end of the step and returns its output.
            is_answered: whether the core waits for this worker's output; otherwise only a failure is sent.
        """

        def answer() -> bytes | None:
            output = wait()
            return DONE + self._encode(output) if is_answered else None

        self._queue.put(answer)

    def put_progress(self, step: LoadStep) -> None:
        """Tell the core how far the load is: every phase, and of a phase as much as it needs to know."""
        phase, told_at = self._told
        now = time.monotonic()
        if step.phase == phase and now - told_at < _PROGRESS_S:
            return
        self._told = step.phase, now
        message = PROGRESS + self._encode(step)
        self._queue.put(lambda: message)

    def put_result(self, result: Any) -> None:
        """Answer with the result of a call.

        Raises:
            TypeError: the result cannot be encoded.
        """
        message = DONE + self._encode(result)
        self._queue.put(lambda: message)

    def put_failure(self, error: Exception) -> None:
        """Answer with the error of a call, which does not affect the worker."""
        message = FAILED + self._encode(self._describe(error))
        self._queue.put(lambda: message)

    def join(self) -> None:
        """Wait until everything is answered."""
        self._queue.join()

    def die(self, error: Exception) -> NoReturn:
        """Answer everything before, tell why this process ends, and end it."""

        def answer() -> bytes:
            raise error

        self._queue.put(answer)
        self._queue.join()  # the thread ends the process
        os._exit(1)

    def _send(self) -> None:
        while True:
            answer = self._queue.get()
            try:
                message = answer()
                if message is not None:
                    self._stream.send(message)
            except Exception as error:
                with contextlib.suppress(OSError):  # the core has ended
                    self._stream.send(DIED + self._encode(failure_of(error)))
                os._exit(1)
            self._queue.task_done()

    def _describe(self, error: Exception) -> WorkerFailure:
        if isinstance(error, (ConfigError, UtilityFailed)):  # the message is meant for the caller
            return WorkerFailure(str(error), isinstance(error, ConfigError))
        logger.error("a call of worker %d failed", self._rank, exc_info=error)
        return WorkerFailure(f"{type(error).__name__}: {error}")
