"""What the commands share: signals, and failures told in words instead of tracebacks."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

from hyper_parallel.trainer.config import ConfigError

__all__ = ["STOP_SIGNALS", "CommandError", "StoppedBySignal", "hold_stop_signals", "run_command"]

# Ctrl-C; `timeout` and schedulers; a closed terminal.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_EXIT_FAILURE = 1
_EXIT_CONFIG = 2


class CommandError(RuntimeError):
    """The command failed and the message says all that a user can know about it."""


class StoppedBySignal(BaseException):
    """One of STOP_SIGNALS came. No Exception, so that nothing takes it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


def run_command(command: Callable[[], int]) -> int:
    """Run a command in the main thread and return its exit status.

    A stop signal ends it as an exception would, so that `finally` clauses end the ranks. Signals
    that this process was started to ignore, as under nohup, stay ignored.
    """
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)
    try:
        return command()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return _EXIT_CONFIG
    except CommandError as error:
        print(error, file=sys.stderr)
        return _EXIT_FAILURE
    except StoppedBySignal as stopped:
        print(f"stopped by {stopped.signal.name}", file=sys.stderr)
        return 128 + stopped.signal  # as a shell reports it


@contextlib.contextmanager
def hold_stop_signals() -> Iterator[None]:
    """Keep stop signals until the end of the block: it must not be left half done."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _stop(number: int, _frame: FrameType | None) -> None:
    for other in STOP_SIGNALS:  # a second Ctrl-C must not disturb what the first one started
        signal.signal(other, signal.SIG_IGN)
    raise StoppedBySignal(number)
