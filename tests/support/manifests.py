"""Manifests of policy versions without tensors."""

from rollstream.topics.records import Chunk, PolicyManifest


def one_chunk_manifest(version: int, chunk: Chunk, *, base: int = -1, learner: str = "default") -> PolicyManifest:
    """A version in one chunk: a delta of `base`, or full without one."""
    return PolicyManifest(
        version=version,
        learner=learner,
        step=version,
        epoch="e",
        tensors=(),
        chunks=(chunk,),
        digest="",
        kind="full" if base < 0 else "delta",
        base=base,
    )
