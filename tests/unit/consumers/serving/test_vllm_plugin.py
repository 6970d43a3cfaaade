"""The plug-in in vLLM's processes: what it imports, and which elements of a version it writes in place."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rollstream.consumers.serving.engines import EXTENSION
from rollstream.consumers.serving.vllm_plugin import transfer_engine
from rollstream.consumers.serving.vllm_plugin.registration import register
from rollstream.consumers.serving.vllm_plugin.requested_versions import HeldVersion
from rollstream.consumers.serving.vllm_plugin.transfer_engine import LogTransferEngine, UpdateFailed, changed_elements
from rollstream.consumers.serving.vllm_plugin.worker_extension import WorkerExtension
from tests.support.log_lines import log_lines

TABLE = np.arange(12, dtype=np.float32).reshape(3, 4).astype(ml_dtypes.bfloat16)


def changed(array: np.ndarray, *places: int, to: float = 100.0) -> np.ndarray:
    copy = array.copy()
    copy.reshape(-1)[list(places)] = to
    return copy


def test_every_process_of_vllm_loads_the_entry_point_without_what_only_workers_need() -> None:
    look = (
        "import sys; from importlib.metadata import entry_points;"
        "[entry] = [e for e in entry_points(group='vllm.general_plugins') if e.name == 'rollstream'];"
        "entry.load()();"  # Without vLLM, the plug-in changes nothing.
        "heavy = {'numpy', 'confluent_kafka', 'fastavro', 'jax', 'torch', 'pyarrow'} & sys.modules.keys();"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", look], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_workers_fetch_without_jax() -> None:
    look = (
        "import sys; import rollstream.consumers.serving.vllm_plugin.transfer_engine, "
        "rollstream.consumers.serving.vllm_plugin.worker_extension;"
        "heavy = {'jax', 'kafka', 'rich', 'argcomplete', 'torch', 'vllm'} & sys.modules.keys();"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", look], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_extension_goes_by_its_documented_name() -> None:
    assert f"{WorkerExtension.__module__}.{WorkerExtension.__name__}" == EXTENSION


def test_places_are_those_of_elements_that_differ_in_bits_and_tensors_that_do_not_are_left_out() -> None:
    before = {"table": TABLE, "still": TABLE, "zero": np.zeros(2, np.float32), "same": TABLE}
    after = {
        "table": changed(TABLE, 1, 11),
        "still": TABLE.copy(),
        "zero": np.array([0.0, -0.0], np.float32),
        "same": TABLE,
    }
    changes = changed_elements(before, after)
    assert changes is not None
    assert {name: places.tolist() for name, places in changes.items()} == {"table": [1, 11], "zero": [1]}


@pytest.mark.parametrize(
    "after",
    [
        {"table": changed(TABLE, 3, to=np.nan)},
        {"table": TABLE.astype(np.float32)},
        {"table": TABLE.reshape(4, 3)},
        {"table": TABLE, "more": TABLE},
        {},
    ],
    ids=["a NaN", "another dtype", "another shape", "more names", "fewer names"],
)
def test_what_vllm_cannot_take_as_patches_is_loaded_whole(after: dict[str, np.ndarray]) -> None:
    assert changed_elements({"table": TABLE}, after) is None


def test_integers_that_changed_are_loaded_whole_and_others_may_stay() -> None:
    count = np.array([1, 2], np.int64)
    assert changed_elements({"count": count}, {"count": count.copy()}) == {}
    assert changed_elements({"count": count}, {"count": count + 1}) is None


class Layer:
    """A layer of a torch model, whose class or quantization method processes its weights after loading."""

    def __init__(self, *layers: "Layer", quant_method: object = None) -> None:
        self.layers, self.quant_method = layers, quant_method

    def modules(self) -> Iterator["Layer"]:
        yield self
        for layer in self.layers:
            yield from layer.modules()

    def named_parameters(self) -> tuple[()]:
        return ()

    def load_weights(self, tensors: Iterator[tuple[str, Any]]) -> None:
        assert list(tensors)


def processing(name: str, *bases: type) -> Any:
    return type(name, bases, {"process_weights_after_loading": lambda *_: None})()


def engine_of(monkeypatch: pytest.MonkeyPatch, layer: Layer) -> LogTransferEngine:
    """An engine that has loaded version 0 of a model; version 1 changes one element."""
    table = TABLE.astype(np.float32)
    versions = {0: {"table": table}, 1: {"table": changed(table, 3)}}
    log = SimpleNamespace(take=lambda version: HeldVersion(version, versions[version]))
    monkeypatch.setattr(transfer_engine, "RequestedVersions", lambda *_, **__: log)
    install_vllm(monkeypatch)
    vllm_config = SimpleNamespace(model_config=SimpleNamespace(quantization=None))
    model = Layer(Layer(quant_method=processing("UnquantizedLinearMethod")), layer)
    engine = LogTransferEngine(None, vllm_config, SimpleNamespace(type="cuda"), model)
    engine.init_transfer_engine(engine.parse_init_info({"run": "main"}))
    engine.update_weights({"version": 0})
    assert engine.updates == {"whole": 1}
    return engine


def install_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let functions of torch and vLLM do nothing; tests of the engines call the real ones."""
    tensor = SimpleNamespace(dtype="float32")
    tensor.to = lambda _: tensor
    modules: dict[str, dict[str, Any]] = {
        "torch": {
            "no_grad": nullcontext,
            "from_numpy": lambda _: tensor,
            "accelerator": SimpleNamespace(is_available=lambda: False),
        },
        "vllm": {},
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.checkpoint_weight_patch": {
            "CheckpointWeightPatch": lambda *values: values,
            "load_checkpoint_weight_patches": lambda *_, **__: None,
        },
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": lambda _: None,
            "finalize_layerwise_reload": lambda *_: None,
        },
    }
    for name, functions in modules.items():
        module = ModuleType(name)
        module.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("layer", "how"),
    [
        (processing("Attention", Layer), "in place"),
        (Layer(quant_method=processing("UnquantizedEmbeddingMethod")), "in place"),
        (Layer(quant_method=processing("UnquantizedFusedMoEMethod")), "whole"),
        (processing("MLAAttention", Layer), "whole"),
    ],
    ids=["attention", "an embedding", "fused experts", "latent attention"],
)
def test_only_a_model_without_layers_that_repack_is_changed_in_place(
    monkeypatch: pytest.MonkeyPatch, layer: Layer, how: str
) -> None:
    engine = engine_of(monkeypatch, layer)
    engine.update_weights({"version": 1, "onto": 0})
    assert engine.updates[how] == (1 if how == "in place" else 2)


def test_a_loader_that_rejects_patches_gets_versions_whole_and_a_mistake_of_ours_fails_the_update(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def mistaken(*_: object, **__: object) -> None:
        raise NameError("name 'patches' is not defined")

    loader = "vllm.model_executor.model_loader.checkpoint_weight_patch"
    engine = engine_of(monkeypatch, Layer())
    monkeypatch.setattr(sys.modules[loader], "load_checkpoint_weight_patches", mistaken)
    engine.update_weights({"version": 1, "onto": 0})
    assert engine.updates == {"whole": 2}

    engine = engine_of(monkeypatch, Layer())
    monkeypatch.setattr(transfer_engine, "tensor_of", mistaken)
    caplog.clear()
    with pytest.raises(UpdateFailed, match="patches"):
        engine.update_weights({"version": 1, "onto": 0})
    assert ", in mistaken" in log_lines(caplog)


def test_every_process_of_vllm_asks_for_the_tiles_that_its_attention_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    request: list[bool] = []
    torch = SimpleNamespace(cpu=SimpleNamespace(_init_amx=lambda: request.append(True)))
    monkeypatch.setitem(sys.modules, "torch", torch)
    register()
    assert request == [True]
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    register()
