"""Floor 1: what messages between ranks cost, in plain numbers. Never imports torch at module level.

one message
  links       how long it takes, inside a host and between hosts

many
  cost        the price of a plan, round by round
  formulas    the same prices in closed form, for any number of ranks
"""

from __future__ import annotations

__all__: list[str] = []
