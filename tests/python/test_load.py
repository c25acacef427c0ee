# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests mpgpu.torch.load on the CPU; tests/gpu/load.py tests it on GPUs."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import resource
import sys

import mpgpu
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import mpgpu.torch  # noqa: E402

TYPES = [
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.float16,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def file_of(path, header, content=b""):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content)
    return path


def one(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.fixture
def weights(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    generator = torch.Generator().manual_seed(5)
    shapes = [(300, 70), (7,), (), (0, 4), (1 << 20,), (3, 5), (2, 2), (9,), (33,), (1,)]
    tensors = {
        f"layer.{number}": torch.randn(shape, generator=generator).to(dtype) for number, (shape, dtype) in enumerate(zip(shapes, TYPES))
    }
    path = tmp_path / "model.safetensors"
    safetensors.save_file(tensors, path)
    return path, tensors


def assert_equal(loaded, tensors):
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(bits(loaded[name]), bits(tensor))


def test_every_tensor_of_a_file_is_loaded(weights, capsys, monkeypatch):
    # Without tqdm, the progress is text.
    monkeypatch.setitem(sys.modules, "tqdm", None)
    path, tensors = weights
    for where in ("cpu", torch.device("cpu"), mpgpu.HOST, dict.fromkeys(tensors, "cpu")):
        assert_equal(mpgpu.torch.load(path, where), tensors)
    assert_equal(mpgpu.torch.load(os.fsencode(path), "cpu"), tensors)
    assert capsys.readouterr().err == ""
    # The file needs several batches with this limit, and one of them is larger than the limit.
    monkeypatch.setattr(mpgpu._contents, "_BATCH", 1 << 10)
    assert_equal(mpgpu.torch.load(str(path), "cpu", progress=True), tensors)
    assert f"{path}: 0.0 of 0.0 GB, " in capsys.readouterr().err


def test_what_no_device_is_named_for_is_not_loaded(weights):
    path, tensors = weights
    loaded = mpgpu.torch.load(path, {"layer.0": "cpu", "layer.3": "cpu"})
    assert_equal(loaded, {name: tensors[name] for name in ("layer.0", "layer.3")})
    assert mpgpu.torch.load(path, {}) == {}


def test_a_file_that_is_not_mapped_is_read(weights, monkeypatch):
    path, tensors = weights

    def refused(*_, **__):
        raise mpgpu.NotSupported("no mapping of files")

    monkeypatch.setattr(mpgpu._fill, "SMALL", 0)
    monkeypatch.setattr(mpgpu._contents, "MappedFile", refused)
    monkeypatch.setattr(mpgpu._contents, "_READ_BATCH", 1 << 10)
    with pytest.warns(RuntimeWarning, match=rf"{path}: the system cannot map the file \(no mapping of files\)") as warned:
        assert_equal(mpgpu.torch.load(path, "cpu"), tensors)
    assert [each.filename for each in warned] == [__file__]
    with pytest.warns(RuntimeWarning, match="cannot map"):
        assert_equal(mpgpu.torch.load(path, {"layer.4": "cpu"}), {"layer.4": tensors["layer.4"]})

    def shortened(*_, **__):
        os.truncate(path, path.stat().st_size - 1)
        refused()

    monkeypatch.setattr(mpgpu._contents, "MappedFile", shortened)
    with pytest.warns(RuntimeWarning, match="cannot map"):
        with pytest.raises(mpgpu.ArgumentError, match=rf"{path}: the file was truncated after its header was read"):
            mpgpu.torch.load(path, "cpu")


@pytest.mark.parametrize("cache", [True, False])
def test_a_file_that_is_shortened_before_or_after_it_is_mapped_is_refused(weights, monkeypatch, cache):
    path, tensors = weights
    contents = path.read_bytes()

    def shortened_before(*arguments, **options):
        os.truncate(path, 4096)
        return mpgpu.MappedFile(*arguments, **options)

    def shortened_after(*arguments, **options):
        mapped = mpgpu.MappedFile(*arguments, **options)
        os.truncate(path, 4096)
        return mapped

    monkeypatch.setattr(mpgpu._fill, "SMALL", 0)
    assert_equal(mpgpu.torch.load(path, "cpu", cache=cache), tensors)
    for shortened in (shortened_before, shortened_after):
        path.write_bytes(contents)
        monkeypatch.setattr(mpgpu._contents, "MappedFile", shortened)
        with pytest.raises(mpgpu.ArgumentError, match=rf"{path}: the file was truncated"):
            mpgpu.torch.load(path, "cpu", cache=cache)


INDEX = {"metadata": {"total_size": 8}, "weight_map": {f"{number}": f"model-{number % 5}.safetensors" for number in range(9)}}

OTHERS = [
    (b"", r"it is empty; download or write it again"),
    (b"PK\x03\x04" + bytes(5000), r"it is a file of torch\.save: mpgpu\.torch\.to\(torch\.load\(path, mmap=True\), device\)"),
    (pickle.dumps({"a": 1}), r"it is a pickle, as of torch\.save"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n", r"it is a Git LFS pointer .*: run git lfs pull"),
    (
        json.dumps(INDEX, indent=2).encode(),
        r"it is the index of a model in 5 files: rename it to \*\.safetensors\.index\.json, or load its files: model-0\.safetensors, .*, …",
    ),
    (json.dumps({"torch_dtype": "bfloat16"}, indent=2).encode(), r"it is JSON: pass the file with the tensors"),
    (b"<!DOCTYPE html><html>Not found</html>", r"it is a page of HTML or XML"),
    (b"GGUF" + bytes(100), r"it is a GGUF file"),
    (b"\x00\x01", r"it begins with 00 01, which is no length and no header"),
    (b"random bytes that are nothing", r"it begins with 72 61 6e"),
]


@pytest.mark.parametrize(("content", "text"), OTHERS)
def test_files_of_other_formats_are_refused_with_their_format(tmp_path, content, text):
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(mpgpu.ArgumentError, match=rf"{file}: not a complete safetensors file: {text}"):
        mpgpu.torch.load(file, "cpu")


HEADERS = [
    ({"a": one()}, b"xyz", r"it has \d+ bytes, but tensor 'a' ends at byte 72: the file is truncated; download"),
    ({"a": one()}, b"wxyz+", r"it has 1 bytes after its last tensor, which its header does not describe"),
    ({"a": one(), "b": one(offsets=(5, 9))}, bytes(9), r"tensor 'b' begins at byte 5 of the data instead of 4"),
    ({"a": one(), "b": one(offsets=(3, 7))}, bytes(7), r"tensor 'b' begins at byte 3 of the data instead of 4"),
    ({"a": one("F32")}, bytes(4), r"its header's entry of tensor 'a' is inconsistent: .*'F32'"),
    ({"a": one(shape=(-1, -4))}, bytes(4), r".*entry of tensor 'a' is inconsistent"),
    ({"a": one(shape=(4.0,))}, bytes(4), r".*entry of tensor 'a' is inconsistent"),
    ({"a": {"dtype": "U8"}}, b"", r".*entry of tensor 'a' is inconsistent"),
    ({"a": 5}, b"", r".*entry of tensor 'a' is inconsistent"),
    (b'{"\xff":{}}', b"", r"its header is not UTF-8 at byte 2, for example in a tensor's name"),
    (b'{"a":', b"", r"its header is not JSON"),
    (b"{" * 2000, b"", r"its header is not JSON"),
]


@pytest.mark.parametrize(("header", "content", "text"), HEADERS)
def test_headers_that_contradict_themselves_or_the_file_are_refused(tmp_path, header, content, text):
    file = file_of(tmp_path / "file", header, content)
    with pytest.raises(mpgpu.ArgumentError, match=rf"{file}: not a complete safetensors file: {text}"):
        mpgpu.torch.load(file, "cpu")


def test_a_file_is_refused_wherever_it_is_cut(weights, tmp_path):
    path, _ = weights
    whole, file = path.read_bytes(), tmp_path / "cut"
    for size in [*range(0, 1000, 7), *range(len(whole) - 3, len(whole))]:
        file.write_bytes(whole[:size])
        with pytest.raises(mpgpu.ArgumentError, match=rf"{file}: not a complete safetensors file: "):
            mpgpu.torch.load(file, "cpu")


def test_what_safetensors_takes_and_refuses_is_taken_and_refused(tmp_path):
    safetensors = pytest.importorskip("safetensors", reason="safetensors is not installed")
    chance = random.Random(7)
    accepted = 0
    for round in range(400):
        header, at = {}, 0
        for number in range(chance.randint(0, 4)):
            dtype, size = chance.choice([("U8", 1), ("F16", 2), ("F32", 4), ("I64", 8), ("BOOL", 1), ("BF16", 2)])
            shape = [chance.randint(0, 3) for _ in range(chance.randint(0, 3))]
            nbytes = size
            for extent in shape:
                nbytes *= extent
            header[f"t{number}"] = one(dtype, shape, (at, at + nbytes))
            at += nbytes
        text = json.dumps(dict(chance.sample(list(header.items()), len(header)))).encode()
        if round % 2:
            # The test replaces one digit by another.
            digits = [place for place, letter in enumerate(text) if chr(letter).isdigit()]
            if digits:
                place = chance.choice(digits)
                text = text[:place] + str(chance.randint(1, 9)).encode() + text[place + 1 :]
        file = file_of(tmp_path / "file", text, bytes(chance.randrange(2) for _ in range(at)))
        try:
            with safetensors.safe_open(file, "pt") as opened:
                expected = {name: opened.get_tensor(name) for name in opened.keys()}
        except safetensors.SafetensorError:
            with pytest.raises(mpgpu.ArgumentError, match=r"not a complete safetensors file|is not known to"):
                mpgpu.torch.load(file, "cpu")
        else:
            accepted += 1
            assert_equal(mpgpu.torch.load(file, "cpu"), expected)
    assert 200 < accepted < 390


def test_what_the_system_refuses_raises_its_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        mpgpu.torch.load(tmp_path / "nowhere", "cpu")
    with pytest.raises(IsADirectoryError):
        mpgpu.torch.load([tmp_path], "cpu")
    file = file_of(tmp_path / "file", {"a": one()}, b"wxyz")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files") as caught:
            mpgpu.torch.load(file, "cpu")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert caught.value.errno == errno.EMFILE
    if os.geteuid() != 0:
        file.chmod(0)
        with pytest.raises(PermissionError):
            mpgpu.torch.load(file, "cpu")


def test_memory_that_is_not_there_is_no_fault_of_the_file(tmp_path, monkeypatch):
    file = file_of(tmp_path / "file", {"a": one()}, b"wxyz")

    def refused(*_, **__):
        raise MemoryError

    monkeypatch.setattr(mpgpu._safetensors.json, "loads", refused)
    with pytest.raises(MemoryError):
        mpgpu.torch.load(file, "cpu")


def test_what_is_no_file_is_refused_without_waiting(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(mpgpu.ArgumentError, match=rf"{fifo}: a FIFO, which cannot be loaded: save its contents to a file first"):
        mpgpu.torch.load(fifo, "cpu")
    with pytest.raises(mpgpu.ArgumentError, match="/dev/zero: a device, which cannot be loaded"):
        mpgpu.torch.load("/dev/zero", "cpu")


def test_names_of_files_may_be_any_bytes(tmp_path):
    path = file_of(tmp_path / os.fsdecode(b"w\xff.safetensors"), {"å": one()}, b"wxyz")
    assert mpgpu.torch.load(path, "cpu")["å"].tolist() == list(b"wxyz")
    assert mpgpu.torch.load(os.fsencode(path), "cpu").keys() == {"å"}


class Counted(str):
    """Name that counts how often it is compared with other names."""

    __slots__ = ()
    __hash__ = str.__hash__
    comparisons = 0

    def __eq__(self, other):
        Counted.comparisons += 1
        return str.__eq__(self, other)


def test_names_are_looked_up_and_not_searched(tmp_path):
    count = 1000
    file = file_of(tmp_path / "file", {f"t{at}": one(offsets=(4 * at, 4 * at + 4)) for at in range(count)}, bytes(4 * count))
    Counted.comparisons = 0
    assert len(mpgpu.torch.load(file, {Counted(f"t{at}"): "cpu" for at in range(count)})) == count
    assert Counted.comparisons < 10 * count


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("cuda:77", r"device='cuda:77': torch sees \d+ GPUs"),
        ("gpu", r"device='gpu': "),
        ("mps", r"device='mps': mpgpu supports the CPU and CUDA devices"),
        ({"layer.0": "meta"}, r"device='meta': mpgpu supports the CPU and CUDA devices"),
        (
            {"layer.99": "cpu"},
            r"`device` names tensor 'layer\.99', which the file does not contain \(it has 10 tensors, for example 'layer\.\d'\)",
        ),
    ],
)
def test_devices_and_names_that_are_not_there_are_refused(weights, device, text):
    with pytest.raises(mpgpu.ArgumentError, match=text):
        mpgpu.torch.load(weights[0], device)


@pytest.mark.parametrize(("dtype", "nbytes"), [("F6_E2M3", 3), ("X9", 7)])
def test_a_type_that_is_not_known_is_refused_by_name_unless_it_is_left_out(tmp_path, dtype, nbytes):
    header = {"odd": one(dtype, (4,), (0, nbytes)), "even": one(offsets=(nbytes, nbytes + 4))}
    file = file_of(tmp_path / "odd.safetensors", header, bytes(nbytes + 4))
    with pytest.raises(
        mpgpu.ArgumentError, match=rf"{file}: tensor 'odd': its type {dtype} is not known to this torch \(.*\) or to mpgpu: update them"
    ):
        mpgpu.torch.load(file, "cpu")
    assert mpgpu.torch.load(file, {"even": "cpu"})["even"].tolist() == [0, 0, 0, 0]


def test_two_elements_of_four_bits_are_one_of_torch(tmp_path):
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch has no type of four bits")
    file = file_of(tmp_path / "file", {"a": one("F4", (3, 4), (0, 6))}, b"\x01\x02\x03\x04\x05\x06")
    loaded = mpgpu.torch.load(file, "cpu")["a"]
    assert (loaded.dtype, loaded.shape) == (torch.float4_e2m1fn_x2, (3, 2))
    assert loaded.view(torch.uint8).flatten().tolist() == [1, 2, 3, 4, 5, 6]
    # A byte that contains elements of two rows has no shape in torch.
    file = file_of(tmp_path / "odd", {"a": one("F4", (2, 3), (0, 3))}, b"\x01\x02\x03")
    with pytest.raises(
        mpgpu.ArgumentError, match=r"tensor 'a': its shape \(2, 3\) must end with an even number, because torch stores pairs of F4 elements"
    ):
        mpgpu.torch.load(file, "cpu")
