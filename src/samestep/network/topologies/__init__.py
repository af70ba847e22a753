"""What networks look like: pure graphs of hosts and switches, every one held as arithmetic and none as a table.

what all have in common
  topology    hosts, routers, directed links and their numbers
  cables      latency and bandwidth of each kind of link

one network each
  switch      one switch, all hosts on it
  torus       rings in 1, 2, 3 or more dimensions, without switches
  fat_tree    levels of switches, as many upward links as wanted
  dragonfly   groups of switches, one cable from every group to every other
  slim_fly    the McKay-Miller-Siran graph: two hops to everywhere
  field       the finite field that a Slim Fly is made of
"""

from __future__ import annotations

__all__: list[str] = []
