"""Makes the tests strict, and the same on every machine: four CPU devices, no silent change of dtype or rank.

Everything here has to be set before jax is imported, by whichever test module comes first. Compiled programs
are kept in `.cache/`, so that a second run and parallel workers compile nothing again.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / ".cache" / "jax")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
# A size limit makes jax lock the cache; without the lock a worker may read what another is still writing.
os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(4 * 2**30)
# Several test workers share few cores: numpy's own threads only get into their way.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
# Nothing in the tests may reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import jax  # noqa: E402
import pytest  # noqa: E402

# Each compiled program takes several mappings of memory, and Linux gives a process 65,530: a worker that kept all its
# programs would crash near the suite's end.
MOST_MAPPINGS = 25_000


@pytest.fixture(autouse=True, scope="module")
def _mappings_are_given_back() -> Iterator[None]:
    """Drops the compiled programs after a file that left many."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


# Array types in signatures are checked at run time, here only. The hook finds its checker by name, so it is loaded now.
from jaxtyping import install_import_hook  # noqa: E402

import tests.array_types  # noqa: E402, F401

ARRAY_CODE = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in ("mtp", "train", "infer")
    for path in (ROOT / package).rglob("*.py")
    if "from mtp.shapes import" in path.read_text()
]
install_import_hook(ARRAY_CODE, "tests.array_types.checked")
