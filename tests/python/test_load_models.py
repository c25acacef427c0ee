# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests mpgpu.torch.load of models in several files: lists, folders and indices."""

from __future__ import annotations

import json
import os
import random

import mpgpu
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import mpgpu.torch  # noqa: E402

INDEX = "model.safetensors.index.json"


@pytest.fixture
def no_copies(monkeypatch):
    """Fails the test if memory is allocated or data are read."""

    def refused(*_, **__):
        raise AssertionError("memory is allocated or data are read before all checks")

    monkeypatch.setattr(mpgpu._load, "allocated", refused)
    monkeypatch.setattr(mpgpu._load, "_Contents", refused)


def write_index(folder, files, name=INDEX):
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}))
    return folder / name


def write_model(folder, shards=3, each=4):
    """Writes a model in several files with an index, and returns its tensors."""
    generator = torch.Generator().manual_seed(shards)
    tensors, files = {}, {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        own = {f"layers.{shard}.{at}": torch.randn(7 + at, 5, generator=generator) for at in range(each)}
        mpgpu.torch.save(own, folder / name)
        tensors.update(own)
        files.update(dict.fromkeys(own, name))
    write_index(folder, files)
    return tensors, files


def assert_equal(loaded, tensors):
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor)


def test_a_model_in_several_files_is_loaded_by_its_index_its_folder_or_its_files(tmp_path):
    tensors, files = write_model(tmp_path)
    assert_equal(mpgpu.torch.load(tmp_path / INDEX, "cpu"), tensors)
    assert_equal(mpgpu.torch.load(str(tmp_path), "cpu"), tensors)
    assert_equal(mpgpu.torch.load(os.fsencode(tmp_path), "cpu"), tensors)
    paths = [tmp_path / name for name in sorted(set(files.values()))]
    assert_equal(mpgpu.torch.load(paths, "cpu"), tensors)
    assert_equal(mpgpu.torch.load(tuple(paths[:1]), "cpu"), {name: tensors[name] for name in files if files[name] == paths[0].name})
    os.unlink(tmp_path / INDEX)
    # Files with other endings are no part of the model.
    (tmp_path / ".mpgpu-1-2.tmp").write_bytes(b"rest of a save that was killed")
    assert_equal(mpgpu.torch.load(tmp_path, "cpu"), tensors)


def test_an_index_with_another_name_is_found_if_it_is_the_only_one(tmp_path):
    tensors, files = write_model(tmp_path)
    os.rename(tmp_path / INDEX, tmp_path / "diffusion.safetensors.index.json")
    (tmp_path / "other.safetensors").write_bytes(b"no part of the model")
    assert_equal(mpgpu.torch.load(tmp_path, "cpu"), tensors)
    write_index(tmp_path, files, "diffusion.fp16.safetensors.index.json")
    with pytest.raises(mpgpu.ArgumentError, match=rf"{tmp_path}: the folder has 2 indices: pass one of them: diffusion\.fp16\."):
        mpgpu.torch.load(tmp_path, "cpu")
    write_index(tmp_path, files)
    assert_equal(mpgpu.torch.load(tmp_path, "cpu"), tensors)


def test_links_to_files_outside_the_folder_are_followed(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    tensors, files = write_model(tmp_path / "blobs")
    for name in {INDEX, *files.values()}:
        os.symlink(f"../blobs/{name}", tmp_path / "snapshot" / name)
    assert_equal(mpgpu.torch.load(tmp_path / "snapshot", "cpu"), tensors)


def test_files_in_folders_below_the_index_are_loaded(tmp_path):
    (tmp_path / "parts").mkdir()
    mpgpu.torch.save({"a": torch.arange(3)}, tmp_path / "parts" / "a.safetensors")
    write_index(tmp_path, {"a": "./parts/a.safetensors"})
    assert mpgpu.torch.load(tmp_path, "cpu")["a"].tolist() == [0, 1, 2]


def test_a_name_in_two_files_is_refused_with_both(tmp_path, no_copies):
    one, two = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    mpgpu.torch.save({"x": torch.zeros(1), "y": torch.zeros(1)}, one)
    mpgpu.torch.save({"y": torch.zeros(1), "z": torch.zeros(1)}, two)
    for path in ([one, two], tmp_path):
        with pytest.raises(mpgpu.ArgumentError, match=rf"{two}: tensor 'y' is also in {one}: load the files in separate calls"):
            mpgpu.torch.load(path, "cpu")
    with pytest.raises(mpgpu.ArgumentError, match=rf"{one}: tensor 'x' is also in {one}"):
        mpgpu.torch.load([one, one], "cpu")
    write_index(tmp_path, {"x": one.name, "y": one.name, "z": two.name})
    with pytest.raises(mpgpu.ArgumentError, match=rf"{two}: tensor 'y' is also in {one}"):
        mpgpu.torch.load(tmp_path, "cpu")


def test_a_missing_file_and_a_missing_tensor_are_refused_by_name(tmp_path, no_copies):
    _, files = write_model(tmp_path)
    last = tmp_path / files["layers.2.0"]
    write_index(tmp_path, {**files, "layers.2.9": last.name})
    with pytest.raises(
        mpgpu.ArgumentError, match=rf"{last}: the file has no tensor 'layers\.2\.9', which {tmp_path / INDEX} assigns to it"
    ):
        mpgpu.torch.load(tmp_path, "cpu")
    write_index(tmp_path, files)
    whole = last.read_bytes()
    last.write_bytes(whole[:-1])
    with pytest.raises(mpgpu.ArgumentError, match=rf"{last}: .* tensor 'layers\.2\.3' ends at byte {len(whole)}: the file is truncated"):
        mpgpu.torch.load(tmp_path, "cpu")
    last.unlink()
    with pytest.raises(mpgpu.ArgumentError, match=rf"{INDEX}: the file {last} with tensor 'layers\.2\.0' is missing: download"):
        mpgpu.torch.load(tmp_path, "cpu")
    last.mkdir()
    with pytest.raises(mpgpu.ArgumentError, match=rf"the file {last} with tensor 'layers\.2\.0' is a folder"):
        mpgpu.torch.load(tmp_path, "cpu")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        mpgpu.torch.load([tmp_path / "nowhere"], "cpu")


@pytest.mark.parametrize("file", ["../a.safetensors", "/a.safetensors", "parts/../../a.safetensors", ".."])
def test_an_index_cannot_name_files_outside_its_folder(tmp_path, file):
    (tmp_path / "model").mkdir()
    mpgpu.torch.save({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    path = write_index(tmp_path / "model", {"a": file})
    with pytest.raises(
        mpgpu.ArgumentError, match=rf"{path}: not an index .*: its weight_map assigns tensor 'a' to '{file}', which is outside the folder"
    ):
        mpgpu.torch.load(path, "cpu")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", r"Expecting value"),
        (b"{", r"Expecting property name"),
        (b"\xff{}", r"'utf-8' codec"),
        (b"[" * 100_000, r"recursion|Recursion"),
        (b"[1]", r"it has no weight_map"),
        (b"7", r"it has no weight_map"),
        (b"{}", r"it has no weight_map"),
        (b'{"weight_map": {}}', r"its weight_map is not a JSON object with names of tensors"),
        (b'{"weight_map": ["a"]}', r"its weight_map is not a JSON object with names of tensors"),
        (b'{"weight_map": {"a": 5}}', r"its weight_map assigns tensor 'a' to 5, which is not a file name"),
        (b'{"weight_map": {"a": ""}}', r"its weight_map assigns tensor 'a' to ''"),
        (b'{"weight_map": {"a": "b\\u0000c"}}', r"its weight_map assigns tensor 'a' to 'b\\x00c'"),
    ],
)
def test_indices_that_are_damaged_are_refused(tmp_path, content, text):
    path = tmp_path / INDEX
    path.write_bytes(content)
    for each in (path, tmp_path):
        with pytest.raises(
            mpgpu.ArgumentError, match=rf"{path}: not an index of safetensors files: .*{text}.*; download or write it again"
        ):
            mpgpu.torch.load(each, "cpu")


def test_an_index_that_is_cut_or_changed_is_loaded_or_refused_and_nothing_else(tmp_path):
    tensors, _ = write_model(tmp_path)
    path, chance = tmp_path / INDEX, random.Random(11)
    whole = path.read_bytes()
    refused = 0
    for _ in range(300):
        at = chance.randrange(len(whole))
        changed = whole[:at] + bytes([chance.randrange(32, 127)]) + whole[at + 1 :] if chance.random() < 0.7 else whole[:at]
        path.write_bytes(changed)
        try:
            loaded = mpgpu.torch.load(path, "cpu")
        except mpgpu.ArgumentError as error:
            refused += 1
            assert str(path) in str(error)
        else:
            assert_equal(loaded, tensors)
    assert 50 < refused < 300


def test_a_list_without_files_and_a_folder_without_tensors_are_refused(tmp_path):
    with pytest.raises(mpgpu.ArgumentError, match=r"path=\[\]: pass at least one file"):
        mpgpu.torch.load([], "cpu")
    with pytest.raises(mpgpu.ArgumentError, match=rf"{tmp_path}: the folder has no \*\.safetensors files"):
        mpgpu.torch.load(tmp_path, "cpu")
    with pytest.raises(TypeError, match="not int"):
        mpgpu.torch.load([3], "cpu")


def test_files_are_closed_if_a_later_one_is_refused(tmp_path):
    write_model(tmp_path)
    (tmp_path / "model-00003-of-00003.safetensors").write_bytes(b"")
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(mpgpu.ArgumentError, match="it is empty"):
        mpgpu.torch.load(tmp_path, "cpu")
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_random_models_are_loaded_as_they_were_saved(tmp_path):
    types = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float16, torch.complex64]
    for seed in range(25):
        chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        tensors, files = {}, {}
        for shard in range(chance.randint(1, 4)):
            own = {}
            for at in range(chance.choice([0, 1, 3, 30, 300])):
                shape = [chance.choice([0, 1, 2, 5, 40]) for _ in range(chance.randint(0, 3))]
                made = torch.randint(-100, 100, shape, generator=generator).to(chance.choice(types))
                own[f"{chance.choice('äb.c')}{shard}.{at}"] = made.transpose(0, -1) if len(shape) > 1 and chance.random() < 0.3 else made
            if not own:
                continue
            mpgpu.torch.save(own, folder / f"{shard}.safetensors")
            tensors.update(own)
            files.update(dict.fromkeys(own, f"{shard}.safetensors"))
        if not files:
            continue
        write_index(folder, files)
        assert_equal(mpgpu.torch.load(folder, "cpu"), tensors)
        assert_equal(dict(mpgpu.torch.iter_load(folder, "cpu")), tensors)
        some = chance.sample(sorted(tensors), chance.randint(0, len(tensors)))
        assert_equal(mpgpu.torch.load(folder, dict.fromkeys(some, "cpu")), {name: tensors[name] for name in some})
