"""Launch tables and plans: what covers a shape, what is kept of a call, and what a table may hold."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from operator_checks import DEVICE, assert_same_bits, randn
from triton.runtime import _allocation

from triton_kernel_lab import artifacts, rms_norm, swiglu
from triton_kernel_lab.cases import PENDING
from triton_kernel_lab.cases._base import load
from triton_kernel_lab.ops import _launch, _split
from triton_kernel_lab.ops._rows import RowLayout, row_count, row_layout
from triton_kernel_lab.project import kernel_names

ROOT = Path(__file__).parents[1]
# A case without buckets goes by the table of the kernels that it calls.
KERNELS = [kernel for kernel in (*kernel_names(ROOT), *PENDING) if load(kernel).buckets]
TABLES: dict[str, dict[str, Any]] = {
    kernel: json.loads((ROOT / f"src/triton_kernel_lab/ops/launch/{kernel}.json").read_text(encoding="utf-8"))
    for kernel in KERNELS
}
LINES = [
    pytest.param(kernel, arch, number, id=f"{kernel}-{arch}-{number}")
    for kernel in KERNELS
    for arch, lines in TABLES[kernel]["architectures"].items()
    for number in range(len(lines))
]
ROWS = {"kernel": "rows", "rows": 1, "num_warps": 1}
# What several configurations have in common, and what is a power of two in each of them.
SUMS = {"sum_columns", "sum_rows", "sum_warps"}
TILED = {"kernel", "block_m", "block_n", "block_k", "group", "num_warps", "num_stages"}
POWERS = SUMS | {"rows", "block", "held", "tile", "m_tiles", "n_tiles", "block_m", "block_n", "block_k", "depth"}
POWERS |= {"num_warps", "n_warps", "k_warps", "cuts"}


@pytest.fixture(autouse=True)
def no_plans() -> Iterator[None]:
    _launch.forget_plans()
    yield
    _launch.forget_plans()


def line(kernel: str, arch: str, number: int) -> dict[str, Any]:
    found: dict[str, Any] = TABLES[kernel]["architectures"][arch][number]
    return found


# The tracked tables.


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_tracked_table_is_as_the_writer_leaves_it(kernel: str) -> None:
    """Each launch table satisfies its schema, names its kernel, and is byte for byte what tune writes."""
    table, text = TABLES[kernel], (ROOT / f"src/triton_kernel_lab/ops/launch/{kernel}.json").read_text(encoding="utf-8")
    artifacts.validate(table, "launch_table", kernel)
    assert table["kernel"] == kernel
    assert artifacts.dumps(table) == text


@pytest.mark.parametrize(("kernel", "arch", "number"), LINES)
def test_every_line_of_a_table_can_be_chosen(kernel: str, arch: str, number: int) -> None:
    """The largest shape that a line covers is not covered by a line before it, so none is dead."""
    entry = line(kernel, arch, number)
    rows, columns = entry["max_rows"] or 1 << 30, entry["max_columns"] or 1 << 40
    chosen = _launch.choose(kernel, arch, itemsize=entry["max_itemsize"], rows=rows, columns=columns)
    assert chosen is _launch._table(kernel)[arch][number]["config"]


@pytest.mark.parametrize(("kernel", "arch", "number"), LINES)
def test_a_configuration_holds_what_its_kernel_takes(kernel: str, arch: str, number: int) -> None:
    """Blocks, rows and warps are powers of two within what a GPU has, under the names that the launcher reads."""
    config = line(kernel, arch, number)["config"]
    names = {
        ("rms_norm", "rows"): {"kernel", "rows", "num_warps"},
        ("rms_norm", "streamed"): {"kernel", "block", "held", "stream_stores", "num_warps"},
        ("swiglu", None): {"block", "num_warps"},
        ("add_rms_norm", "rows"): {"kernel", "rows", "num_warps", "ordered"},
        ("add_rms_norm", "streamed"): {"kernel", "block", "num_warps"},
        ("paged_kv_gather", None): {"tile", "num_warps"},
        ("qk_scores", "keys"): {"kernel", "block", "num_warps", "evict"},
        ("qk_scores", "group"): {"kernel", "block", "num_warps", "evict", "tile", "steps", "stages"},
        ("rms_norm_backward", "rows"): {"kernel", "rows", "num_warps", "programs", "stages", *SUMS},
        ("rms_norm_backward", "tiles"): {"kernel", "block", "num_warps", "programs", "stages", *SUMS},
        ("swiglu_backward", None): {"block", "num_warps"},
        ("swiglu_linear", "vector"): {"kernel", "block_n", "block_k", "num_warps", "num_stages"},
        ("swiglu_linear", "streamed"): {"kernel", "block_n", "block_k", "num_warps", "num_stages", "split"},
        ("swiglu_linear", "tiled"): TILED,
        ("swiglu_linear", "described"): TILED | {"per_processor", "cuts"},
        ("selected_attention", "rows"): {"method", "block", "num_warps", "stages", "ahead", "grain", "join", "depth"},
        ("selected_attention", "group"): {"method", "block", "num_warps", "stages", "ahead", "grain", "join", "depth"},
        ("int4_linear", "stream"): {"kernel", "m_tiles", "n_tiles", "n_warps", "k_warps", "unroll", "programs"},
        ("int4_linear", "tile"): {"kernel", "block_m", "block_n", "num_warps", "stages", "programs"},
        ("int4_linear", "dense"): {"kernel", "block_n", "num_warps"},
        ("flash_attention", "blocks"): {"kernel", "rows", "block", "num_warps", "stages", "cluster_mib", "precision"},
        ("flash_attention", "specialised"): {"kernel", "block", "stages", "cluster_mib", "pairs"},
    }
    assert set(config) == names[kernel, config.get("kernel", config.get("method"))]
    sizes = [config[name] for name in POWERS if config.get(name)]
    assert all(size & (size - 1) == 0 for size in sizes)
    # What says nothing of warps has four by its structure.
    warps = config.get("num_warps") or config.get("n_warps", 2) * config.get("k_warps", 2)
    assert 1 <= warps <= 32
    assert config.get("stream_stores", 0) in (0, 1)


@given(
    kernel=st.sampled_from(KERNELS),
    arch=st.sampled_from(["interpreter", "sm_70", "sm_80", "sm_90", "sm_100", "sm_120"]),
    itemsize=st.sampled_from([2, 4]),
    rows=st.integers(1, 1 << 31),
    columns=st.integers(1, 1 << 40),
)
def test_some_line_covers_every_shape(kernel: str, arch: str, itemsize: int, rows: int, columns: int) -> None:
    """Whatever the shape, dtype and architecture, a configuration is found."""
    config = _launch.choose(kernel, arch, itemsize=itemsize, rows=rows, columns=columns)
    # Whole rows are only ever held as wide as the registers of one program.
    assert config.get("kernel") != "rows" or columns <= 16384


# Looking up.


@pytest.mark.parametrize(
    ("arch", "nearest"),
    [("sm_80", "sm_80"), ("sm_86", "sm_80"), ("sm_90", "sm_90"), ("sm_120", "sm_100"), ("sm_75", "sm_80")],
)
def test_an_unmeasured_architecture_takes_the_closest_older_one(arch: str, nearest: str) -> None:
    """By number, not by letters: sm_120 comes after sm_90; one older than all takes the oldest."""
    table = dict.fromkeys(["sm_100", "sm_80", "interpreter", "sm_90"])
    assert _launch._nearest(table, arch) == nearest


def test_the_first_line_that_covers_a_shape_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds are inclusive and null is no bound; a shape that no line covers is a LookupError naming it."""
    lines = [
        {"max_itemsize": 2, "max_rows": 4, "max_columns": 64, "config": {"line": 0}},
        {"max_itemsize": 2, "max_rows": None, "max_columns": 64, "config": {"line": 1}},
        {"max_itemsize": 4, "max_rows": None, "max_columns": 128, "config": {"line": 2}},
    ]
    monkeypatch.setattr(_launch, "_table", lambda kernel: {"sm_90": lines})

    def chosen(itemsize: int, rows: int, columns: int) -> object:
        return _launch.choose("some", "sm_90", itemsize=itemsize, rows=rows, columns=columns)["line"]

    assert [chosen(2, 4, 64), chosen(2, 5, 64), chosen(4, 1, 1), chosen(2, 1, 65)] == [0, 1, 2, 2]
    with pytest.raises(LookupError, match=r"launch table some: no entry for sm_90 with 4 bytes, 1 x 129\."):
        chosen(4, 1, 129)


# Plans.


def plans(kernel: str) -> _launch.PlanCache:
    found: _launch.PlanCache = importlib.import_module(f"triton_kernel_lab.ops.{kernel}")._plans
    return found


def test_a_signature_is_planned_once() -> None:
    """The second call of a shape adds no plan, another value of eps or another dtype does."""
    x = randn(2, 64)
    counts = []
    calls: tuple[Callable[[], torch.Tensor], ...] = (
        lambda: rms_norm(x),
        lambda: rms_norm(x.clone()),
        lambda: rms_norm(x, eps=1e-5),
        lambda: rms_norm(x.half()),
        lambda: rms_norm(x, casting="gemma"),
        lambda: rms_norm(x, torch.ones(64, device=DEVICE)),
        lambda: rms_norm(x, torch.ones(64, device=DEVICE).half()),
    )
    for call in calls:
        call()
        counts.append(len(plans("rms_norm")))
    assert counts == [1, 1, 2, 3, 4, 5, 6]


def test_a_stream_of_shapes_does_not_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is emptied when it is full, and every answer stays right."""
    monkeypatch.setattr(_launch, "_PLAN_LIMIT", 4)
    for columns in range(1, 12):
        assert_same_bits(
            rms_norm(torch.ones(1, columns, device=DEVICE), eps=3.0), torch.full((1, columns), 0.5).to(DEVICE)
        )
        assert len(plans("rms_norm")) <= 4


def test_forgetting_drops_the_plans_of_every_operator() -> None:
    """After forget_plans each operator binds anew."""
    rms_norm(randn(2, 64))
    swiglu(randn(2, 64), randn(2, 64))
    _launch.forget_plans()
    assert len(plans("rms_norm")) == len(plans("swiglu")) == 0


def test_a_snapshot_brings_back_its_own_plans() -> None:
    """Two sets of plans for one signature can be exchanged, and neither sees the other's changes."""
    x = randn(2, 64)
    rms_norm(x)
    first = _launch.snapshot()
    _launch.forget_plans()
    rms_norm(x)
    swiglu(x, x)
    second = _launch.snapshot()
    _launch.restore(first)
    assert (len(plans("rms_norm")), len(plans("swiglu"))) == (1, 0)
    rms_norm(randn(3, 64))
    _launch.restore(first)
    assert len(plans("rms_norm")) == 1
    _launch.restore(second)
    assert (len(plans("rms_norm")), len(plans("swiglu"))) == (1, 1)
    (key,) = plans("rms_norm")
    (number,) = (index for index, cache in enumerate(_launch._caches) if cache is plans("rms_norm"))
    assert plans("rms_norm")[key] is not first[number][key]


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[_launch.Config]:
    """The configurations that are bound from now on."""
    seen: list[_launch.Config] = []
    bind = _launch.bind

    def recording(*arguments: Any, config: _launch.Config, num_warps: int) -> Any:
        seen.append(config)
        return bind(*arguments, config=config, num_warps=num_warps)

    monkeypatch.setattr(_launch, "bind", recording)
    return seen


def test_a_forced_configuration_replaces_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the context the configuration is bound whatever was planned before, and the inner of two wins."""
    seen, x = recorded(monkeypatch), randn(2, 64)
    rms_norm(x)
    with _launch.forced(ROWS):
        rms_norm(x)
        with _launch.forced({**ROWS, "rows": 4}):
            rms_norm(x)
    assert seen[1:] == [ROWS, {**ROWS, "rows": 4}]


def test_a_forced_configuration_ends_with_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the context the table decides again, also for a signature that was called within it."""
    seen, x = recorded(monkeypatch), randn(2, 64)
    with _launch.forced(ROWS):
        rms_norm(x)
    rms_norm(x)
    arch = _launch.architecture(x.get_device())
    assert seen == [ROWS, _launch.choose("rms_norm", arch, itemsize=4, rows=2, columns=64)]


@pytest.mark.gpu
def test_what_was_launched_is_on_record() -> None:
    """On a GPU a bound kernel tells its configuration, registers and the digest of its binary."""
    rms_norm(randn(2, 64))
    (launch,) = _launch.launches()
    assert launch.kernel == "_rows_kernel"
    assert launch.registers > 0
    assert launch.spills == 0
    assert len(launch.cubin_sha256) == 64


class Devices:
    """What a launch asks of CUDA, with no GPU: which device is current, its streams, and a kernel that notes both."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
        self.current, self.entered, self.started = 0, list[int](), list[tuple[int, tuple[Any, ...]]]()
        self.error: Exception | None = None
        self.capturing, self.scratch, self.allocators = set[int](), 0, list[Any]()
        active = SimpleNamespace(get_current_stream=lambda device: f"stream of {device}")
        runtime = SimpleNamespace(driver=SimpleNamespace(active=active))
        driver = SimpleNamespace(runtime=runtime, __version__=version, set_allocator=triton.set_allocator)
        monkeypatch.setattr(_launch, "INTERPRET", False)
        monkeypatch.setattr(_launch, "triton", driver)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "device", self.device)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.current in self.capturing)

    @contextlib.contextmanager
    def device(self, device: int | torch.device) -> Iterator[None]:
        before, self.current = self.current, device if isinstance(device, int) else device.index
        self.entered.append(self.current)
        try:
            yield
        finally:
            self.current = before

    def start(self, *arguments: Any) -> None:
        self.started.append((self.current, arguments))
        self.allocators.append(_allocation._allocator.get())
        if self.error is not None:
            raise self.error

    def warmup(self, *arguments: Any, **options: Any) -> Any:
        self.start("compiled")
        run = Launcher(self.start, self.scratch)
        described = {"n_regs": 8, "n_spills": 0, "metadata": SimpleNamespace(shared=0), "asm": {"cubin": b""}}
        return SimpleNamespace(run=run, function="function", packed_metadata="packed", **described)

    def bound(self, device: int) -> Callable[..., None]:
        """A kernel of one tensor, one scalar and one constant, bound to a device."""
        fn = SimpleNamespace(__module__="operator", __name__="_fake_kernel")
        kernel = SimpleNamespace(arg_names=["x_ptr", "rows", "BLOCK"], warmup=self.warmup, fn=fn)
        tensor: Any = SimpleNamespace(get_device=lambda: device)
        return _launch.bind(kernel, (3,), (tensor,), (7,), {"BLOCK": 16}, config=ROWS, num_warps=1)


class Launcher:
    """Triton's launcher, which needs so much scratch memory a program."""

    profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False

    def __init__(self, start: Callable[..., None], scratch: int) -> None:
        self.launch = self._start = start
        self.global_scratch_size = scratch

    def __call__(self, *arguments: Any) -> None:
        self._start(*arguments)


# The C function of the release that is known, and the launcher of any other.
@pytest.mark.parametrize("version", ["3.6.0", "3.99.0"])
def test_f47_a_launch_makes_the_device_of_its_tensors_current_and_leaves_it(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled and started on their device and its stream, whichever is current, which it is again afterwards."""
    devices, x = Devices(monkeypatch, version), torch.zeros(4)
    launch = devices.bound(1)
    assert (devices.started, devices.entered, devices.current) == ([(1, ("compiled",))], [1], 0)
    launch(x)
    device, arguments = devices.started[-1]
    assert (device, devices.entered, devices.current) == (1, [1, 1], 0)
    assert arguments[:4] == (3, 1, 1, "stream of 1")
    assert arguments[-3:] == (x.data_ptr(), 7, 16)
    devices.current = 1
    launch(x)
    assert devices.started[-1] == (1, arguments)
    # Where their device is current already, entering it would only cost time.
    assert (len(devices.started), devices.entered, devices.current) == (3, [1, 1], 1)


def test_f47_a_launch_that_fails_leaves_the_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's device is current after an error of the launch, which reaches the caller and is not tried again."""
    devices = Devices(monkeypatch, "3.6.0")
    launch = devices.bound(1)
    devices.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        launch(torch.zeros(4))
    assert ([device for device, _ in devices.started], devices.current) == ([1, 1], 0)


def theirs(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    raise AssertionError("the allocator of the caller is not asked")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("version", ["3.6.0", "3.99.0"])
def test_a_launch_in_any_thread_brings_its_allocator_and_leaves_the_callers(
    version: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton keeps it for each thread: one that did not plan has it too, and one that has its own gets that back."""
    devices = Devices(monkeypatch, version)
    devices.scratch = 64
    launch = devices.bound(0)
    devices.error = RuntimeError("CUDA error: out of memory") if fails else None

    def launched(own: Any) -> object:
        if own is not None:
            triton.set_allocator(own)
        before = _allocation._allocator.get()
        with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
            launch(torch.zeros(4))
        return own is None or before is own, _allocation._allocator.get() is before

    for own in (None, theirs):
        with ThreadPoolExecutor(1) as another:
            assert another.submit(launched, own).result() == (True, True)
    assert devices.allocators[1:] == [_launch._scratch] * 2


@pytest.mark.parametrize("version", ["3.6.0", "3.99.0"])
def test_a_launch_without_descriptors_sets_no_allocator(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that needs no scratch memory is started under whatever allocator there is."""
    devices = Devices(monkeypatch, version)
    launch = devices.bound(0)
    before = _allocation._allocator.get()
    launch(torch.zeros(4))
    assert devices.allocators == [before] * 2


# F62: capturing.


def test_f62_a_cold_call_under_capture_says_to_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is compiled, by the stream of the tensors' device, and only while that is captured."""
    devices = Devices(monkeypatch, "3.6.0")
    devices.capturing = {1}
    with pytest.raises(
        RuntimeError, match=r"^operator\._fake_kernel: a CUDA graph is being captured, .* warm up first"
    ):
        devices.bound(1)
    assert (devices.started, devices.current, _launch.launches()) == ([], 0, [])
    devices.bound(0)
    devices.capturing = set()
    devices.bound(1)
    assert devices.started == [(0, ("compiled",)), (1, ("compiled",))]


def test_f62_a_warm_launch_under_capture_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is bound starts whether or not its stream is captured."""
    devices = Devices(monkeypatch, "3.6.0")
    launch = devices.bound(1)
    devices.capturing = {1}
    launch(torch.zeros(4))
    assert [device for device, _ in devices.started] == [1, 1]


@pytest.mark.parametrize("current", [0, 1])
def test_f62_counters_are_private_where_the_device_of_the_tensors_captures(
    current: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which device is current does not matter, and it stays so; it is entered only where it is another."""
    devices = Devices(monkeypatch, "3.6.0")
    devices.current, devices.capturing = current, {1}
    kept = torch.zeros(8)
    monkeypatch.setattr(_split, "_private", lambda device, n: f"{n} of {device}")
    monkeypatch.setattr(_split, "_streams", {(torch.device("cuda", 0), 7): kept})
    active = SimpleNamespace(get_current_stream=lambda device: 7)
    monkeypatch.setattr(
        _split, "triton", SimpleNamespace(runtime=SimpleNamespace(driver=SimpleNamespace(active=active)))
    )
    assert _split.counters(torch.device("cuda", 1), 3) == "3 of cuda:1"
    assert _split.counters(torch.device("cuda", 0), 3) is kept
    assert (devices.current, devices.entered) == (current, [1 - current])


@pytest.mark.gpu
def test_f62_a_cold_capture_fails_clearly_and_a_warm_one_follows_its_inputs() -> None:
    """The refused capture leaves nothing behind: after one call the same capture is made and replayed."""
    x = randn(16, 4096, dtype=torch.bfloat16)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        # An empty graph would be warned of.
        x.add(1)
        with pytest.raises(RuntimeError, match="warm up first"):
            rms_norm(x)
    assert len(plans("rms_norm")) == 0
    rms_norm(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = rms_norm(x)
    x.copy_(randn(16, 4096, dtype=torch.bfloat16, seed=9))
    graph.replay()
    assert_same_bits(y, rms_norm(x))


# Rows.


@pytest.mark.parametrize(
    ("shape", "strides", "layout"),
    [
        ((8,), (1,), RowLayout(1, 0, 0)),
        ((3, 8), (8, 1), RowLayout(1, 8, 0)),
        ((3, 8), (20, 1), RowLayout(1, 20, 0)),
        ((2, 3, 8), (24, 8, 1), RowLayout(1, 8, 0)),
        ((2, 3, 8), (60, 20, 1), RowLayout(1, 20, 0)),
        ((2, 3, 8), (100, 8, 1), RowLayout(3, 100, 8)),
        ((2, 1, 3, 8), (100, 7, 8, 1), RowLayout(3, 100, 8)),
        ((2, 3, 8), (0, 0, 1), RowLayout(1, 0, 0)),
        ((2, 3, 8), (8, 0, 1), RowLayout(3, 8, 0)),
        ((5, 1), (3, 7), RowLayout(1, 3, 0)),
        ((3, 8), (16, 2), None),
        ((3, 8), (1, 3), None),
        ((2, 3, 4, 8), (300, 90, 8, 1), None),
    ],
)
def test_rows_at_two_strides_are_recognised(
    shape: tuple[int, ...], strides: tuple[int, ...], layout: RowLayout | None
) -> None:
    """Leading dimensions fold where their strides allow; what needs a third stride has no layout."""
    assert row_layout(torch.empty_strided(shape, strides, device="meta")) == layout


@given(data=st.data())
def test_a_layout_points_at_every_row(data: st.DataObject) -> None:
    """Row r begins where the layout says, for any strides that have one."""
    shape = (*data.draw(st.lists(st.integers(1, 4), max_size=3)), 2)
    strides = (*(data.draw(st.sampled_from([0, 2, 6, 8, 24])) for _ in shape[:-1]), 1)
    x = torch.arange(500).as_strided(shape, strides)
    layout = row_layout(x)
    if layout is not None:
        inner, outer_stride, inner_stride = layout
        starts = [row // inner * outer_stride + row % inner * inner_stride for row in range(row_count(x))]
        assert starts == x[..., 0].flatten().tolist()


def test_one_stride_told_as_two_names_the_same_rows() -> None:
    """A layout of one stride can be told with any number of rows a step."""
    inner, outer_stride, inner_stride = RowLayout(1, 20, 0).split(3)
    assert [row // inner * outer_stride + row % inner * inner_stride for row in range(7)] == list(range(0, 140, 20))
