"""The chips that the cost model knows: their memory, speeds and networks.

It needs no jax, so that scripts/plan.py can check a topology before it imports jax.
"""

import math
from typing import NamedTuple

from config import SLICE
from errors import USAGE, UserError, or_list

GIB = 2**30


class Gpu(NamedTuple):
    """What XLA has to know of an NVIDIA GPU to compile for it."""

    capability: float
    """CUDA's compute capability."""
    cores: int
    """Streaming multiprocessors."""
    lanes: int
    """float32 lanes of a core."""
    shared: int
    """Bytes of shared memory of a core."""
    cache: int
    """Bytes of the second-level cache."""


class Chip(NamedTuple):
    """One device."""

    kind: str
    """Its name in PEAK_TFLOPS."""
    memory: float
    """Bytes that a program may use."""
    hbm: float
    """Bytes per second between the device and its memory."""
    link: float
    """Bytes per second that a device receives from the devices of its slice or node, in a ring:
    both directions of one axis of a TPU's torus, or all of NVLink."""
    slow: float
    """Bytes per second that a device receives from other slices or nodes."""
    clock: float
    """Cycles per second."""
    gpu: Gpu | None = None

    @property
    def platform(self) -> str:
        """JAX's name for the platform."""
        return "tpu" if self.kind.startswith("TPU") else "gpu"

    @property
    def flops(self) -> float:
        """FLOP/s in bfloat16; used for float32 too, which is slower."""
        return PEAK_TFLOPS[self.kind] * 1e12

    def speed(self, axis: str) -> float:
        """Bytes per second that a device receives over a mesh axis."""
        return self.slow if axis == SLICE else self.link

    @property
    def networks(self) -> tuple[str, str]:
        """The names of the networks inside and between slices or nodes."""
        return ("ICI", "DCN") if self.platform == "tpu" else ("NVLink", "InfiniBand")


JAX_GIB = 0.75 * GIB
"""What JAX takes of each GiB of a GPU's memory unless XLA_CLIENT_MEM_FRACTION is set."""

KIB, MIB = 2**10, 2**20
A100 = Gpu(8.0, cores=108, lanes=64, shared=164 * KIB, cache=40 * MIB)
H100 = Gpu(9.0, cores=132, lanes=128, shared=228 * KIB, cache=50 * MIB)
H200 = H100._replace(cache=60 * MIB)
B200 = Gpu(10.0, cores=148, lanes=128, shared=228 * KIB, cache=126 * MIB)

# Memory: for TPUs, what XLA's out-of-memory message calls usable; for GPUs, JAX's part of what CUDA
# reports.  Rates: Google Cloud's TPU pages, the "TPU specs" table of the JAX scaling book
# (Austin et al. 2025, chapter 2), and NVIDIA's data sheets of the A100 SXM4, H100 SXM, H200 and
# B200.  What XLA has to know of a GPU, and the rate of a B200's memory: XLA's descriptions of GPUs
# (xla/backends/gpu/target_config/specs).  Between slices: the NICs of a host on the TPU pages,
# divided by its chips; those pages have no NICs of a v4 host, so there the 81 Tbit/s that PaLM's
# 6,144 chips reached (Chowdhery et al. 2022, section 4); for GPUs, the 200 (A100) or 400 Gbit/s per
# GPU of a DGX.
CHIPS = {
    "v4": Chip("TPU v4", 30.75 * GIB, 1.23e12, 0.9e11, 1.6e9, 1.05e9),
    "v5e": Chip("TPU v5e", 15.75 * GIB, 0.81e12, 0.9e11, 3.1e9, 1.5e9),
    "v5p": Chip("TPU v5p", 95.74 * GIB, 2.77e12, 1.8e11, 6.25e9, 1.75e9),
    "v6e": Chip("TPU v6e", 31.25 * GIB, 1.64e12, 1.8e11, 1.25e10, 1.75e9),
    "a100_40gb": Chip("NVIDIA A100-SXM4-40GB", 39.42 * JAX_GIB, 1.555e12, 3e11, 25e9, 1.41e9, A100),
    "a100": Chip("NVIDIA A100-SXM4-80GB", 79.26 * JAX_GIB, 2.039e12, 3e11, 25e9, 1.41e9, A100),
    "h100": Chip("NVIDIA H100 80GB HBM3", 79.2 * JAX_GIB, 3.35e12, 4.5e11, 50e9, 1.98e9, H100),
    "h200": Chip("NVIDIA H200", 139.8 * JAX_GIB, 4.8e12, 4.5e11, 50e9, 1.98e9, H200),
    "b200": Chip("NVIDIA B200", 178.36 * JAX_GIB, 7.67e12, 9e11, 50e9, 1.965e9, B200),
}

# Dense bfloat16 TFLOP/s of a JAX device, summed in float32, from data sheets and for GeForce from
# NVIDIA's architecture papers; a TPU v2, v3 or 7x chip is two devices.
PEAK_TFLOPS = {
    "TPU v2": 22.5, "TPU v3": 61.5, "TPU v4": 275, "TPU v5 lite": 197, "TPU v5e": 197,
    "TPU v5": 459, "TPU v5p": 459, "TPU v6 lite": 918, "TPU v6e": 918, "TPU7x": 1153.5,
    "NVIDIA A100-SXM4-40GB": 312, "NVIDIA A100-SXM4-80GB": 312, "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312, "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835, "NVIDIA H200": 989, "NVIDIA B200": 2250, "NVIDIA GB200": 2500,
    "NVIDIA L4": 121, "NVIDIA L40S": 362, "NVIDIA GeForce RTX 3090": 71,
    "NVIDIA GeForce RTX 4090": 165, "NVIDIA GeForce RTX 5090": 209.5,
}  # fmt: skip

# {another name that JAX has for a kind of device: its Chip.kind}.
JAX_NAMES = {"TPU v5 lite": "TPU v5e", "TPU v5": "TPU v5p", "TPU v6 lite": "TPU v6e"}


def chip_of(device_kind: str) -> Chip | None:
    """The chip of a JAX device, or None if it is not in the table."""
    kind = JAX_NAMES.get(device_kind, device_kind)
    return next((chip for chip in CHIPS.values() if chip.kind == kind), None)


def gpu_target(chip: Chip) -> str:
    """XLA's description of a GPU to compile for."""
    gpu, (major, minor) = chip.gpu, str(chip.gpu.capability).split(".")
    extension = "ACCELERATED_FEATURES" if gpu.capability >= 9 else "NONE"
    return f"""
platform_name: "CUDA" device_description_str: "{chip.kind}"
runtime_version {{ major: 13 }} dnn_version_info {{ major: 9 minor: 15 }}
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  core_count: {gpu.cores} fpus_per_core: {gpu.lanes} clock_rate_ghz: {chip.clock / 1e9}
  memory_bandwidth: {chip.hbm:.0f} device_memory_size: {chip.memory / JAX_GIB * GIB:.0f}
  l2_cache_size: {gpu.cache}
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {gpu.shared}
  shared_memory_per_block_optin: {gpu.shared - KIB} registers_per_core_limit: 65536
  registers_per_block_limit: 65536 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
"""


# The slices that Google Cloud's TPU pages list: of v5e and v6e, and of v4 and v5p.
FLAT = "1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16 or 16x16"
CUBES = "2x2x1, 2x2x2, 2x2x4, 2x4x4, or three multiples of 4 with at most {} chips in all"
LARGEST = dict(v4=4096, v5p=8960)
"""Chips of the largest slice of a v4, and of a v5p's pod."""


def can_exist(chip: str, sizes: list[int]) -> bool:
    """Whether a slice of this TPU, or a part of a host, may have this shape; a single size is a
    number of chips in any shape."""
    n, dims, any_shape = math.prod(sizes), sum(x > 1 for x in sizes), len(sizes) == 1
    is_power = n.bit_count() == 1
    if chip not in LARGEST:
        return is_power and n <= 256 and (any_shape or (dims <= 2 and max(sizes) <= 16))
    is_cubes = n % 64 == 0 and (any_shape or (dims == 3 and all(x % 4 == 0 for x in sizes)))
    return (is_power and n <= 32 and dims <= 3) or (is_cubes and n <= LARGEST[chip])


def parse_topology(name: str) -> tuple[Chip, int]:
    """The chip of a topology such as v5p:4x4x4, and the number of devices of a slice or node.

    Raises UserError USAGE.
    """
    chip, _, shape = name.partition(":")
    words = shape.split("x")
    if chip not in CHIPS or not all(x.isdecimal() and len(x) < 6 and int(x) for x in words):
        what = f"topology={name!r} is not a chip ({or_list(CHIPS)}) and its shape"
        raise UserError(USAGE, what, "give one such as v5p:4x4x4, v5e:16x16 or h200:8")
    sizes = [int(x) for x in words]
    n, is_gpu = math.prod(sizes), CHIPS[chip].platform == "gpu"
    if is_gpu and n > 8:
        what = f"topology={name} has {n} devices, but a node has at most 8"
        raise UserError(USAGE, what, f"give --topology {chip}:8 --slices {-(-n // 8)}")
    if not is_gpu and not can_exist(chip, sizes):
        shapes = CUBES.format(LARGEST[chip]) if chip in LARGEST else FLAT
        fix = f"give a slice that exists: {shapes}; for several of them add --slices"
        raise UserError(USAGE, f"topology={name}: there is no {chip} slice of that shape", fix)
    return CHIPS[chip], n
