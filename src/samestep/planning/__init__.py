"""Floor 6: what a training would take on other machines, predicted from what it takes here.

measured
  profile       what one process's training is, in plain numbers
  profiling     a script run for some steps, watched, and stopped
  observing     the observer in its process
  moments       one step as it went
  kept          what a forward keeps for its backward
  inputs        what a model was called with
  alone         the model by itself, on other batches, and layer by layer
  measuring     the profile of all that

predicted
  step          how ranks are used, what a step takes then, and what that goes into
  work          what one device does in a step, for any number of samples
  fabric        what a cluster offers: all-reduces among replicas, messages between stages
  replicas      a step of data parallel training
  stages        a step of pipeline parallel training
  search        the quickest way to use so many ranks, and how that goes on
  advice        what to change next, and what it would give

told
  told          as a person reads it
  settings      as `samestep run --settings` takes it
"""

from __future__ import annotations

__all__: list[str] = []
