"""Functions instead of scripts: `samestep.spawn`."""
