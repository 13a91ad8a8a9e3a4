"""Kernels of other packages: each names its cases under the entry point ``triton_kernel_lab.cases``. Without torch."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path

__all__ = ["GROUP", "RegistryError", "describe", "is_ours", "names", "provider", "source"]

GROUP = "triton_kernel_lab.cases"
_OURS = "triton-kernel-lab"


class RegistryError(ValueError):
    """A kernel of another package cannot be told or loaded; one sentence says why."""


def names() -> list[str]:
    """The kernels that other packages provide, sorted; nothing of theirs is imported."""
    return sorted({entry.name for entry in metadata.entry_points(group=GROUP)})


def is_ours(kernel: str) -> bool:
    """Whether this package has the kernel."""
    return (Path(__file__).parent / "cases" / f"{kernel}.py").is_file()


def provider(kernel: str) -> metadata.EntryPoint | None:
    """Where another package keeps the case of a kernel; None where no other package has that kernel.

    Raises:
        RegistryError: two packages have it, this one counted.
    """
    entries = list(metadata.entry_points(group=GROUP, name=kernel))
    packages = [_OURS] if is_ours(kernel) else []
    packages += [_package(entry) for entry in entries]
    if len(packages) > 1 and entries:
        raise RegistryError(
            f"kernel {kernel}: expected one package to provide it, found {' and '.join(packages)}; "
            f"rename it in the entry points `{GROUP}` of {packages[-1]}, or uninstall that package."
        )
    return entries[0] if entries else None


def describe(entry: metadata.EntryPoint) -> str:
    """An entry point as messages name it."""
    return f"kernel {entry.name}: entry point `{entry.name} = {entry.value}` of package {_package(entry)}"


def source(entry: metadata.EntryPoint) -> tuple[Path, str]:
    """The folder that holds an entry point's top package, and its module's file below that folder.

    Raises:
        RegistryError: there is no such module.
    """
    top, *below = entry.module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is not None and spec.submodule_search_locations:
        for location in spec.submodule_search_locations:
            where = Path(location).joinpath(*below)
            for file in (where.with_name(f"{where.name}.py"), where / "__init__.py"):
                if file.is_file():
                    folder = Path(location).parent
                    return folder, file.relative_to(folder).as_posix()
    elif spec is not None and spec.origin and not below:
        return Path(spec.origin).parent, Path(spec.origin).name
    raise RegistryError(f"{describe(entry)}: expected the module {entry.module}, found none.")


def _package(entry: metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist else "without a name"
