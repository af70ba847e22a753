"""What a rank prints of the exception that ends it: as much as helps, and on all ranks alike where that can be.

The launcher's last lines name the cause, its rank and the user's own line, so only the script's own exception needs a
traceback here; that of a lost peer or of samestep's own error would bury the culprit's, and goes to the log.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import suppress
from traceback import walk_tb
from types import TracebackType

from samestep.errors import PeerError, RankFailure, SamestepError
from samestep.launch.rank.failure import RPC_TIMEOUT, FailureRecord, exit_code, one_line
from samestep.launch.rank.user_code import below_the_launcher, format_traceback, is_user_file, text_in, tried


def print_exception(error: BaseException, failure: FailureRecord, *, launched: bool) -> None:
    """Prints what is to be seen of an uncaught exception; `launched`: a launcher sums it up."""
    if isinstance(error, SystemExit):
        if error.code is not None and not isinstance(error.code, int):
            write_stderr(f"{text_in(error)}\n")
    elif failure.in_short:
        write_stderr(f"samestep: stops at {failure.where} with {failure.exception}; the rank's log has the traceback\n")
    elif launched and failure.lost_peer and not failure.usage:
        lost = "lost its connection to other ranks"
        if RPC_TIMEOUT in failure.message:
            lost = "waited for a call of torch.distributed.rpc for too long"
        write_stderr(
            f"{lost} at {failure.where}: {one_line(failure.message)} (traceback in rank{failure.rank}.error.json)\n"
        )
    elif not (launched and failure.usage) and not isinstance(error, KeyboardInterrupt):
        _print_traceback(error)  # a usage error is the launcher's to show, once for all ranks


def needs_no_traceback(error: BaseException, failure: FailureRecord) -> bool:
    """Tells whether an exception's message and the user's own line are all that helps.

    They are not where something of the user's own was raised first, in the model say, or shows exceptions its own way.
    """
    if not isinstance(error, SamestepError) or isinstance(error, PeerError | RankFailure) or failure.usage:
        return False
    frames = (frame for cause in _causes(error) for frame, _ in walk_tb(cause.__traceback__))
    own = tried(lambda: any(is_user_file(frame.f_code.co_filename) for frame in frames), True)
    return _is_pythons_hook() and failure.where is not None and not own


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen = {id(error)}
    cause: BaseException | None = error
    while cause is not None:
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
        if cause is None or id(cause) in seen:
            return
        seen.add(id(cause))
        yield cause


def end_in_one_line(error: SamestepError) -> None:
    """Lets this process, if it catches an error nowhere, end with its message and exit code, and without a traceback.

    For errors of how the process was started: no line of the script is wrong. The launcher's ranks are shown by it, and
    a script that shows exceptions in its own way does so.
    """
    if not _is_pythons_hook():
        return
    shown, ending = sys.excepthook, weakref.ref(error)  # a script may catch it, and go on

    def show(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is not ending():
            shown(kind, value, trace)
            return
        write_stderr(f"samestep: error: {text_in(value)}\n")
        raise SystemExit(exit_code(value))  # Python ends with it

    sys.excepthook = show


def _is_pythons_hook() -> bool:
    hook = sys.excepthook
    return hook is sys.__excepthook__ or str(getattr(hook, "__module__", "")).startswith(("torch.", "samestep."))


def _print_traceback(error: BaseException) -> None:
    if _is_pythons_hook():  # in one piece, so that the ranks' lines do not mix; torch's adds the rank
        write_stderr(format_traceback(error))
        return
    try:  # the script has installed its own
        sys.excepthook(type(error), error, below_the_launcher(error.__traceback__))
    except BaseException as other:  # noqa: BLE001  (what it was to show must be seen)
        theirs = "" if isinstance(other, SystemExit) else f"Error in sys.excepthook:\n{format_traceback(other)}\n"
        write_stderr(f"{theirs}Original exception was:\n{format_traceback(error)}")


def write_stderr(text: str) -> None:
    """Writes to standard error, past whatever the script has put there if that fails."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except Exception:  # noqa: BLE001
        with suppress(OSError):
            os.write(2, text.encode(errors="backslashreplace"))
