"""`rollstream deploy fit`: the real step, compiled for TPUs that this machine does not have."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from jax.experimental import topologies

from rollstream.consumers.learner.config import LearnerConfig, MeshConfig
from rollstream.consumers.learner.parallel.mesh import build_mesh
from rollstream.consumers.learner.training.tpu_compilation import CompilationFit, CompiledFunction, compile_for
from rollstream.consumers.models.config import DecoderConfig
from rollstream.pipeline.tools.fit import CompilerLost, compiled_apart, text_of
from rollstream.topics.errors import ConfigurationError

QWEN_05B = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 4864,
    "rope_theta": 1000000.0,
    "qk_norm": "false",
    "qkv_bias": "true",
    # The model has 24 layers; each layer is compiled by itself, which takes about ten seconds.
    "num_hidden_layers": 2,
}
LEARNER = {
    "sequence_length": 2048,
    "length_buckets": "[1024]",
    "compute_dtype": "bfloat16",
    "remat": "true",
    "vocabulary_chunk": 16384,
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("topology", "devices", "processes", "mesh", "moments"),
    [
        ("v5e:2x4", 8, 2, {"data": 1, "fsdp": 8, "sequence": 1, "tensor": 1}, "float32"),
        ("v5e:4x4", 16, 4, {"data": 2, "fsdp": 4, "sequence": 1, "tensor": 2}, "bfloat16"),
    ],
)
def test_a_half_billion_class_step_compiles_for_a_slice_and_for_several_hosts(
    topology: str, devices: int, processes: int, mesh: dict[str, int], moments: str
) -> None:
    settings = {f"learner.model.{name}": value for name, value in QWEN_05B.items()}
    settings |= {f"learner.{name}": value for name, value in LEARNER.items()}
    settings |= {f"learner.mesh.{axis}": size for axis, size in mesh.items()}
    settings |= {"learner.microbatch_rows": devices, "learner.optimizer.state_dtype": moments}
    flags = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "rollstream", "deploy", "fit", topology, "--json", *flags],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "TPU_"))},
    )
    assert done.returncode == 0, done.stderr
    fit = json.loads(done.stdout)
    print(json.dumps(fit, indent=1))
    assert (fit["device"], fit["devices"], fit["processes"], fit["mesh"]) == ("TPU v5 lite", devices, processes, mesh)
    names = [function["name"] for function in fit["functions"]]
    assert [f"gradient {devices}x2048", f"gradient {2 * devices}x1024"] == [
        n for n in names if n.startswith("gradient")
    ]
    # Parameters in float32 and both moments; each device holds its share, and all norms and biases.
    share = (12 if moments == "float32" else 8) * fit["parameters"] / (mesh["fsdp"] * mesh["tensor"])
    assert share <= fit["state_bytes"] < 1.01 * share
    # A checkpoint is written from a copy of all that, while the next gradient is computed.
    assert fit["checkpoint_bytes"] == fit["state_bytes"]
    gradient = max(function["peak_bytes"] for function in fit["functions"])
    assert fit["state_bytes"] + gradient < fit["peak_bytes"] < fit["hbm_bytes"] == 16 << 30
    # The embedding and the two next largest tensors, whole, as they are published.
    assert fit["snapshot_bytes"] == 2 * (151936 * 896 + 2 * 4864 * 896)
    assert fit["fits"]


@pytest.mark.long
def test_devices_that_share_the_tokens_of_rows_hold_less_of_each() -> None:
    """Each mesh computes as few rows at a time as it can: one for each device, or for four."""
    numbers = {name: int(value) for name, value in QWEN_05B.items() if isinstance(value, int)}
    model = DecoderConfig(**numbers, qk_norm=False, qkv_bias=True)  # type: ignore[arg-type]
    learner = LearnerConfig(model=model, sequence_length=8192, compute_dtype="bfloat16", remat=True, attention="blocks")
    temporaries = {}
    for sequence in (1, 4):
        # With copies of the parameters (data) in place of shares, libtpu aborts, whether sequence is 1 or 4.
        mesh = MeshConfig(fsdp=8 // sequence, sequence=sequence)
        fit = compile_for(replace(learner, mesh=mesh, microbatch_rows=8 // sequence), "v5e:2x4", quick=True)
        assert fit.mesh == {"data": 1, "fsdp": 8 // sequence, "sequence": sequence, "tensor": 1}
        temporaries[sequence] = max(function.temporaries_bytes for function in fit.functions)
    assert temporaries[4] < temporaries[1] / 2


@pytest.mark.long
def test_matrix_products_are_split_within_a_host_and_rows_belong_to_one() -> None:
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4").devices
    mesh = build_mesh(MeshConfig(fsdp=2, tensor=4), devices)
    owners = [{device.process_index for device in row} for row in mesh.devices.reshape(4, 4)]
    assert owners == [{0}, {1}, {2}, {3}]
    with pytest.raises(ConfigurationError, match=r"learner.mesh.sequence 1 x tensor 8 spans processes"):
        build_mesh(MeshConfig(tensor=8), devices)


@pytest.mark.long
def test_a_topology_that_libtpu_does_not_know_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="libtpu does not know the topology 'v5e:3x5'"):
        compile_for(LearnerConfig(), "v5e:3x5")


@pytest.mark.long
def test_a_program_at_which_libtpu_aborts_its_process_is_one_line_with_a_remedy() -> None:
    copies = replace(LearnerConfig(), mesh=MeshConfig(data=8))
    with pytest.raises(CompilerLost, match=r"v5e:2x4, and aborted: Check failed: .*; compile without --quick$"):
        compiled_apart(copies, "v5e:2x4", quick=True)


def test_without_libtpu_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'rollstream\[tpu\]'"):
        compile_for(LearnerConfig(), "v5e:2x4")


def test_a_learner_that_does_not_fit_is_reported() -> None:
    gib = 2**30
    function = CompiledFunction(
        name="gradient 8x64", seconds=1.5, arguments_bytes=gib, temporaries_bytes=15 * gib, peak_bytes=16 * gib
    )
    fit = CompilationFit(
        device="TPU v5 lite",
        devices=8,
        processes=2,
        mesh={"data": 8, "fsdp": 1, "sequence": 1, "tensor": 1},
        parameters=10**9,
        state_bytes=12 * gib,
        checkpoint_bytes=12 * gib,
        snapshot_bytes=gib,
        peak_bytes=24 * gib,
        hbm_bytes=16 * gib,
        functions=(function,),
    )
    assert fit.fits is False
    text = text_of(fit)
    assert "8 x TPU v5 lite on 2 hosts, data 8 x fsdp 1 x sequence 1 x tensor 1; 1,000.0 million parameters" in text
    assert "copies 12.00 GiB for a checkpoint and 1.00 GiB to publish" in text
    assert "needs at most 24.00 GiB of 16.00 GiB: it does not fit" in text
