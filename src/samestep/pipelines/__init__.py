"""Floor 4: a model over several devices: where it is cut, and what each stage does when.

where it is cut
  given         what may be given as a model
  chain         models as chains of layers, and a stage's part of one
  layers        what each layer of a model costs, and what devices and links can do
  measure       what it costs, measured while the whole model runs
  bounds        how short a step can be at best, cut so
  balance       the cut of which it is proved that none is better
  choose        the cut, the schedule and the number of micro-batches, for a model and a batch

carried out
  batch         what a step is given
  rollcall      that all ranks of a replica are given the same
  stage         what one stage computes, and keeps until its backward
  interpreter   one rank's part of a schedule, over any transport
  messages      the transport between ranks
  shelves       memory in which ranks of one host lay messages down for each other
  forms         what is known of a tensor before it comes
  devices       those of a process that holds all stages
  streams       what crosses from one of them to another, while both compute
  transfers     the transport over these
  losses        the loss of each micro-batch, as its part of the step's
  draws         random numbers of layers, the same on whatever rank
  reduction     gradients added up over the replicas
  outputs       what one rank has and all want
  pipeline      one rank's stages of a model, and the step that all take with them
  planned       a model cut as planned

looked at
  stopwatch     when each rank did what
  report        what steps took, what was predicted, where the time went
  picture       the same, drawn
"""

from __future__ import annotations

__all__: list[str] = []
