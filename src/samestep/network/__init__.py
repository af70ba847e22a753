"""Floor 1: what messages between ranks cost, in plain numbers. Never imports torch at module level.

one message
  links       how long it takes, inside a host and between hosts

many
  cost        the price of a plan, round by round
  formulas    the same prices in closed form, for any number of ranks

many, through a network of switches
  topologies/ what it looks like: torus, fat tree, dragonfly, Slim Fly
  placement   which rank runs on which host
  circuit     an order of the hosts in which each is next to the last
  routing     which way a message takes
  rounds      the messages that are sent at once, of every all-reduce
  double_tree those of two trees
  load        the bytes that they put on every link
  contention  the price of rounds, in each other's way
  flows       a few ranks' messages followed in time

read from a file
  units       numbers with units, as people write them
  reading     sections, whole numbers and words
  kinds       the networks that it can say
  cluster     what stands where, what lies between, and what the network looks like

for a cluster
  ports       how long each round keeps its links and its ranks' ports busy
  offers      what each of its all-reduces costs, for any number of bytes
"""

from __future__ import annotations

__all__: list[str] = []
