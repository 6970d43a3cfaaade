"""The plug-in in vLLM's processes: what it imports, and which elements of a version it writes in place."""

import subprocess
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from rollstream.consumers.serving.vllm_plugin.registration import register
from rollstream.consumers.serving.vllm_plugin.transfer_engine import changed_elements
from rollstream.consumers.serving.vllm_plugin.worker_extension import WorkerExtension
from rollstream.consumers.serving.vllm_plugin_engine import EXTENSION

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


def test_every_process_of_vllm_asks_for_the_tiles_that_its_attention_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    request: list[bool] = []
    torch = SimpleNamespace(cpu=SimpleNamespace(_init_amx=lambda: request.append(True)))
    monkeypatch.setitem(sys.modules, "torch", torch)
    register()
    assert request == [True]
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    register()
