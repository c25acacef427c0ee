# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests the model loader for vLLM on the CPU, with vLLM's own configuration and a small module in place of a model."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import types
import warnings

import mpgpu
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import mpgpu.torch  # noqa: E402


def test_the_package_names_the_plugin():
    plugins = importlib.metadata.distribution("mpgpu").entry_points
    assert [(each.name, each.value) for each in plugins if each.group == "vllm.general_plugins"] == [("mpgpu", "mpgpu.vllm:register")]


def test_importing_mpgpu_does_not_import_vllm():
    program = "import sys, mpgpu, mpgpu.torch; sys.exit('vllm' in sys.modules or 'mpgpu.vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.fixture(scope="module")
def vllm():
    """Modules of vLLM, after vLLM has loaded its plugins."""
    with warnings.catch_warnings():
        # Warnings of vLLM and of its dependencies are no errors of the loader.
        warnings.simplefilter("ignore")
        pytest.importorskip("vllm", reason="vllm is not installed")
        import vllm.config
        import vllm.model_executor.model_loader
        import vllm.plugins

        vllm.plugins.load_general_plugins()
    return vllm


class Model(torch.nn.Module):
    """Module that keeps all tensors that the loader passes."""

    def __init__(self):
        super().__init__()
        self.loaded = {}

    def load_weights(self, weights):
        for name, tensor in weights:
            assert name not in self.loaded
            self.loaded[name] = tensor
        return set(self.loaded)


def load(vllm, folder, model=None, **options):
    """Loads a folder by the loader that vLLM has for the format, and returns the tensors that the model got."""
    options.setdefault("device", "cpu")
    model = model or Model()
    described = types.SimpleNamespace(model=str(folder), revision=None, quantization=None, multimodal_config=None, is_moe=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = vllm.config.VllmConfig(device_config=vllm.config.DeviceConfig("cpu"))
    loader = vllm.model_executor.model_loader.get_model_loader(vllm.config.LoadConfig(load_format="mpgpu", **options))
    assert type(loader).__module__ == "mpgpu.vllm"
    loader.download_model(described)
    with vllm.config.set_current_vllm_config(config):
        loader.load_weights(model, described)
    return model.loaded


def write_model(folder, files):
    """Writes a model in several files with an index."""
    tensors = {}
    for at, name in enumerate(files):
        # One tensor is copied by the context. The CPU reads the small ones from the file.
        tensors[name] = {
            f"layers.{at}.big": torch.randn(1 << 19),
            f"layers.{at}.small": torch.arange(7 + at),
            f"empty.{at}": torch.empty(0, 3),
        }
        mpgpu.torch.save(tensors[name], folder / name)
    listed = {name: file for file, some in tensors.items() for name in some}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))


def assert_equal_to_files(loaded, files, prefix=""):
    """Compares the loaded tensors with those that the package safetensors reads."""
    load_file = pytest.importorskip("safetensors.torch", reason="safetensors is not installed").load_file
    expected = {prefix + name: tensor for file in files for name, tensor in load_file(file).items()}
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor)


def test_a_file_is_loaded(vllm, tmp_path):
    path = tmp_path / "model.safetensors"
    mpgpu.torch.save({"big": torch.randn(1 << 19), "half": torch.randn(3, 5).bfloat16(), "scalar": torch.tensor(2.5)}, path)
    assert_equal_to_files(load(vllm, tmp_path), [path])


def test_the_files_of_the_index_are_loaded(vllm, tmp_path):
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    write_model(tmp_path, files)
    # vLLM omits files that the index does not list. The name of its tensor is also in another file.
    mpgpu.torch.save({"layers.0.small": torch.zeros(1)}, tmp_path / "other.safetensors")
    assert_equal_to_files(load(vllm, tmp_path), [tmp_path / name for name in files])


def test_secondary_weights_get_their_prefix(vllm, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one, two = tmp_path / "one" / "model.safetensors", tmp_path / "two" / "model.safetensors"
    mpgpu.torch.save({"a": torch.arange(3)}, one)
    mpgpu.torch.save({"b": torch.arange(4)}, two)
    model = Model()
    model.secondary_weights = [vllm.model_executor.model_loader.DefaultModelLoader.Source(str(two.parent), None, prefix="encoder.")]
    loaded = load(vllm, one.parent, model)
    assert loaded.pop("a").tolist() == [0, 1, 2]
    assert_equal_to_files(loaded, [two], "encoder.")


def test_tensors_that_the_model_does_not_use_are_not_loaded(vllm, tmp_path):
    path = tmp_path / "model.safetensors"
    mpgpu.torch.save({"used[0]": torch.arange(3), "draft.a": torch.arange(4), "draft.b": torch.arange(5)}, path)
    model = Model()
    model.is_unused_checkpoint_weight = lambda name: name.startswith("draft.")
    assert {name: tensor.tolist() for name, tensor in load(vllm, tmp_path, model).items()} == {"used[0]": [0, 1, 2]}


def test_experts_of_other_workers_are_not_loaded(vllm, tmp_path):
    path = tmp_path / "model.safetensors"
    names = [f"layers.0.experts.{at}.up_proj.weight" for at in range(4)]
    mpgpu.torch.save({name: torch.arange(3) for name in [*names, "layers.0.gate.weight"]}, path)
    loader = vllm.model_executor.model_loader.get_model_loader(vllm.config.LoadConfig(load_format="mpgpu", device="cpu"))
    loader.local_expert_ids = {1, 3}
    described = types.SimpleNamespace(model=str(tmp_path), revision=None)
    assert {name for name, _ in loader.get_all_weights(described, Model())} == {names[1], names[3], "layers.0.gate.weight"}


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_other_files_are_refused_with_the_remedy(vllm, tmp_path, name):
    torch.save({"a": torch.arange(3)}, tmp_path / name)
    with pytest.raises(
        mpgpu.ArgumentError, match=rf"^{tmp_path / name}: --load-format mpgpu loads only \*\.safetensors files: pass --load-format auto$"
    ):
        load(vllm, tmp_path)


def test_options_of_other_formats_are_refused(vllm, tmp_path):
    mpgpu.torch.save({"a": torch.arange(3)}, tmp_path / "model.safetensors")
    with pytest.raises(mpgpu.ArgumentError, match="safetensors_load_strategy='eager': --load-format mpgpu has no strategies: pass --load-"):
        load(vllm, tmp_path, safetensors_load_strategy="eager")
    with pytest.raises(mpgpu.ArgumentError, match="enable_multithread_load=True: --load-format mpgpu does not use this option: remove it"):
        load(vllm, tmp_path, model_loader_extra_config={"enable_multithread_load": True})


def test_a_version_of_vllm_without_a_required_method_is_refused(vllm, monkeypatch):
    monkeypatch.delattr(vllm.model_executor.model_loader.DefaultModelLoader, "_prepare_weights")
    with pytest.raises(mpgpu.NotSupported, match=r"^vLLM .*: DefaultModelLoader has no _prepare_weights, which --load-format mpgpu needs"):
        vllm.model_executor.model_loader.get_model_loader(vllm.config.LoadConfig(load_format="mpgpu"))


@pytest.mark.parametrize(("workers", "given", "expected"), [(1, None, None), (2, None, "none"), (2, "0", "0")])
def test_several_workers_use_no_relays_unless_the_user_has_chosen_them(vllm, tmp_path, monkeypatch, workers, given, expected):
    import mpgpu.vllm

    monkeypatch.delenv("MPGPU_RELAY_GPUS", raising=False)
    if given is not None:
        monkeypatch.setenv("MPGPU_RELAY_GPUS", given)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: workers)
    seen = []
    monkeypatch.setattr(mpgpu.vllm, "Context", lambda: seen.append(os.environ.get("MPGPU_RELAY_GPUS")) or mpgpu.Context())
    mpgpu.torch.save({"a": torch.arange(3)}, tmp_path / "model.safetensors")
    described = types.SimpleNamespace(model=str(tmp_path), revision=None)
    loader = vllm.model_executor.model_loader.get_model_loader(vllm.config.LoadConfig(load_format="mpgpu", device="cpu"))
    assert [tensor.tolist() for _, tensor in loader.get_all_weights(described, Model())] == [[0, 1, 2]]
    assert seen == [expected] and os.environ.get("MPGPU_RELAY_GPUS") == given
