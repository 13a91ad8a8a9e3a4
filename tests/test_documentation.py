"""What the documents quote is what the code compiles to, and what they link to is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs/COMPILATION.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
DUMP = """
import subprocess
import sys
from pathlib import Path

import torch
import triton
from triton_kernel_lab.cases._base import load
from triton_kernel_lab.codegen import compiling, launches

call = launches.Call(load("swiglu").variants[0], (8192, 14336), torch.bfloat16)
(launch,) = launches.plan(call, "sm_90")
kernel = compiling.compile_launch(launch, "sm_90")
for stage in ("ttir", "ttgir", "ptx"):
    Path(sys.argv[1], stage).write_text(str(kernel.asm[stage]))
cubin = Path(sys.argv[1], "cubin")
cubin.write_bytes(kernel.asm["cubin"])
command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(cubin)]
Path(sys.argv[1], "sass").write_text(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
"""


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The stages of the kernel that the document shows, without source locations and indents."""
    folder = tmp_path_factory.mktemp("dumps")
    # A process of its own: Triton's driver is another one afterwards, and the interpreter must be off.
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-c", DUMP, str(folder)], env=environment, check=True)
    return {stage: _bare((folder / stage).read_text()) for stage in ("ttir", "ttgir", "ptx", "sass")}


def _bare(text: str) -> str:
    text = re.sub(r" loc\(#loc\d*\)|/\*[0-9a-f]+\*/", "", text)
    return "\n".join(re.sub(r"\s+", " ", line).strip() for line in text.splitlines())


def quoted(language: str) -> list[str]:
    (block,) = re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    return [re.sub(r"\s+", " ", line).strip() for line in block.splitlines()]


@pytest.mark.parametrize("stage", ["ttir", "ttgir", "ptx", "sass"])
def test_every_quoted_line_is_one_of_the_compilers(dumps: dict[str, str], stage: str) -> None:
    """The excerpts of each stage stand, word for word, in what the pinned Triton makes of the kernel."""
    lines = quoted(stage)
    assert lines
    assert [line for line in lines if line not in dumps[stage].splitlines()] == []


def test_the_quoted_python_is_the_kernels() -> None:
    """The lines that the document begins with are those of the operator."""
    source = _bare((ROOT / "src/triton_kernel_lab/ops/swiglu.py").read_text(encoding="utf-8")).splitlines()
    assert [line for line in quoted("python") if line not in source] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    """Every relative link is to a file or folder of the repository."""
    # A subscript in code that is then called looks like a link.
    prose = re.sub(r"```.*?```|`[^`]*`", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose)
    assert [link for link in links if not (document.parent / link).exists()] == []
