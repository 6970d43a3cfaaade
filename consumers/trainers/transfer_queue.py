"""A storage backend of TransferQueue (0.1) that keeps its data on the log of a run.

Importing this module makes the backend known, in each process of the Ray job that uses the queue. Actors write tensors
and plain values in transactions, before the queue's controller hears of them; clients read them by their places.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import NonTensorData
from transfer_queue.storage.bootstrap import StorageBootstrapProvider
from transfer_queue.storage.clients.base import StorageClientFactory, StorageKVClient
from transfer_queue.storage.managers.base import KVStorageManager, StorageManagerFactory

from rollstream.consumers.ordinal_claim import OrdinalClaim
from rollstream.consumers.trainers.sample_log import (
    POSITIONS,
    LiveField,
    Sample,
    SamplePlace,
    SampleReader,
    SampleRecord,
    SampleWriter,
    checkpoint_ends,
    cleared_marks,
    digest_of,
    live_samples,
    record_of,
    topic_identity,
)
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError, RecordError, StateRefused
from rollstream.topics.files.atomic_files import write_json
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.transactions import fence, transactional_id
from rollstream.topics.records import SampleField
from rollstream.topics.wire.catalogue import topic_name

BACKEND = "Rollstream"
_CLIENT = "RollstreamClient"
_NAMESPACE = "transfer_queue"
_MOST_WRITERS = 8
_TENSOR, _ARRAY = 1, 2
_Header = tuple[str, tuple[int, ...]]


def _settings(config: Mapping[str, Any]) -> tuple[KafkaConfig, str, int]:
    """Return the brokers, the run and the number of writers. Raises ConfigurationError."""
    plain = dict(OmegaConf.to_container(config) if OmegaConf.is_config(config) else config)
    try:
        kafka, run, writers = KafkaConfig(**plain.get("kafka", {})), str(plain["run"]), int(plain.get("writers", 1))
    except (KeyError, TypeError) as error:
        raise ConfigurationError(f"backend.{BACKEND} needs run, and may have kafka and writers: {error!r}") from error
    if not 1 <= writers <= _MOST_WRITERS:
        raise ConfigurationError(f"backend.{BACKEND}.writers is {writers}; it must be 1 to {_MOST_WRITERS}")
    return kafka, run, writers


def _start_writers(config: Any) -> dict[str, Any]:
    """Start the actors that write. The driver that creates the queue runs this once, and fences its predecessor."""
    kafka, run, writers = _settings(config.backend[BACKEND])
    topic_admin.partitions_of(kafka, topic_name(run, "samples"))
    claim = OrdinalClaim(kafka, run, f"{run}.samples", "writers")
    claim.take()
    for number in range(writers, _MOST_WRITERS):
        fence(kafka, transactional_id(run, "samples", number))
    # A writer that died begins again, and its calls are repeated: a put that is written twice replaces itself.
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=64)(SampleWriter)
    actors = {}
    for number in range(writers):
        options = {"name": _writer_name(number), "namespace": _NAMESPACE, "get_if_exists": True}
        actors[_writer_name(number)] = actor.options(**options).remote(kafka, run, number, claim)
    # The first write waits for all writers, so that a refusal is seen here.
    ray.get([handle.write.remote([]) for handle in actors.values()])
    return actors


def _writer_name(number: int) -> str:
    return f"RollstreamSampleWriter#{number}"


class LogClient(StorageKVClient):  # type: ignore[misc]
    """Puts, gets and clears values by TransferQueue's keys, `index@field`; a put returns places on the log."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Connect to the writers that the driver started."""
        super().__init__(dict(config))
        self.kafka, self.run, writers = _settings(config)
        self._writers = [ray.get_actor(_writer_name(number), namespace=_NAMESPACE) for number in range(writers)]
        self._reader = SampleReader(self.kafka, self.run)
        self._puts = 0
        self.samples: dict[int, tuple[Sample, dict[str, Any]]] = {}
        """Names and tags of samples by global index; a key does not tell them."""

    def put(self, keys: list[str], values: list[Any]) -> list[tuple[int, int, str]]:
        """Write values in one transaction, and return their places.

        Raises RecordError for a value that is neither a tensor, an array nor plain, and the errors of SampleWriter.
        """
        fields = [self._field(key, value) for key, value in zip(keys, values, strict=True)]
        records = [record_of(field, self._reader.partitions) for field in fields]
        offsets = self._write(records)
        digests = (digest_of(field.data) for field in fields)
        # Plain tuples, because the controller may run without this package.
        return [(r.partition, offset, d) for r, offset, d in zip(records, offsets, digests, strict=True)]

    def get(
        self, keys: list[str], shapes: Any = None, dtypes: Any = None, custom_backend_meta: Any = None
    ) -> list[Any]:
        """Return the values at the places in `custom_backend_meta`. Raises the errors of SampleReader."""
        places = [SamplePlace(*place) if place else None for place in custom_backend_meta or [None] * len(keys)]
        missing = [key for key, place in zip(keys, places, strict=True) if place is None]
        if missing:
            raise StateRefused(
                f"the queue's controller has no place on the log for samples {', '.join(missing[:5])}: they were not "
                "put, or it refused them, as for another dtype than the field had before, which only its log says"
            )
        return [_value(field) for field in self._reader.fetch(place for place in places if place)]

    def clear(self, keys: list[str], custom_backend_meta: Any = None) -> None:
        """Mark samples as cleared. Raises the errors of SampleWriter."""
        self.clear_samples(self._named(int(key.partition("@")[0]))[0] for key in keys)

    def clear_samples(self, samples: Iterable[Sample]) -> None:
        """Mark samples as cleared, given by their names."""
        marks = cleared_marks(dict.fromkeys(samples), self._reader.partitions)
        if marks:
            self._write(marks)

    def _write(self, records: Sequence[SampleRecord]) -> list[int]:
        self._puts += 1
        # As arrays, because Ray passes their memory on without a copy.
        packed = [r._replace(value=np.frombuffer(r.value, np.uint8)) for r in records]
        offsets: list[int] = ray.get(self._writers[self._puts % len(self._writers)].write.remote(packed))
        return offsets

    def _named(self, index: int) -> tuple[Sample, dict[str, Any]]:
        return self.samples.get(index, (("", f"#{index}"), {}))

    def _field(self, key: str, value: Any) -> SampleField:
        index, _, name = key.partition("@")
        (partition_id, sample), tags = self._named(int(index))
        try:
            dtype, shape, data = _content(value)
            labels = json.dumps(tags)
        except (TypeError, ValueError, OverflowError) as error:
            raise RecordError(
                f"field {name} of sample {sample} in partition {partition_id!r} cannot be written: {error}; give "
                "tensors, arrays, texts, numbers, and lists and dicts of them, and tags that JSON can hold"
            ) from error
        return SampleField(
            partition_id=partition_id, sample=sample, field=name, dtype=dtype, shape=shape, data=data, tags=labels
        )


class LogStorageManager(KVStorageManager):  # type: ignore[misc]
    """The storage manager of a client of the queue."""

    def __init__(self, controller_info: Any, config: Mapping[str, Any], zmq_context: Any = None) -> None:
        """Connect to the controller, the writers and the brokers."""
        super().__init__(controller_info, {**config, "client_name": _CLIENT}, zmq_context)
        self._controller = ray.get_actor("TransferQueueController", namespace=_NAMESPACE)

    async def put_data(self, data: Any, metadata: Any, data_parser: Callable[[Any], Any] | None = None) -> None:
        """Write the fields in one transaction, and then tell the controller. Raises as LogClient.put does."""
        await self._name(metadata)
        await super().put_data(data, metadata, data_parser)

    async def clear_data(self, metadata: Any) -> None:
        """Mark the samples as cleared, whatever fields they have."""
        await self._name(metadata)
        names = [self.storage_client.samples.pop(index)[0] for index in metadata.global_indexes]
        await asyncio.get_running_loop().run_in_executor(None, self.storage_client.clear_samples, names)

    async def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Note where the log ends. The data is on the log already, and the places are in the controller's state."""
        client = self.storage_client
        topic = topic_name(client.run, "samples")
        ends = {str(p): end for p, (_begin, end) in topic_admin.bounds(client.kafka, topic).items()}
        identity = topic_identity(client.kafka, client.run)
        write_json(Path(checkpoint_dir, POSITIONS), {"ends": ends, **identity})

    async def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Check that the log is the one that the checkpoint was made with. Raises StateRefused."""
        checkpoint_ends(self.storage_client.kafka, self.storage_client.run, checkpoint_dir)

    async def _name(self, metadata: Any) -> None:
        """Ask the controller for the keys of samples, because the metadata has only their numbers."""
        groups: dict[str, list[int]] = {}
        for index, partition_id in zip(metadata.global_indexes, metadata.partition_ids, strict=True):
            groups.setdefault(partition_id, []).append(index)
        tags = dict(zip(metadata.global_indexes, metadata.custom_meta or [{}] * metadata.size, strict=True))
        for partition_id, indexes in groups.items():
            keys = await self._controller.kv_retrieve_keys.remote(indexes, partition_id)
            for index, key in zip(indexes, keys or [None] * len(indexes), strict=True):
                name = f"#{index}" if key is None else key
                self.storage_client.samples[index] = (partition_id, name), tags[index]


@dataclass(frozen=True)
class Restored:
    """What `restore` did with the samples that the queue's controller did not know."""

    samples: int
    """Samples that are in the queue again, to be consumed."""
    without_key: int
    """Samples without a key, which stay on the log, but have no name under which the queue could have them again."""
    cleared: int
    """Samples put after the checkpoint that were cleared instead."""


def restore(checkpoint: str | Path | None = None, *, keep_later: bool = True) -> Restored:
    """Give a new queue what the log has: call it once after `transfer_queue.init`, before anything is put.

    Without a checkpoint, that is everything put and not cleared; the log does not know what was consumed. With one made
    by `transfer_queue.save_checkpoint`, the queue is as it was then, also in what was consumed, and has in addition
    everything put since, to be consumed, also what was cleared since. With `keep_later` false, that is cleared.
    Raises StateRefused if the checkpoint was made with another topic.
    """
    queue = transfer_queue.get_client()
    client: LogClient = queue.storage_manager.storage_client
    ends = None if checkpoint is None else checkpoint_ends(client.kafka, client.run, checkpoint)
    if checkpoint is not None:
        transfer_queue.load_checkpoint(checkpoint)
    there = {(partition_id, key) for partition_id, keys in (queue.kv_list(None) or {}).items() for key in keys}
    groups: dict[tuple[str, frozenset[str]], dict[str, dict[str, LiveField]]] = {}
    unnamed, later = 0, []
    for sample, fields in live_samples(client.kafka, client.run, ends).items():
        if sample in there:
            fields = {name: f for name, f in fields.items() if f.place.offset >= (ends or {}).get(f.place.partition, 0)}
        if sample[1].startswith("#"):
            unnamed += 1
        elif fields and keep_later:
            groups.setdefault((sample[0], frozenset(fields)), {})[sample[1]] = fields
        elif fields and sample not in there:
            later.append(sample)
    client.clear_samples(later)
    for (partition_id, _names), samples in groups.items():
        _add(queue, partition_id, samples)
    return Restored(sum(map(len, groups.values())), unnamed, len(later))


def _add(queue: Any, partition_id: str, samples: Mapping[str, Mapping[str, LiveField]]) -> None:
    """Tell the controller of samples that all have the same fields."""
    meta = queue.kv_retrieve_meta(keys=list(samples), partition_id=partition_id, create=True)
    columns = {name: [fields[name] for fields in samples.values()] for name in next(iter(samples.values()))}
    places = {
        index: {name: tuple(field.place) for name, field in fields.items()}
        for index, fields in zip(meta.global_indexes, samples.values(), strict=True)
    }
    schema = {name: _schema([field.record for field in column]) for name, column in columns.items()}
    asyncio.run(queue.storage_manager.notify_data_update(partition_id, meta.global_indexes, schema, places))
    meta.update_custom_meta([_tags(fields) for fields in samples.values()])
    queue.set_custom_meta(meta)


def _tags(fields: Mapping[str, LiveField]) -> dict[str, Any]:
    """The tags of a sample: those of a later put replace those of an earlier one."""
    tags: dict[str, Any] = {}
    for field in sorted(fields.values(), key=lambda field: field.place.offset):
        tags |= json.loads(field.record.tags)
    return tags


def _schema(column: Sequence[SampleField]) -> dict[str, Any]:
    """Describe a field of several samples as TransferQueue does."""
    if any(not field.dtype for field in column):
        return {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}
    shapes = [field.shape or (1,) for field in column]
    dtype = getattr(torch, column[0].dtype)
    if len(set(shapes)) == 1:
        return {"dtype": dtype, "shape": torch.Size(shapes[0]), "is_nested": False, "is_non_tensor": False}
    return {"dtype": dtype, "shape": None, "is_nested": True, "is_non_tensor": False, "per_sample_shapes": shapes}


def _content(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Return dtype, shape and bytes of a tensor; for any other value an empty dtype, and MessagePack."""
    if isinstance(value, NonTensorData):
        value = value.data
    if isinstance(value, torch.Tensor) and not value.is_nested:
        return _tensor_parts(value)
    return "", (), msgspec.msgpack.encode(value, enc_hook=_extension)


def _tensor_parts(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data


def _value(field: SampleField) -> Any:
    """Return the value that was put; a tuple comes back as a list."""
    if field.dtype:
        return _tensor(field.dtype, field.shape, field.data)
    return msgspec.msgpack.decode(field.data, ext_hook=_from_extension)


def _tensor(dtype: str, shape: Sequence[int], data: bytes) -> torch.Tensor:
    kind = getattr(torch, dtype)
    # A bytearray, because a tensor over memory that it must not write to is refused.
    flat = torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0, dtype=kind)
    return flat.reshape(tuple(shape))


def _extension(value: Any) -> Any:
    """Encode what MessagePack lacks: tensors and arrays inside other values, and numpy's numbers."""
    if isinstance(value, torch.Tensor) and not value.is_nested:
        dtype, shape, data = _tensor_parts(value)
        return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode((dtype, shape, data)))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return value.tolist()
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode((value.dtype.str, value.shape, value.tobytes())))
    raise TypeError(f"its type is {type(value).__qualname__}")


def _from_extension(code: int, data: memoryview) -> Any:
    dtype, shape, content = msgspec.msgpack.decode(bytes(data), type=tuple[str, tuple[int, ...], bytes])
    if code == _TENSOR:
        return _tensor(dtype, shape, content)
    return np.frombuffer(bytearray(content), dtype).reshape(shape)


StorageClientFactory.register(_CLIENT)(LogClient)
StorageManagerFactory.register(BACKEND)(LogStorageManager)
StorageBootstrapProvider.register_provider(BACKEND)(_start_writers)
