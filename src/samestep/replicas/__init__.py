"""Replicas: the same model on every rank of the data axis, kept the same.

`replicate` wraps the model, `norm` makes its batch statistics those of all ranks, `clipping` clips its gradients as
one process would, `nonfinite` keeps NaN and Inf from the optimizer. Everything else about one step lives in
`samestep.data`; everything about a whole run above.
"""
