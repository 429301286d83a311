"""XLA's collectives on processors, one device in each process: jax_collectives.py IMPLEMENTATION OUT.

RANK, WORLD_SIZE, MASTER_ADDR and COORDINATOR_PORT say which process this is, and where JAX's coordinator is. Each process
writes its results to OUT.RANK.npz; what failed, as a text. With OUT `time` process 0 prints medians instead.
"""

import os
import statistics
import sys
import time

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SEED = int(os.environ.get("SEED", "1"))
TYPES = os.environ["TYPES"].split()


def draw(shape, dtype, *key):
    """Numbers that all processes draw alike."""
    random = np.random.default_rng([SEED, *key])
    kind = jnp.dtype(dtype).kind
    if kind == "b":
        return random.integers(0, 2, shape).astype(bool)
    if kind in "iu":
        return random.integers(0, 7, shape).astype(dtype)
    drawn = random.uniform(0.5, 1.5, shape)
    if kind == "c":
        drawn = drawn + 1j * random.uniform(-1, 1, shape)
    return drawn.astype(dtype)


def spread(whole, mesh, spec):
    """A global array of which each process has its part."""
    return jax.make_array_from_callback(whole.shape, NamedSharding(mesh, spec), lambda index: whole[index])


def cases():
    """Names, meshes, and functions of one block in a process."""
    line = Mesh(np.array(jax.devices()), "x")
    square = Mesh(np.array(jax.devices()).reshape(2, -1), ("y", "x"))
    half = SIZE // 2
    pairs = [list(range(half)), list(range(half, SIZE))]
    shift = [(rank, (rank + 1) % SIZE) for rank in range(SIZE)]
    some = [(0, SIZE - 1), (SIZE - 1, 0), (1, 1)]
    yield "psum", line, lambda x: lax.psum(x, "x")
    yield "pmax", line, lambda x: lax.pmax(x, "x")
    yield "pmin", line, lambda x: lax.pmin(x, "x")
    yield "psum groups", line, lambda x: lax.psum(x, "x", axis_index_groups=pairs)
    yield "psum rows", square, lambda x: lax.psum(x, "x")
    yield "psum columns", square, lambda x: lax.psum(x, "y")
    yield "psum square", square, lambda x: lax.psum(x, ("y", "x"))
    yield "all_gather", line, lambda x: lax.all_gather(x, "x")
    yield "all_gather tiled", line, lambda x: lax.all_gather(x, "x", axis=1, tiled=True)
    yield "all_gather groups", line, lambda x: lax.all_gather(x, "x", axis_index_groups=pairs)
    yield "psum_scatter", line, lambda x: lax.psum_scatter(x, "x", scatter_dimension=1, tiled=True)
    yield "psum_scatter rows", square, lambda x: lax.psum_scatter(x, "x", scatter_dimension=1, tiled=True)
    yield "all_to_all", line, lambda x: lax.all_to_all(x, "x", 1, 0, tiled=True)
    yield "all_to_all columns", square, lambda x: lax.all_to_all(x, "y", 1, 0, tiled=True)
    yield "ppermute", line, lambda x: lax.ppermute(x, "x", shift)
    yield "ppermute some", line, lambda x: lax.ppermute(x, "x", some)


def run(mesh, body, whole):
    """The block of this process after `body`."""
    axes = PartitionSpec(mesh.axis_names)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=axes, out_specs=axes, check_vma=False)
    return np.asarray(jax.jit(mapped)(spread(whole, mesh, axes)).addressable_data(0))


def results():
    """Every case by its name."""
    found = {}
    for number, (name, mesh, body) in enumerate(cases()):
        for at, dtype in enumerate(TYPES):
            columns = SIZE * int(np.random.default_rng([SEED, number, at]).choice([1, 12, 300, 3000]))
            whole = draw((3 * SIZE, columns), jnp.dtype(dtype), number, at, columns)
            found[f"{name} {dtype} {columns}"] = tried(lambda: run(mesh, body, whole))
    # Reductions of whole arrays, which the compiler makes; products, and logic.
    line = Mesh(np.array(jax.devices()), "x")
    for at, dtype in enumerate(TYPES):
        whole = draw((SIZE, 5), jnp.dtype(dtype), 1000, at)
        array = spread(whole, line, PartitionSpec("x"))
        for reduce in (jnp.sum, jnp.prod, jnp.max, jnp.min, jnp.any, jnp.all):
            if np.dtype(whole.dtype).kind == "c" and reduce in (jnp.max, jnp.min):
                continue
            reduced = jax.jit(lambda x, reduce=reduce: reduce(x, axis=0))
            found[f"{reduce.__name__} {dtype}"] = tried(lambda: np.asarray(reduced(array).addressable_data(0)))
    return found


def tried(call):
    """The result, or what was said against it."""
    try:
        result = call()
    except Exception as error:  # Whatever XLA raises is the result.
        return np.array(f"failed: {error}".splitlines()[0])
    return result.astype(np.float32) if result.dtype.name == "bfloat16" else result


def timed():
    """Microseconds of psum by bytes."""
    mesh = Mesh(np.array(jax.devices()), "x")
    axes = PartitionSpec("x")
    for size in (1 << 10, 1 << 16, 1 << 20, 1 << 24):
        whole = np.ones((SIZE, size // 4), np.float32)
        mapped = jax.jit(jax.shard_map(lambda x: lax.psum(x, "x"), mesh=mesh, in_specs=axes, out_specs=axes, check_vma=False))
        array = spread(whole, mesh, axes)
        took = []
        for _ in range(13 if size > 1 << 20 else 60):
            start = time.perf_counter()
            mapped(array).block_until_ready()
            took.append(time.perf_counter() - start)
        if RANK == 0:
            print(f"psum {size} {statistics.median(took[3:]) * 1e6:.0f}", flush=True)


def main():
    implementation, out = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", implementation)
    jax.config.update("jax_enable_x64", True)
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['COORDINATOR_PORT']}"
    jax.distributed.initialize(where, SIZE, RANK)
    if out == "time":
        timed()
    else:
        np.savez(f"{out}.{RANK}", **results())


if __name__ == "__main__":
    main()
