"""Floor 1: starts processes, watches them, and says which one failed and why. Never imports torch at module level.

address     a port that is bound and kept, never guessed; the store that rank 0 serves on it
variables   what every rank sees in its environment
process     one rank as a process: its own group, gone with its parent
failure     what a rank writes down when it fails, and who of several is to blame
bootstrap   the one piece that runs in every rank before the script
script      a file or module run as `__main__`, as python itself would
calls       functions sent to a rank and what they gave (the rank's side)
pool        ranks that stay alive and answer calls (the caller's side)
spawn       the public `samestep.spawn`
run         what `samestep run` does: plan, start, watch, record
supervise   waits on the ranks of a run, stops the rest after a failure
verdict     what became of a run: exit code, culprit, the last lines on standard error
console     the ranks' lines on one terminal, and in files
terminal    a pseudo-terminal for rank 0's progress display
devices     how many GPUs there are, counted without torch
"""

from __future__ import annotations

__all__: list[str] = []
