"""Checkpoints that cannot tear: a payload without code, digests over every byte, one rename as the commit.

format      nested Python data and tensors  <->  a JSON manifest and named tensors      (touches no file)
directory   the names in a checkpoint directory, who owns it, what may be deleted
writer      fresh temporary folder -> payload -> manifest -> rename
reader      verify, then read; quarantine what cannot be trusted
sharded     tensors cut among the ranks: boxes held, boxes wanted  (grid, layout: how they lie in several files)
shares      what each rank writes of a save  (plan: who writes what; letters: how rank 0 hears of it)
store       all of that on rank 0, and the same verdict on every rank
named       the state of the objects a script names, without `module.` and `_orig_mod.`
streams     the random streams of every rank
every       when a checkpoint is due
commit      `samestep.checkpoint`: ties them to the steps and epochs of a run
"""
