"""Several versions of this package side by side in one process.

A version is imported from a folder of its own under a name of its own. Its
modules ask for ``triton_kernel_lab.x``, as they do anywhere; each has an
``__import__`` that answers with the same version's x, now and whenever the code
runs. Nothing of the running package is touched.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

__all__ = ["PACKAGE", "Version"]

PACKAGE = "triton_kernel_lab"

# What registers an operator under a name of the whole process. A second definition takes the place of
# the first without a word, and then both versions would run the same code.
_REGISTERING = (
    *("Library", "custom_op", "define", "impl", "impl_abstract", "register_autocast", "register_autograd"),
    *("register_fake", "register_kernel", "register_torch_dispatch", "register_vmap", "triton_op"),
)


class Version:
    """The package as a folder holds it; import its modules with ``module``.

    Args:
        alias: the name of its top package in this process, an identifier.
        folder: what holds ``triton_kernel_lab``, such as a checkout's ``src``.
    """

    def __init__(self, alias: str, folder: Path) -> None:
        self.alias = alias
        self._finder = _Finder(alias, folder / PACKAGE)
        self.forget()
        sys.meta_path.insert(0, self._finder)

    def module(self, name: str) -> ModuleType:
        """The version's own module, such as ``cases.swiglu``; raises whatever importing it does."""
        return importlib.import_module(f"{self.alias}.{name}")

    def forget(self) -> None:
        """Take the version out of this process again."""
        sys.meta_path[:] = [each for each in sys.meta_path if each is not self._finder]
        for name in [name for name in sys.modules if name.partition(".")[0] == self.alias]:
            del sys.modules[name]


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, alias: str, folder: Path) -> None:
        self._alias, self._folder = alias, folder

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        top, *below = fullname.split(".")
        if top != self._alias:
            return None
        where = self._folder.joinpath(*below)
        package = (where / "__init__.py").is_file()
        file = where / "__init__.py" if package else where.with_name(f"{where.name}.py")
        if not file.is_file():
            return None
        return importlib.util.spec_from_file_location(
            fullname,
            file,
            loader=_Loader(self._alias, fullname, str(file)),
            submodule_search_locations=[str(where)] if package else None,
        )


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, alias: str, fullname: str, path: str) -> None:
        super().__init__(fullname, path)
        self._alias = alias

    def exec_module(self, module: ModuleType) -> None:
        # Functions take their builtins from the module that they are defined in, so that an import
        # inside a function is answered like one at the top.
        module.__dict__["__builtins__"] = vars(builtins) | {"__import__": functools.partial(_import, self._alias)}
        with _operators_apart(self._alias):
            super().exec_module(module)


def _renamed(alias: str, name: Any, separator: str) -> Any:
    """The version's own name of what is the package's; anything else as it is."""
    if isinstance(name, str) and (name == PACKAGE or name.startswith(PACKAGE + separator)):
        return alias + name.removeprefix(PACKAGE)
    return name


def _import(
    alias: str,
    name: str,
    globals: Any = None,
    locals: Any = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    return builtins.__import__(name if level else _renamed(alias, name, "."), globals, locals, fromlist or (), level)


@contextlib.contextmanager
def _operators_apart(alias: str) -> Iterator[None]:
    """Within the context, operators that are registered under the package's name get the version's."""

    def apart(register: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(register)
        def registered(*arguments: Any, **keywords: Any) -> Any:
            names = [_renamed(alias, each, "::") for each in arguments]
            return register(*names, **{key: _renamed(alias, each, "::") for key, each in keywords.items()})

        return registered

    with contextlib.ExitStack() as stack:
        for name in _REGISTERING:
            # Not every release has each of them.
            if register := getattr(torch.library, name, None):
                stack.enter_context(mock.patch.object(torch.library, name, apart(register)))
        yield
