"""Makes a platform's wheel of a pure one: files, their licenses, and another tag."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import zipfile
from pathlib import Path
from unittest import mock

import deflate

# 1980, the earliest that a zip can hold: the same content makes the same file.
_DATE = (1980, 1, 1, 0, 0, 0)
_HIGHEST = 12


def extend(
    pure: Path,
    folder: Path,
    *,
    added: dict[str, bytes],
    licenses: dict[str, bytes],
    license_expression: str,
    tag: str,
) -> Path:
    """Write the wheel of a platform and return its path.

    Args:
        pure: A wheel of Python files.
        folder: Where to write it.
        added: Files by their paths in it.
        licenses: License texts by their names.
        license_expression: The SPDX expression that the metadata get.
        tag: What it runs on, such as `py3-none-manylinux_2_35_x86_64`.
    """
    with zipfile.ZipFile(pure) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (information,) = {name.split("/")[0] for name in files if ".dist-info/" in name}
    files |= added
    files |= {f"{information}/licenses/{name}": text for name, text in licenses.items()}
    metadata = files[f"{information}/METADATA"].decode()
    metadata = _replaced(
        r"^License-Expression: .*$", f"License-Expression: {license_expression}", metadata
    )
    lines = "".join(f"License-File: {name}\n" for name in licenses)
    metadata = _replaced(r"^(?=License-File: )", lines, metadata)
    files[f"{information}/METADATA"] = metadata.encode()
    wheel = files[f"{information}/WHEEL"].decode()
    wheel = _replaced(r"^Root-Is-Purelib: true$", "Root-Is-Purelib: false", wheel)
    wheel = _replaced(r"^Tag: .*$", f"Tag: {tag}", wheel)
    files[f"{information}/WHEEL"] = wheel.encode()
    record = f"{information}/RECORD"
    files[record] = _record(files, record)
    name, version, *_ = pure.name.split("-")
    path = folder / f"{name}-{version}-{tag}.whl"
    # zipfile asks zlib alone, whose best is 6 to 8 % larger.
    compressor = mock.patch.object(zipfile, "_get_compressor", _Compressor)
    with compressor, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member in sorted(files, key=lambda member: (member.startswith(information), member)):
            entry = zipfile.ZipInfo(member, _DATE)
            entry.external_attr = (0o100755 if member.endswith(".so") else 0o100644) << 16
            archive.writestr(entry, files[member], zipfile.ZIP_DEFLATED)
    return path


class _Compressor:
    """Compresses as much as deflate can, in zlib's interface."""

    def __init__(self, *_: object) -> None:
        self.data = bytearray()

    def compress(self, data: bytes) -> bytes:
        self.data += data
        return b""

    def flush(self) -> bytes:
        return bytes(deflate.deflate_compress(bytes(self.data), _HIGHEST))


def _replaced(pattern: str, by: str, text: str) -> str:
    result, count = re.subn(pattern, by, text, count=1, flags=re.M)
    if not count:
        raise ValueError(f"the wheel's metadata have no {pattern}")
    return result


def _record(files: dict[str, bytes], record: str) -> bytes:
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    for name in sorted(files.keys() - {record}):
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=")
        writer.writerow((name, f"sha256={digest.decode()}", len(files[name])))
    writer.writerow((record, "", ""))
    return lines.getvalue().encode()
