"""A wheel for one platform, made of the wheel for any: with the extension in it, for machines without a compiler.

The extension is bound to a release of PyTorch and a version of Python, and says so itself (library.py): elsewhere the
wheel works as the one for any platform does.
"""

from __future__ import annotations

import base64
import hashlib
import re
import sys
import sysconfig
import zipfile
from typing import TYPE_CHECKING

from ..errors import InvalidInput
from . import library

if TYPE_CHECKING:
    from pathlib import Path

_ANY = "py3-none-any"
_PLACE = f"tilewise/native/{library.PREBUILT}/"


def platform_wheel(pure: Path, folder: Path) -> Path:
    """Put the wheel `pure` with this machine's extension into a folder. Raises CompileError where it does not build."""
    if not pure.name.endswith(f"-{_ANY}.whl"):
        raise InvalidInput("wheel", pure.name, f"a wheel for any platform, *-{_ANY}.whl", "build it with `pip wheel .`")
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    tag = f"{python}-{python}-{re.sub('[-.]', '_', sysconfig.get_platform())}"
    added = {_PLACE + name: content for name, content in library.packed().items()}
    folder.mkdir(parents=True, exist_ok=True)
    goal = folder / pure.name.replace(_ANY, tag)
    with zipfile.ZipFile(pure) as source, zipfile.ZipFile(goal, "w", zipfile.ZIP_DEFLATED) as wheel:
        files = {name: source.read(name) for name in source.namelist() if not name.endswith("/")} | added
        (record,) = [name for name in files if name.endswith(".dist-info/RECORD")]
        about = record.replace("RECORD", "WHEEL")
        text = files[about].decode().replace(f"Tag: {_ANY}", f"Tag: {tag}")
        files[about] = text.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false").encode()
        del files[record]
        for name, content in files.items():
            wheel.writestr(name, content)
        lines = [f"{name},sha256={_hash(content)},{len(content)}" for name, content in files.items()]
        wheel.writestr(record, "\n".join([*lines, f"{record},,", ""]))
    return goal


def _hash(content: bytes) -> str:
    """As RECORD has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
