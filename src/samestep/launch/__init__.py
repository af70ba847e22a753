"""Floor 1: starts processes, watches them, and says which one failed and why. Never imports torch at module level.

one rank
  address     a port that is bound and kept, never guessed; the store that rank 0 serves on it
  variables   what every rank sees in its environment
  cores       how many cores there are to share, and for whom
  process     one rank as a process: its own group, gone with its parent; what it leaves behind
  ahead       an agent that imports torch while the command line is still being read
  fork        ranks that start at once, as copies of a process that has imported torch
  bootstrap   the one piece that runs in every rank before the script
  observers   what watches a rank from inside, loaded before the script
  progress_notes  writes what the script does into the rank's record
  last_gradients  which gradients of a model come last
  imports     doing something to a module as soon as it has been imported
  spawned     ranks that the script starts by itself
  script      a file or module run as `__main__`, as python itself would
  control     the pipe between a rank and its team, at the rank's end
  orders      who in a rank obeys which order
  failure     what a rank tells when it fails, and who of several is to blame
  stacks      python stacks as faulthandler leaves them
  memory      whether the kernel ended a process for want of memory
  limits      how many files a launcher may have open, and a rank

one run
  run         what `samestep run` does: plan, attempts, record
  head        holds the agents of all hosts for as long as a run lasts
  agent       one small process per host, which holds its ranks and obeys the head
  team        the ranks of one host: started, listened to, given orders, cleared away
  loop        one thread that waits on everything at once
  signals     signals as events of that loop
  frames      messages between a head and an agent
  supervise   decides: whom to wait for, when to stop the rest, what to make of a signal
  verdict     what became of a run: exit code, culprit, the last lines on standard error
  restarts    whether a run that failed is worth another attempt
  console     the ranks' lines on one terminal, and in files
  terminal    a pseudo-terminal for rank 0's progress display
  devices     how many GPUs there are, counted without torch

started by somebody else
  watcher     watches the ranks of one host where torchrun, srun or mpiexec has started them
  watched     the rank's side of it

several hosts
  hostlist    which hosts take part, as a user writes them down
  transport   starts an agent on each over ssh, pdsh or clush
  slurm       the batch script that Slurm takes
  mpiexec     the command that has mpiexec start the ranks
  meeting     the file through which tasks of srun or mpiexec find each other
  wire        the connection between head and agent, proved on both sides
  gather      brings the agents together
  facts       what a host is and has
  network     its interfaces, the way to another, and whether it can be reached
  preflight   whether the hosts fit together
  cluster     examines them and puts them in order

functions instead of scripts
  calls       functions sent to a rank and what they gave (the rank's side)
  pool        ranks that stay alive and answer calls (the caller's side)
  attending   passes on what they print, to a notebook's cell for one
  status      how far they are, in one line that is drawn in place
  cells       lines of a notebook's cells in the ranks' tracebacks
  spawn       the public `samestep.spawn`
"""

from __future__ import annotations

__all__: list[str] = []
