# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests the options of mpgpu.torch.load, mpgpu.torch.iter_load, small tensors, and files that change while they are read."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import weakref

import mpgpu
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import mpgpu.torch  # noqa: E402
from virtual_gpus import VirtualGpus  # noqa: E402


@pytest.fixture
def gpus(monkeypatch):
    return VirtualGpus(monkeypatch)


@pytest.fixture
def plans(monkeypatch):
    """Number of transfers of each plan."""
    counted = []

    class Counted(mpgpu.Plan):
        __slots__ = ()

        def __init__(self, transfers, **options):
            transfers = list(transfers)
            counted.append(len(transfers))
            super().__init__(transfers, **options)

    monkeypatch.setattr(mpgpu._fill, "Plan", Counted)
    return counted


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def assert_equal(loaded, tensors):
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(bits(loaded[name]), bits(tensor))


def header_of(path):
    with mpgpu._safetensors.open_file(path) as file:
        return mpgpu._safetensors.read_header(file, str(path))


def model(seed=1, count=40):
    """Tensors of several types: small ones, two large ones, and some without elements."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tensors = {}
    for at in range(count):
        shape = [chance.choice([1, 2, 3, 17, 100, 0]) for _ in range(chance.randint(0, 2))]
        dtype = chance.choice([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
        tensors[f"layers.{at}.w"] = torch.randint(0, 100, shape, generator=generator).to(dtype)
    tensors["embed.w"] = torch.randn(1 << 19, generator=generator)
    tensors["head.w"] = torch.randn(1 << 20, generator=generator).to(torch.bfloat16)
    return tensors


@pytest.fixture
def saved(tmp_path):
    tensors = model()
    path = tmp_path / "model.safetensors"
    mpgpu.torch.save(tensors, path)
    return path, tensors


# --- select -----------------------------------------------------------------------------------------------------------------
def test_names_and_patterns_select_tensors(saved):
    path, tensors = saved
    for select, chosen in [
        ("embed.w", {"embed.w"}),
        ("layers.1?.w", {f"layers.1{at}.w" for at in range(10)}),
        (["layers.[23].w", "head.*", "embed.w"], {"layers.2.w", "layers.3.w", "head.w", "embed.w"}),
        ("*", set(tensors)),
        ([], set()),
    ]:
        assert_equal(mpgpu.torch.load(path, "cpu", select=select), {name: tensors[name] for name in chosen})
        assert {name for name, _ in mpgpu.torch.iter_load(path, "cpu", select=select)} == chosen
    named = mpgpu.torch.load(path, {"embed.w": "cpu", "layers.1.w": "cpu"}, select="layers.*")
    assert named.keys() == {"layers.1.w"}


def test_a_name_that_is_also_a_pattern_selects_its_tensor(tmp_path):
    mpgpu.torch.save({"a[0]": torch.zeros(1), "a0": torch.ones(1)}, tmp_path / "file")
    assert mpgpu.torch.load(tmp_path / "file", "cpu", select="a[0]").keys() == {"a[0]"}


def test_a_pattern_that_matches_nothing_is_refused(saved):
    path, tensors = saved
    with pytest.raises(mpgpu.ArgumentError, match=rf"select='lm_head\.\*': matches none of {len(tensors)} tensors, for example '"):
        mpgpu.torch.load(path, "cpu", select=["*", "lm_head.*"])
    with pytest.raises(mpgpu.ArgumentError, match=r"select='layers\.2\.w': matches none of 1 tensors, for example 'embed\.w'"):
        mpgpu.torch.load(path, {"embed.w": "cpu"}, select="layers.2.w")
    with pytest.raises(mpgpu.ArgumentError, match=r"select=\[3\]: must be a name or a pattern"):
        mpgpu.torch.load(path, "cpu", select=[3])


def test_only_the_selected_ranges_are_read_ahead(saved, monkeypatch):
    path, tensors = saved
    advised = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, begin, size, advice: advised.append((begin, begin + size)))
    mpgpu.torch.load(path, "cpu", select=["embed.w", "head.w"])
    entries = header_of(path)
    assert sorted(advised) == sorted((entries[name].begin, entries[name].end) for name in ("embed.w", "head.w"))
    del advised[:]
    assert_equal(mpgpu.torch.load(path, "cpu", cache=False), tensors)
    assert advised == []


# --- dtype ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_floating_point_tensors_are_converted_and_others_keep_their_types(saved, dtype, monkeypatch):
    path, tensors = saved
    expected = {name: each.to(dtype) if each.is_floating_point() else each for name, each in tensors.items()}
    assert_equal(mpgpu.torch.load(path, "cpu", dtype=dtype), expected)
    assert_equal(dict(mpgpu.torch.iter_load(path, "cpu", dtype=dtype)), expected)
    monkeypatch.setattr(mpgpu._load, "_SHORT_BATCH", 1 << 10)
    assert_equal(mpgpu.torch.load(path, "cpu", dtype=dtype), expected)


def test_tensors_of_the_stored_types_are_released_after_their_batch(saved, monkeypatch):
    path, tensors = saved
    alive, most = weakref.WeakSet(), []
    usual = mpgpu._fill.allocated

    class Kept(torch.Tensor):
        pass

    def counted(*arguments):
        made = usual(*arguments).as_subclass(Kept)
        alive.add(made)
        most.append(sum(each.nbytes for each in alive))
        return made

    monkeypatch.setattr(mpgpu._load, "_SHORT_BATCH", 1 << 10)
    # Only tensors of the stored types are allocated through this name.
    monkeypatch.setattr(mpgpu._fill, "allocated", counted)
    mpgpu.torch.load(path, "cpu", dtype=torch.float64)
    largest = max(tensor.nbytes for tensor in tensors.values())
    assert largest <= max(most) < sum(tensor.nbytes for tensor in tensors.values() if tensor.is_floating_point())
    gc.collect()
    assert not alive


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, "float32", 16])
def test_a_type_that_is_no_floating_point_type_is_refused(saved, dtype):
    with pytest.raises(mpgpu.ArgumentError, match=r"dtype=.*: must be a floating-point type of torch, for example torch\.bfloat16"):
        mpgpu.torch.load(saved[0], "cpu", dtype=dtype)


def test_a_conversion_that_torch_lacks_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch has no type of four bits")
    four = torch.arange(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    mpgpu.torch.save({"four": four, "x": torch.ones(2)}, tmp_path / "file")
    monkeypatch.setattr(mpgpu._load, "_Contents", None)
    with pytest.raises(mpgpu.ArgumentError, match=r"tensor 'four': torch cannot convert torch\.float4_e2m1fn_x2 to torch\.float32 on cpu"):
        mpgpu.torch.load(tmp_path / "file", "cpu", dtype=torch.float32)
    monkeypatch.undo()
    assert mpgpu.torch.load(tmp_path / "file", "cpu", select="x", dtype=torch.float16)["x"].dtype is torch.float16


# --- into -------------------------------------------------------------------------------------------------------------------
def test_existing_tensors_are_filled(saved):
    path, tensors = saved
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    loaded = mpgpu.torch.load(path, into=into)
    assert all(loaded[name] is into[name] for name in tensors)
    assert_equal(into, tensors)
    module = torch.nn.Linear(7, 3)
    mpgpu.torch.save({"weight": torch.ones(3, 7), "bias": torch.zeros(3), "other": torch.ones(1)}, path)
    mpgpu.torch.load(path, into=module.state_dict())
    assert bool((module.weight == 1).all()) and bool((module.bias == 0).all())
    mpgpu.torch.load(path, into=dict(module.named_parameters()))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda into: into.update(a=torch.zeros(4)),
            r"into\['a'\]: it is torch\.float32 of shape \(4,\), but the file has torch\.float32 of",
        ),
        (
            lambda into: into.update(a=torch.zeros(5, dtype=torch.int32)),
            r"into\['a'\]: it is torch\.int32 of shape \(5,\), but the file has",
        ),
        (lambda into: into.update(b=torch.zeros(4, 3).t()), r"into\['b'\]: shape \(3, 4\) with strides \(1, 3\) is not contiguous"),
        (lambda into: into.update(a=torch.zeros(5, device="meta")), r"into\['a'\]: a tensor on meta has a shape and no memory"),
        (lambda into: into.update(a=torch.zeros(5).to_sparse()), r"into\['a'\]: a tensor of layout torch.sparse_coo"),
        (lambda into: into.update(a=[0.0] * 5), r"into\['a'\] is a list: it must be a tensor"),
        (lambda into: into.update(c=torch.zeros(5)), r"`into` names tensor 'c', which the file does not contain"),
        (lambda into: into.update(a=into["b"].view(-1)[4:9]), r"into\['b'\] and into\['a'\] overlap: pass only one of them"),
        (lambda into: into.update(a=into["b"].view(-1)[:5]), r"into\['[ab]'\] and into\['[ab]'\] overlap: pass only one of them"),
    ],
)
def test_tensors_that_cannot_be_filled_are_refused_and_nothing_is_written(tmp_path, change, text):
    path = tmp_path / "file"
    mpgpu.torch.save({"a": torch.ones(5), "b": torch.ones(3, 4)}, path)
    into = {"a": torch.zeros(5), "b": torch.zeros(3, 4)}
    change(into)
    with pytest.raises(mpgpu.ArgumentError, match=text):
        mpgpu.torch.load(path, into=into)
    assert not bool(into["b"].any())


def test_tensors_to_fill_and_devices_exclude_each_other(saved):
    path, tensors = saved
    into = {"embed.w": torch.zeros_like(tensors["embed.w"])}
    with pytest.raises(mpgpu.ArgumentError, match=r"device='cpu' and into: pass only one of them"):
        mpgpu.torch.load(path, "cpu", into=into)
    with pytest.raises(mpgpu.ArgumentError, match=r"device=None: pass a device, for example 'cuda:0', or existing tensors by into="):
        mpgpu.torch.load(path)
    with pytest.raises(mpgpu.ArgumentError, match=r"dtype=torch\.float16 and into: pass only one of them"):
        mpgpu.torch.load(path, into=into, dtype=torch.float16)
    with pytest.raises(mpgpu.ArgumentError, match=r"into is a list: pass a dict of tensors by name"):
        mpgpu.torch.load(path, into=[into["embed.w"]])
    # Only names that are selected must be in the file.
    assert mpgpu.torch.load(path, into={**into, "tied.w": torch.zeros(1)}, select="embed.*").keys() == {"embed.w"}
    both = {**into, "head.w": torch.zeros_like(tensors["head.w"])}
    assert mpgpu.torch.load(path, into=both, select="embed.*").keys() == {"embed.w"}
    assert not bool(both["head.w"].any()) and torch.equal(both["embed.w"], tensors["embed.w"])


# --- several devices --------------------------------------------------------------------------------------------------------
def test_each_device_of_a_list_gets_all_tensors(saved, gpus, plans):
    path, tensors = saved
    for devices in (["cpu"], ["cpu", "cpu"], ["cuda:0"], ["cuda:0", "cuda:1"], ("cuda:1", "cpu", "cuda:0"), []):
        loaded = mpgpu.torch.load(path, devices)
        assert len(loaded) == len(devices)
        for each, device in zip(loaded, devices):
            assert_equal(each, tensors)
            assert gpus.gpu_of(each["embed.w"]) == torch.device(device).index
        if len(loaded) == 2:
            assert loaded[0]["embed.w"].data_ptr() != loaded[1]["embed.w"].data_ptr()


def test_an_iterator_refuses_a_list_of_devices(saved):
    with pytest.raises(
        mpgpu.ArgumentError, match=r"device=\['cpu'\]: pass one device, or a dict from names to devices; only mpgpu\.torch\.load"
    ):
        mpgpu.torch.iter_load(saved[0], ["cpu"])


# --- small tensors ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("most", [1 << 12, 1 << 16, 256 << 20])
@pytest.mark.parametrize("seed", range(6))
def test_small_tensors_are_copied_to_a_gpu_as_ranges(tmp_path, gpus, plans, monkeypatch, seed, most):
    tensors, path = model(seed, 300), tmp_path / "file"
    mpgpu.torch.save(tensors, path)
    monkeypatch.setattr(mpgpu._fill, "_STAGED", most)
    assert_equal(mpgpu.torch.load(path, "cuda:1"), tensors)
    if most == 256 << 20:
        # Two large tensors, and the small ones between them as ranges.
        assert len(plans) == 1 and plans[0] <= 5
    chance = random.Random(seed)
    some = {name: chance.choice(["cuda:0", "cuda:1", "cpu"]) for name in tensors if chance.random() < 0.7}
    loaded = mpgpu.torch.load(path, some)
    assert_equal(loaded, {name: tensors[name] for name in some})
    assert all(gpus.gpu_of(loaded[name]) == torch.device(device).index for name, device in some.items() if loaded[name].numel())
    gpus.run_in_order(monkeypatch)
    half = {name: each.to(torch.float16) if each.is_floating_point() else each for name, each in tensors.items()}
    assert_equal(mpgpu.torch.load(path, "cuda:0", dtype=torch.float16), half)
    assert_equal(dict(mpgpu.torch.iter_load(path, "cuda:0")), tensors)
    into = {name: gpus.empty(tensor.shape, tensor.dtype, "cuda:0") for name, tensor in tensors.items()}
    mpgpu.torch.load(path, into=into)
    assert_equal(into, tensors)


def test_the_ranges_of_a_batch_are_bounded(tmp_path, gpus, monkeypatch):
    path = tmp_path / "file"
    mpgpu.torch.save({f"{at:03}": torch.full((64,), at) for at in range(200)}, path)
    monkeypatch.setattr(mpgpu._fill, "_STAGED", 16 << 10)
    assert mpgpu.torch.load(path, "cuda:0")["199"].tolist() == [199] * 64
    staged = [shape[0] for shape, dtype, _ in gpus.allocations if dtype is torch.uint8]
    assert len(staged) >= 6 and sum(staged) == 200 * 512 and max(staged) <= 16 << 10


def test_small_tensors_on_the_cpu_need_no_plan(tmp_path, plans):
    path, tensors = tmp_path / "file", {f"{at}": torch.tensor([at]) for at in range(5000)}
    mpgpu.torch.save(tensors, path)
    assert_equal(mpgpu.torch.load(path, "cpu"), tensors)
    assert_equal(mpgpu.torch.load(path, dict.fromkeys(list(tensors)[::2], "cpu")), {name: tensors[name] for name in list(tensors)[::2]})
    assert plans == []


def test_many_tensors_need_linear_work(tmp_path):
    """Counts the steps of the interpreter for 500 and for 4000 tensors."""
    steps = {}
    for count in (500, 4000):
        path = tmp_path / str(count)
        mpgpu.torch.save({f"{at:05}": torch.zeros(1) for at in range(count)}, path)
        calls = 0

        def count_call(*_):
            nonlocal calls
            calls += 1

        sys.setprofile(count_call)
        try:
            mpgpu.torch.load(path, "cpu", select="*")
        finally:
            sys.setprofile(None)
        steps[count] = calls
    assert steps[4000] < 8.5 * steps[500]


# --- iterator ---------------------------------------------------------------------------------------------------------------
def test_an_iterator_yields_each_tensor_in_the_order_of_the_file_and_holds_no_other_batch(saved, monkeypatch):
    path, tensors = saved
    monkeypatch.setattr(mpgpu._load, "_SHORT_BATCH", 1 << 12)
    order = list(header_of(path))
    alive, names = [], []
    for name, tensor in mpgpu.torch.iter_load(path, "cpu"):
        assert torch.equal(bits(tensor), bits(tensors[name]))
        names.append(name)
        alive.append(weakref.ref(tensor))
        del tensor
        assert not any(each() is not None for each in alive)
    filled = [name for name in order if tensors[name].numel()]
    assert [name for name in names if tensors[name].numel()] == filled and sorted(names) == sorted(tensors)


def test_an_iterator_checks_its_arguments_at_once(saved):
    path, _ = saved
    for arguments, options in [((path, "gpu"), {}), ((path, "cpu"), {"select": "none"}), ((path, "cpu"), {"dtype": torch.int8})]:
        with pytest.raises(mpgpu.ArgumentError):
            mpgpu.torch.iter_load(*arguments, **options)


def test_an_iterator_that_is_dropped_closes_its_files(saved):
    before = set(os.listdir("/proc/self/fd"))
    for stop in (0, 1, 5):
        iterator = mpgpu.torch.iter_load(saved[0], "cpu")
        for _ in range(stop):
            next(iterator)
        del iterator
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == len(before)
        assert not [each for each in threading.enumerate() if each.name == "mpgpu-ahead"]


# --- progress ---------------------------------------------------------------------------------------------------------------
def test_progress_is_shown_by_tqdm_if_it_is_installed(saved, monkeypatch, capsys):
    path, tensors = saved
    bars = []

    class Bar:
        def __init__(self, **options):
            self.options, self.done, self.is_closed = options, 0, False
            bars.append(self)

        def update(self, nbytes):
            self.done += nbytes

        def close(self):
            self.is_closed = True

    module = type(sys)("tqdm")
    module.tqdm = Bar
    monkeypatch.setitem(sys.modules, "tqdm", module)
    mpgpu.torch.load(path, "cpu", progress=True)
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert [(bar.options["total"], bar.options["desc"], bar.done, bar.is_closed) for bar in bars] == [(total, str(path), total, True)]
    mpgpu.torch.load([path], "cpu", progress=True)
    assert bars[1].options["desc"] == "1 files"
    assert capsys.readouterr().err == ""


# --- files that change ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_file_that_is_written_or_shortened_while_it_is_read_is_refused(saved, gpus, monkeypatch, device, moment):
    path, _ = saved
    usual = mpgpu._load.Filler.fill

    def with_change(change):
        def fill(*arguments):
            if moment == "before":
                change()
            usual(*arguments)
            if moment == "after":
                change()

        return fill

    def written():
        with open(path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\0")
        os.utime(path, ns=(1, 1))

    monkeypatch.setattr(mpgpu._load.Filler, "fill", with_change(written))
    with pytest.raises(mpgpu.ArgumentError, match=rf"{path}: the file was modified while it was read: load it again when it is complete"):
        mpgpu.torch.load(path, device)
    monkeypatch.setattr(mpgpu._load.Filler, "fill", with_change(lambda: os.truncate(path, 5000)))
    with pytest.raises(mpgpu.ArgumentError, match=rf"{path}: the file was truncated .*: load it again when it is complete"):
        mpgpu.torch.load(path, device)


def test_a_file_that_is_replaced_while_it_is_read_is_loaded_as_it_was(saved, monkeypatch):
    path, tensors = saved
    usual = mpgpu._load.Filler.fill

    def replaced(*arguments):
        mpgpu.torch.save({"other": torch.zeros(1)}, path)
        usual(*arguments)

    monkeypatch.setattr(mpgpu._load.Filler, "fill", replaced)
    assert_equal(mpgpu.torch.load(path, "cpu"), tensors)


def test_a_failed_load_stops_reading_ahead_and_closes_the_file(saved, monkeypatch):
    before = set(os.listdir("/proc/self/fd"))

    def failing(*_):
        raise MemoryError("no memory")

    monkeypatch.setattr(mpgpu._load.Filler, "fill", failing)
    with pytest.raises(MemoryError) as caught:
        mpgpu.torch.load(saved[0], "cpu")
    assert caught.value is not None
    assert not [each for each in threading.enumerate() if each.name == "mpgpu-ahead"]
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_threads_load_at_the_same_time(saved):
    path, tensors = saved
    failures = []

    def run(at):
        try:
            for _ in range(5):
                assert_equal(mpgpu.torch.load(path, "cpu"), tensors)
                assert_equal(dict(mpgpu.torch.iter_load(path, "cpu", select=["layers.*", "*.w"])), tensors)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(at,)) for at in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failures
    assert gc.isenabled()
