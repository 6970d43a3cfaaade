"""LogTransferEngine: a weight transfer engine for vLLM that loads policy versions fetched from the log by this process.

vLLM creates one for each worker, and calls the methods that its class WeightTransferEngine declares. If vLLM keeps
parameters as they are in a checkpoint, only the elements that changed are written, in place; otherwise every tensor is
loaded. A failed update may leave the model torn, with weights of two versions; then the next update loads every tensor.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.serving.vllm_plugin.requested_versions import (
    NONE,
    FetchStatus,
    HeldVersion,
    RequestedVersions,
)
from rollstream.consumers.weights.content import Arrays
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RollstreamError
from rollstream.topics.logs import event
from rollstream.topics.records.arrays import little_endian_view

logger = logging.getLogger(__name__)
T = TypeVar("T")
_UNCHANGED_BY = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "Attention"}
"""Names of vLLM's classes whose `process_weights_after_loading` leaves parameters as they are on CUDA."""


class UpdateFailed(RollstreamError):
    """A policy version could not be loaded into the model, whose weights may be torn."""


@dataclass(frozen=True, kw_only=True)
class InitInfo:
    """The body of /init_weight_transfer_engine."""

    run: str
    kafka: Mapping[str, Any] = field(default_factory=dict)
    """Fields of KafkaConfig; secrets are references, which this process resolves."""
    fetch_timeout_s: float = 60.0
    files_at_once: int = 8
    in_place: bool | None = None
    """Whether only the elements that changed are written; None: if vLLM keeps parameters as in a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class UpdateInfo:
    """The body of /update_weights."""

    version: int
    onto: int = NONE
    """Version that the engine's label names. If another version was last loaded here, every tensor is loaded."""


class LogTransferEngine:
    """Loads the policy versions of a run into the model of one worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    defers_processing = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        """Accept the arguments of vLLM's engine factory: its configurations, and this worker's device and model."""
        self.config, self.vllm_config, self.device = config, vllm_config, device
        self.model, self.model_config = model, vllm_config.model_config
        self.updates: Counter[str] = Counter()
        """Numbers of versions that were loaded "in place" and "whole"."""
        self._default = self.model, self.model_config
        self._in_place = False
        self._info: InitInfo | None = None
        self._versions: RequestedVersions | None = None
        self._loaded: HeldVersion | None = None
        """Version loaded last; the model has this version, unless the model is torn."""
        self._previous: HeldVersion | None = None
        """Version loaded before the last, until another is fetched: all workers return to it if one of them fails."""
        self._torn = False
        self._unusable = ""
        """Why no further version can be loaded into the model; empty if versions can be loaded."""

    def parse_init_info(self, values: Mapping[str, Any]) -> InitInfo:
        """Parse the body of /init_weight_transfer_engine. Raises ValueError for missing or unknown fields."""
        return _parsed(InitInfo, values)

    def parse_update_info(self, values: Mapping[str, Any]) -> UpdateInfo:
        """Parse the body of /update_weights. Raises ValueError for missing or unknown fields."""
        return _parsed(UpdateInfo, values)

    def init_transfer_engine(self, info: InitInfo) -> None:
        """Begin to read a run. A repeated call with the same settings changes nothing."""
        if info == self._info:
            return
        self.shutdown()
        self._versions = RequestedVersions(
            _parsed(KafkaConfig, info.kafka),
            info.run,
            fetch_timeout_s=info.fetch_timeout_s,
            files_at_once=info.files_at_once,
        )
        self._info, self._loaded, self._previous = info, None, None
        # On other devices, and with quantization, vLLM computes with copies that it packs after loading, so changes in
        # place would not reach them.
        plain = self.device.type == "cuda" and self.model_config.quantization is None
        self._in_place = plain and keeps_parameters(self.model) if info.in_place is None else info.in_place

    def fetch(self, version: int) -> None:
        """Begin to fetch a version, while the engine continues to sample."""
        if version not in self._known():
            self._previous = None
            self._source().request(version)

    def status(self) -> FetchStatus:
        """Return the progress of the latest fetch."""
        return self._source().status()

    def holds(self, version: int) -> bool:
        """Whether a version can be loaded without fetching."""
        return version in self._known() or version == self.status().held

    def start_weight_update(self) -> None:
        """Do nothing: `update_weights` is a complete update."""

    def update_weights(self, values: Mapping[str, Any]) -> None:
        """Load a version that was fetched. Raises VersionNotHeld, which changes nothing, or UpdateFailed."""
        update = self.parse_update_info(values)
        version = update.version
        if self._unusable:
            raise UpdateFailed(f"{self._unusable}; start this engine again")
        same = self._loaded is not None and self._loaded.version == version
        held = self._known().get(version) or self._source().take(version)
        known = self._loaded is not None and self._loaded.version == update.onto
        base = self._loaded if known and not same and not self._torn else None
        began = time.monotonic()
        self._torn = True
        try:
            how = self._load(held.arrays, base)
        except Exception as error:
            event(logger, "version_not_loaded", level=logging.ERROR, exc_info=error, version=version, error=str(error))
            raise UpdateFailed(
                f"policy version {version} could not be loaded ({error}); the weights may be torn"
            ) from error
        if not same:
            self._previous = self._loaded
        self._loaded, self._torn = held, False
        self.updates[how] += 1
        event(logger, "version_loaded", version=version, how=how, seconds=round(time.monotonic() - began, 3))

    def finish_weight_update(self) -> None:
        """Do nothing: `update_weights` is a complete update."""

    def drain_pending(self) -> None:
        """Do nothing: no update is deferred."""

    def set_weight_update_target(self, model: Any, model_config: Any) -> None:
        """Load into another model from now on."""
        self.model, self.model_config = model, model_config

    def reset_weight_update_target(self) -> None:
        """Load into this worker's own model again."""
        self.model, self.model_config = self._default

    def shutdown(self) -> None:
        """Stop reading the run."""
        if self._versions is not None:
            self._versions.close()
            self._versions = self._info = None

    def _known(self) -> dict[int, HeldVersion]:
        """Return the versions that can be loaded again, by number."""
        return {held.version: held for held in (self._previous, self._loaded) if held is not None}

    def _source(self) -> RequestedVersions:
        if self._versions is None:
            raise UpdateFailed("no run has been given; call /init_weight_transfer_engine first")
        return self._versions

    def _load(self, arrays: Arrays, base: HeldVersion | None) -> str:
        """Load only the changes since `base` if possible, else every tensor; return "in place" or "whole"."""
        if base is not None and self._in_place:
            changes = changed_elements(base.arrays, arrays)
            if changes is not None:
                if self._patch(changes, arrays):
                    return "in place"
                self._in_place = False
        self._load_whole(arrays)
        return "whole"

    def _patch(self, changes: Mapping[str, NDArray[np.int64]], arrays: Arrays) -> bool:
        """Load changed elements; return False if vLLM or the model's loader rejects them, as it would later ones."""
        import torch

        try:
            from vllm.model_executor.model_loader.checkpoint_weight_patch import (
                CheckpointWeightPatch,
                load_checkpoint_weight_patches,
            )
        except ImportError as error:
            return _not_patched(error)
        patches = []
        for name, places in changes.items():
            values = tensor_of(arrays[name].reshape(-1)[places]).to(self.device)
            indices = torch.from_numpy(places).to(self.device)
            patches.append(CheckpointWeightPatch(name, arrays[name].shape, values.dtype, values, indices))
        try:
            load_checkpoint_weight_patches(self.model, patches, validate_unique_indices=False)
            _finish_on_device()
        except Exception as error:  # Each model's loader raises different errors.
            return _not_patched(error)
        return True

    def _load_whole(self, arrays: Arrays) -> None:
        import torch
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        parameters = {name for name, _ in self.model.named_parameters()}
        with torch.no_grad():
            initialize_layerwise_reload(self.model)
            try:
                loaded = self.model.load_weights(_tensors(arrays))
            finally:
                try:
                    # Also after an error: buffered tensors of this version must not mix with the next version.
                    finalize_layerwise_reload(self.model, self.model_config)
                except Exception as error:
                    self._unusable = f"a failed update left the model without its layers ({error})"
                    raise
        missing = sorted(parameters - loaded) if loaded is not None and self.model_config.quantization is None else []
        if missing:
            raise UpdateFailed(f"the version lacks {len(missing)} parameters, such as {', '.join(missing[:3])}")
        _finish_on_device()


def _not_patched(error: Exception) -> bool:
    event(logger, "no_updates_in_place", level=logging.WARNING, exc_info=error, error=str(error))
    return False


def _finish_on_device() -> None:
    """Wait until the device has received the new weights, because the next step uses them."""
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def keeps_parameters(model: Any) -> bool:
    """Whether a torch model computes, on CUDA, with its parameters as they are in a checkpoint.

    Some layers that are not quantized do not: fused experts may permute their rows in place, with the same shape, and
    the layers of latent attention compute with copies. A patch would then change other values, without an error.
    """
    parts = (part for module in model.modules() for part in (module, getattr(module, "quant_method", None)))
    return {type(part).__name__ for part in parts if hasattr(part, "process_weights_after_loading")} <= _UNCHANGED_BY


def changed_elements(before: Arrays, after: Arrays) -> dict[str, NDArray[np.int64]] | None:
    """Indices, in C order, of the elements of each array whose bits differ; None if vLLM cannot apply them as patches.

    vLLM patches only floating-point tensors of the same names, shapes and dtypes, and accepts no NaN as a new value.
    """
    if before.keys() != after.keys():
        return None
    changes = {}
    for name, new in after.items():
        old = before[name]
        if old is new:
            continue
        if (old.dtype, old.shape) != (new.dtype, new.shape) or new.dtype.itemsize not in (2, 4, 8):
            return None
        bits = f"<u{new.dtype.itemsize}"
        unlike = np.frombuffer(little_endian_view(old), bits) != np.frombuffer(little_endian_view(new), bits)
        places = np.flatnonzero(unlike)
        if not len(places):
            continue
        if new.dtype.kind not in "fV" or np.isnan(new.reshape(-1)[places].astype(np.float64)).any():
            return None
        changes[name] = places
    return changes


def tensor_of(array: NDArray[Any]) -> Any:
    """Return a copy of an array as a torch tensor."""
    import torch

    copy = np.array(array, order="C")
    if copy.dtype.kind != "V":
        return torch.from_numpy(copy)
    # Extension types, such as bfloat16, have the same name in torch; their bits are passed as integers.
    bits = torch.from_numpy(copy.view({1: np.uint8, 2: np.int16}[copy.dtype.itemsize]))
    return bits.view(getattr(torch, copy.dtype.name))


def _tensors(arrays: Arrays) -> Iterator[tuple[str, Any]]:
    for name, array in arrays.items():
        yield name, tensor_of(array)


def _parsed(cls: type[T], values: Mapping[str, Any]) -> T:
    try:
        return cls(**values)
    except TypeError as error:
        raise ValueError(f"{cls.__name__} does not have the fields {sorted(values)}: {error}") from error
