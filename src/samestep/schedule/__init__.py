"""Floor 2: when each stage of a pipeline does what: plans of pure integers, proved and timed before anything runs.

  plan            which rank does what, in which order; a plan that exists is complete, in order and free of deadlocks
  simulate        when all of it happens, on stages of known cost and links of known speed

one file a schedule
  forward_only    an evaluation: forwards, and nothing else
  fill_drain      all forwards, then all backwards (GPipe)
  one_f_one_b     backwards as soon as they can be (1F1B), and the same with sends ahead for slow links
  interleaved     several stages a rank, so that each fills the others' gaps
  zero_bubble     gradients of weights computed later, where a rank would wait

  choose          the schedules by name
"""

from __future__ import annotations

__all__: list[str] = []
