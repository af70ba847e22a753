"""The public surface is short and reviewed: a change of it is a change of this file."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

import samestep
from samestep import errors

PUBLIC = [
    "Axis",
    "Checkpoint",
    "DriftGuard",
    "Pipeline",
    "PipelinePlan",
    "RankFailure",
    "Replica",
    "Report",
    "SamestepError",
    "Shards",
    "UsageError",
    "World",
    "__version__",
    "checkpoint",
    "clip_grad_norm_",
    "compress",
    "evaluate",
    "once",
    "pipeline",
    "plan_pipeline",
    "replicate",
    "shards",
    "spawn",
    "verify",
    "world",
]

SIGNATURES = {
    "checkpoint": "(path, world, *, every, keep, keep_each, time_limit, resume, **named)",
    "clip_grad_norm_": "(model, max_norm, norm_type, error_if_nonfinite)",
    "evaluate": "(fn, dataset, world, *, batch_size, metrics, workers, collate_fn)",
    "once": "(path, *, timeout)",
    "pipeline": "(model, world, plan, *, loss_fn, schedule, weight, devices, micro_batches, split_size, compress)",
    "plan_pipeline": "(model, sample, loss_fn, *, stages, micro_batches, schedule, devices, link, weight, repeats)",
    "replicate": "(model, world, *, buckets, reduce, batchnorm, find_unused_parameters, nonfinite, compress, "
    "average_every, guard)",
    "shards": "(dataset, world, *, batch_size, micro_batch_size, weight, workers, seed, shuffle, drop_last, "
    "collate_fn, sample_streams, on_bad_sample, cost, bucket, splits_itself)",
    "spawn": "(fn, n, *args, timeout, progress)",
    "verify": "(script, *arguments, ranks, steps, timeout)",
    "world": "(*, backend, init_method, rank, size, device, pipeline, virtual_ranks, seed, deterministic, timeout, "
    "join_timeout, run_dir, tensorboard)",
}

EXIT_CODES = {
    "SamestepError": 1,
    "UsageError": 2,
    "RankVariablesError": 2,
    "BackendError": 2,
    "DeviceError": 2,
    "DataError": 2,
    "ModelError": 2,
    "RendezvousError": 2,
    "EmptyBatchError": 1,
    "StepError": 1,
    "NonFiniteError": 1,
    "DriftError": 1,
    "PeerError": 1,
    "Preempted": 75,
    "CheckpointError": 1,
    "RankFailure": 1,
}


def test_the_public_names_are_these():
    assert sorted(samestep.__all__) == sorted(PUBLIC)
    assert all(hasattr(samestep, name) for name in PUBLIC)


def test_a_misspelt_name_is_answered_with_the_one_that_is_meant():
    with pytest.raises(
        AttributeError, match=r"^module 'samestep' has no attribute 'shard': did you mean samestep.shards"
    ):
        _ = samestep.shard
    command = [sys.executable, "-c", "import samestep; samestep.shard"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert said.lower().count("did you mean") == 1
    with pytest.raises(AttributeError, match=r"^module 'samestep' has no attribute '_repr_html_'$"):
        _ = samestep._repr_html_


def spelled(function) -> str:
    parts, starred = [], False
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        starred = starred or parameter.kind is parameter.VAR_POSITIONAL
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        parts.append(prefix + name)
    return f"({', '.join(parts)})"


def test_the_public_functions_take_these_arguments():
    functions = {name for name in PUBLIC if inspect.isfunction(getattr(samestep, name)) or name in SIGNATURES}
    assert {name: spelled(getattr(samestep, name)) for name in functions} == SIGNATURES


def test_every_public_name_has_a_docstring_and_functions_a_runnable_example():
    for name in PUBLIC:
        if name != "__version__":
            assert inspect.getdoc(getattr(samestep, name)), name
    for name in SIGNATURES:
        assert "Example:" in inspect.getdoc(getattr(samestep, name)), name


def test_no_module_takes_a_functions_name():
    children = {info.name for info in pkgutil.iter_modules(samestep.__path__)}
    functions = {name for name in PUBLIC if not inspect.ismodule(getattr(samestep, name))}
    assert not children & functions


def test_every_function_can_be_called_after_every_module_is_imported():
    for info in pkgutil.walk_packages(samestep.__path__, "samestep."):
        if not info.name.endswith("__main__"):
            importlib.import_module(info.name)
    for name in SIGNATURES:
        assert callable(getattr(samestep, name)), f"samestep.{name} was replaced by a module"


def test_the_exceptions_and_their_exit_codes_are_these():
    assert {name: getattr(errors, name).exit_code for name in errors.__all__} == EXIT_CODES


def test_the_drawn_tree_of_exceptions_is_the_real_one():
    for name in errors.__all__:
        kind = getattr(errors, name)
        (line,) = [
            line
            for line in errors.__doc__.splitlines()
            if (f"{name} " in line and "──" in line) or line.strip().startswith(f"{name} ")
        ]
        assert str(kind.exit_code) in line.split(name, 1)[1]
        depth = len(kind.__mro__) - len(errors.SamestepError.__mro__) - issubclass(kind, ValueError)
        assert line.count("│") + line.count("─") // 2 == depth, line
