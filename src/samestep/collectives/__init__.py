"""Floor 2: how values of many ranks become one: in shared memory, or by messages.

on one host
  shared_memory   all-reduce in the memory where the gradients lie
  board           how far each rank of the host has come
  memory          what its processes share, and is gone with the last of them

by messages: a plan of pure integers, proved, priced, and executed by one engine
  plan            who sends which blocks to whom in which round, and the plainest way to carry it out
  compose         plans made of plans: turned round, put elsewhere, side by side
  proof           that a plan computes what it says, and whether all ranks end with the same bits

one file an algorithm
  ring            to the next rank, all the way round
  segmented       the same with chunks cut into segments; a chain of segments
  doubling        everything to a partner twice as far each round
  halving         halves of halves to such partners, and back: the butterfly
  tree            a binomial tree
  double_tree     two trees at once, so that nobody only listens
  server          parameter servers
  hierarchical    inside the hosts, between them, inside again
  torus           along the rows of a grid, then its columns

carried out
  engine          one rank's part of a plan, over any transport
  simulate        all ranks in one process
  point_to_point  the transport over torch.distributed

chosen
  measure         what the links of a process group are like
  choose          the cheapest plan for so many bytes on such links, and why
"""

from __future__ import annotations

__all__: list[str] = []
