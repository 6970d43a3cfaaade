"""Gathers parameters where they are used, and scatters their gradients: fully sharded training (arXiv:1910.02054).

If the compiler decides how gradients are summed, each device receives the summed gradient of a whole matrix and keeps
its share. With this module, each device receives only the sum of its share. A layer is whole on a device only while it
is computed, in the forward and the backward pass.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.parallel.mesh import ROW_AXES, axis_sizes, row_shares
from rollstream.consumers.models.sharding import GATHERED, Params

_SHARES = "fsdp"
_sum: Callable[..., Any] = jax.lax.psum


class Gathering(NamedTuple):
    """How the parameters of one mesh are gathered; its functions are called within `by_rows`."""

    mesh: Mesh
    specs: Mapping[str, PartitionSpec]
    """Partition of each parameter."""
    compute_dtype: Any
    """Dtype of gathered parameters."""
    reduce_dtype: Any
    """Dtype in which gradients are summed over devices."""

    def shares(self, params: Params) -> dict[str, jax.Array]:
        """Shares of parameters, in the dtype in which their gradients are computed and summed."""
        return {name: value.astype(self.reduce_dtype) for name, value in params.items()}

    def whole(self, shares: Params) -> dict[str, jax.Array]:
        """Whole parameters in the compute dtype, whose gradients are summed over `fsdp` into shares."""
        return {name: self._whole(self.specs[name], share) for name, share in shares.items()}

    def _whole(self, spec: PartitionSpec, share: jax.Array) -> jax.Array:
        axis = _split_axis(spec)
        if axis is None:
            return share.astype(self.compute_dtype)
        tensor = _over(spec, "tensor") if axis_sizes(self.mesh)["tensor"] > 1 else None
        named: jax.Array = checkpoint_name(_gathered(share, axis, self.compute_dtype, tensor), GATHERED)  # type: ignore[no-untyped-call]
        return named

    def summed(self, gradients: Params) -> dict[str, jax.Array]:
        """Gradients of shares, summed over the row axes that `whole` does not sum over."""
        several = [axis for axis in ROW_AXES if axis_sizes(self.mesh)[axis] > 1]

        def total(name: str, gradient: jax.Array) -> jax.Array:
            left = [axis for axis in several if axis not in self.specs[name]]
            return _sum(gradient, tuple(left)) if left else gradient

        return {name: total(name, gradient) for name, gradient in gradients.items()}

    def by_rows(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Return `function` computed by each device on its rows and shares; the compiler splits the other axes."""
        sizes = axis_sizes(self.mesh)
        manual = {axis for axis in sizes if axis in ROW_AXES or sizes[axis] == 1}
        mapped: Callable[..., Any] = jax.shard_map(
            function, in_specs=in_specs, out_specs=out_specs, axis_names=manual, check_vma=False
        )
        return mapped

    @property
    def params(self) -> dict[str, PartitionSpec]:
        """Partition of each parameter over the axes that `by_rows` splits."""
        return {name: _over(spec, _SHARES) for name, spec in self.specs.items()}


def gathering_of(config: LearnerConfig, mesh: Mesh, shardings: Mapping[str, NamedSharding]) -> Gathering | None:
    """How parameters of these shardings are gathered; None if rows are not split."""
    if row_shares(mesh) == 1:
        return None
    # XLA's CPU compiler crashes on bfloat16 sums over only some of the axes of a mesh.
    sizes = axis_sizes(mesh)
    crashes = mesh.devices.flat[0].platform == "cpu" and sizes["sequence"] * sizes["tensor"] > 1
    reduce = "float32" if crashes or config.reduce_dtype == "float32" else config.compute_dtype
    specs = {name: sharding.spec for name, sharding in shardings.items()}
    return Gathering(mesh, specs, jnp.dtype(config.compute_dtype), jnp.dtype(reduce))


def over_devices(
    gradient: Callable[..., Any], gathering: Gathering | None, trained: Sequence[str]
) -> Callable[..., Any]:
    """Return `gradient` as a function of parameters, batch and denominators, summed over all devices.

    The function returns the gradients with respect to the `trained` parameters, and metrics.
    """
    if gathering is None:
        return lambda params, batch, denominators: gradient(params, batch=batch, denominators=denominators)
    rows, everywhere = PartitionSpec(ROW_AXES), PartitionSpec()  # type: ignore[no-untyped-call]

    def local(params: Params, batch: Any, denominators: Any) -> Any:
        shares = gathering.shares(params)
        sums, metrics = gradient(shares, batch=batch, denominators=denominators, whole=gathering.whole)
        return gathering.summed(sums), _sum(metrics, ROW_AXES)

    summed = {name: gathering.params[name] for name in trained}
    return gathering.by_rows(local, (gathering.params, rows, everywhere), (summed, everywhere))


def of_rows(function: Callable[..., jax.Array], gathering: Gathering | None) -> Callable[..., jax.Array]:
    """Return `function` as a function of parameters and batch that returns a value for each row."""
    if gathering is None:
        return lambda params, batch: function(params, batch=batch)
    rows = PartitionSpec(ROW_AXES)  # type: ignore[no-untyped-call]

    def local(params: Params, batch: Any) -> jax.Array:
        return function(params, batch=batch, whole=gathering.whole)

    return gathering.by_rows(local, (gathering.params, rows), rows)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gathered(share: jax.Array, axis: int, dtype: Any, tensor: PartitionSpec | None) -> jax.Array:
    gather = partial(jax.lax.all_gather, axis_name=_SHARES, axis=axis, tiled=True)
    return _over_tensor(gather, tensor)(share.astype(dtype))


def _forward(share: jax.Array, axis: int, dtype: Any, tensor: PartitionSpec | None) -> tuple[jax.Array, jax.Array]:
    # An empty array carries the dtype of the share.
    return _gathered(share, axis, dtype, tensor), jnp.zeros((0,), share.dtype)


def _backward(
    axis: int, _dtype: Any, tensor: PartitionSpec | None, like: jax.Array, gradient: jax.Array
) -> tuple[jax.Array]:
    scatter = partial(jax.lax.psum_scatter, axis_name=_SHARES, scatter_dimension=axis, tiled=True)
    return (_over_tensor(scatter, tensor)(gradient.astype(like.dtype)),)


_gathered.defvjp(_forward, _backward)


def _over_tensor(function: Callable[..., jax.Array], spec: PartitionSpec | None) -> Callable[..., jax.Array]:
    """Return `function` computed on each part over `tensor`; otherwise the compiler would gather the parts first."""
    if spec is None:
        return function
    parts: Callable[..., jax.Array] = jax.shard_map(
        function, in_specs=spec, out_specs=spec, axis_names={"tensor"}, check_vma=False
    )
    return parts


def _split_axis(spec: PartitionSpec) -> int | None:
    """The dimension that is split over `fsdp`."""
    return next((axis for axis, name in enumerate(spec) if name == _SHARES), None)


def _over(spec: PartitionSpec, axis: str) -> PartitionSpec:
    """The partition over one axis alone."""
    return PartitionSpec(*(name if name == axis else None for name in spec))  # type: ignore[no-untyped-call]
