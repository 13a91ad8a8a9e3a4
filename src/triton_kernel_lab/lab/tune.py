"""Choosing launch configurations by measuring them, once, into the tracked table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from triton_kernel_lab import artifacts, routing
from triton_kernel_lab.cases._base import Bucket, Case, Tensors, load, shape_name
from triton_kernel_lab.lab import check
from triton_kernel_lab.lab.window import Bench, Subject
from triton_kernel_lab.ops import _launch
from triton_kernel_lab.project import Project

__all__ = ["run", "table_path", "tune_bucket"]

Config = Mapping[str, int | str]
_FIRST_SAMPLES, _FINAL_SAMPLES, _FINALISTS = 30, 200, 5


def table_path(root: Path, case: Case) -> Path:
    """Where a kernel's launch table is tracked."""
    return case.table or root / "src/triton_kernel_lab/ops/launch" / f"{case.name}.json"


def _trimmed_mean(samples: list[int]) -> float:
    """The mean of the lower 95 %: finer than the median on a coarse timer."""
    return statistics.fmean(sorted(samples)[: max(len(samples) * 95 // 100, 1)])


def _subject(case: Case, config: Config, sets: list[Tensors], dtype: torch.dtype) -> Subject:
    """The timed variant under one configuration, checked before it may compete.

    Raises:
        ValueError: the configuration gives a wrong result.
    """
    variant = case.variants[0]
    with _launch.forced(config):
        expected = check.expect(case, variant, sets[0], dtype)
        failures = check.run_checked(variant.run, sets[0], expected).failures
        if failures:
            raise ValueError(f"{case.name}: configuration {dict(config)} is wrong: {failures[0]}.")
        for inputs in sets:
            variant.run(*inputs)
        plans = _launch.snapshot()

    def call(*inputs: torch.Tensor) -> Any:
        _launch.restore(plans)
        return variant.run(*inputs)

    return Subject(json.dumps(config, sort_keys=True), call, sets)


def tune_bucket(
    case: Case, bucket: Bucket, bench: Bench, seed: int, progress: Callable[[str], None] = print
) -> tuple[Config, dict[str, float]]:
    """The fastest configuration of a bucket, and the trimmed mean in ns of each finalist.

    All are timed cache-cold and interleaved; the best few are timed again.
    """
    device = torch.device("cuda", bench.device)
    dtype = torch.float32 if bucket.itemsize == 4 else torch.bfloat16
    draw = case.variants[0].inputs
    sets = [draw(bucket.dims, dtype, torch.Generator(device).manual_seed(seed + index)) for index in range(2)]
    subjects = {}
    for config in bucket.configs:
        try:
            subject = _subject(case, config, sets, dtype)
        except routing.FallbackError as refused:
            # Too many registers or too much shared memory for this device: not a candidate here.
            progress(f"  left out {json.dumps(config)}: {refused}")
            continue
        subjects[subject.name] = subject
    times: dict[str, float] = {}
    for samples, keep in ((_FIRST_SAMPLES, _FINALISTS), (_FINAL_SAMPLES, 1)):
        bench.warm_up(list(subjects.values()))
        windows = bench.time(list(subjects.values()), "cold_clean", samples)
        times = {name: _trimmed_mean(window.samples_ns) for name, window in windows.items()}
        best = sorted(times, key=lambda name: times[name])[:keep]
        subjects = {name: subjects[name] for name in best}
    return json.loads(next(iter(subjects))), times


def run(project: Project, kernel: str, progress: Callable[[str], None] = print) -> Path:
    """Tune every bucket of a kernel on this GPU and write its launch table.

    Entries of other architectures stay as they are.

    Raises:
        ValueError: the case has no bucket, so that its kernels are tuned under another name; or a
            configuration gives a wrong result.
    """
    case = load(kernel)
    if not case.buckets:
        raise ValueError(
            f"tune {kernel}: expected a case with buckets, found none; its kernels are another's, tune that."
        )
    params = project.measure
    bench = Bench(params.sweep_bytes, params.warmup_ms, params.seed)
    arch = _launch.architecture(bench.device)
    entries = []
    with routing.strict(), torch.no_grad():
        for bucket in case.buckets:
            config, times = tune_bucket(case, bucket, bench, params.seed, progress)
            progress(f"{kernel} {shape_name(bucket.dims)} {bucket.itemsize} bytes: {json.dumps(config)}")
            for name, nanoseconds in sorted(times.items(), key=lambda item: item[1]):
                progress(f"  {nanoseconds / 1000:10.2f} us  {name}")
            entries.append(
                {
                    "max_itemsize": bucket.itemsize,
                    "max_rows": bucket.rows,
                    "max_columns": bucket.columns,
                    "config": config,
                }
            )
    path = table_path(project.root, case)
    table = json.loads(path.read_text(encoding="utf-8"))
    table["architectures"][arch] = entries
    artifacts.validate(table, "launch_table", str(path))
    artifacts.write_text(path, artifacts.dumps(table))
    return path
