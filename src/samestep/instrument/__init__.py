"""The one place where functions of torch, NumPy and Python are replaced, to report what a script does with them."""
