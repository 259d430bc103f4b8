"""Builds the plugin library, finds it again, and says what a library file is.

    from flashnext.plugins.tensorrt import library
    found = library.find("90")                 # a LibraryInfo; raises with the command that builds one
    made = library.build(["90", "120"])        # with nvcc, into the cache; minutes
    info = library.check("libflashnext_plugins.so")

On the command line: `flashnext plugins build | path | check`.

The library holds the kernels and one TensorRT plugin per op. It is linked with a static CUDA runtime and with nothing
of TensorRT: TensorRT loads it, finds `getCreators` and `setLoggerFinder` in it, and registers what they give. What a
file is (`check`) is read from a text in its bytes; nothing of it is executed.

`build_host` gives the same plugins over the host execution of the kernels: for tests, without a GPU and without nvcc.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import struct
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from flashnext.export.errors import PluginError
from flashnext.export.ops import schema
from flashnext.export.progress import progress_bar
from flashnext.plugins import device_library, host_build
from flashnext.plugins.cuda_tools import find_tool
from flashnext.plugins.device_check import TARGETS as TARGETS
from flashnext.plugins.host_build import SOURCES, Job, cache_folder, digest, kernel_sources, make, source_key
from flashnext.plugins.tensorrt import table
from flashnext.plugins.tensorrt.headers import Headers, find_headers, read_headers

FILE_NAME = "libflashnext_plugins.so"
VARIABLE = "FLASHNEXT_PLUGINS"
"""Environment variable that names a library file."""
MARK = b"flashnext-plugins:"
MAX_INFO = 4096
ELF_HEADER_BYTES = 64
MAX_BYTES = 4 << 30
FOLDER = SOURCES / "tensorrt"
REMEDY = "Build one with: flashnext plugins build"


@dataclass(frozen=True)
class LibraryInfo:
    """What a plugin library is. `capabilities` as nvcc writes them ("90"), the last one with PTX for later GPUs; none:
    the library is for the host execution of the kernels, on a CPU."""

    path: Path
    sha256: str
    op_version: int
    op_table: str
    tensorrt_headers: str
    capabilities: tuple[str, ...]
    sources: str

    @property
    def is_current(self) -> bool:
        """Whether it was made from the sources of this installation."""
        return self.sources == source_digest()

    def runs_on(self, capability: str) -> bool:
        """Whether its machine code, or its PTX, runs on a GPU of this compute capability ("121")."""
        wanted = _number(capability)
        exact = any(_number(c)[0] == wanted[0] and _number(c)[1] <= wanted[1] for c in self.capabilities)
        return exact or (bool(self.capabilities) and _number(self.capabilities[-1]) <= wanted)


def find(capability: str = "") -> LibraryInfo:
    """The library that $FLASHNEXT_PLUGINS names, or the latest one in the cache that was built from these sources.

    `capability` ("90"): one that runs there.

    Raises:
        PluginError: there is none; says how to get it.
    """
    named = os.environ.get(VARIABLE)
    if named:
        info = check(named)
        if capability and not info.runs_on(capability):
            raise PluginError(
                f"{named} (from ${VARIABLE}) is for {_list(info.capabilities)}, not for sm_{capability}. "
                f"{REMEDY} --target {capability}"
            )
        return info
    files = sorted(_folder().glob(f"*/{FILE_NAME}"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files:
        try:
            info = check(file)
        except PluginError:  # of other ops: an older installation's
            continue
        if info.is_current and (not capability or info.runs_on(capability)):
            return info
    where = f" that runs on sm_{capability}" if capability else ""
    target = f" --target {capability}" if capability else ""
    raise PluginError(f"There is no plugin library{where} built from this installation's sources. {REMEDY}{target}")


def check(path: str | Path) -> LibraryInfo:
    """What the file is. Nothing of it is executed.

    Raises:
        PluginError: it is no plugin library, or one of other ops than this installation's.
    """
    path = Path(path)
    if not path.is_file():
        raise PluginError(f"{path} is not a file. Name a plugin library. {REMEDY}")
    if not 0 < path.stat().st_size <= MAX_BYTES:
        raise PluginError(f"{path} has {path.stat().st_size:,} bytes, which is no plugin library. {REMEDY}")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        text = _info_text(data) if data[:4] == b"\x7fELF" else None
        sha256 = hashlib.sha256(data).hexdigest()
        whole = _is_whole(data)
    info = _parse(path, sha256, text)
    if info is None:
        raise PluginError(f"{path} is not a plugin library of flashnext: it does not say what it is. {REMEDY}")
    if not whole:
        raise PluginError(f"{path} is cut short: it has {path.stat().st_size:,} bytes of more. Copy it again. {REMEDY}")
    if (info.op_version, info.op_table) != (schema.VERSION, table.digest()):
        raise PluginError(
            f"{path} has version {info.op_version} of the ops (table {info.op_table}), this installation version "
            f"{schema.VERSION} (table {table.digest()}). {REMEDY}"
        )
    return info


def build(targets: Sequence[str] = TARGETS, headers: str | Path | None = None, out: str | Path | None = None
          ) -> LibraryInfo:  # fmt: skip
    """Compile the library for these compute capabilities; into the cache, or to the file `out`.

    Raises:
        PluginError: nvcc or the headers are not here, or nvcc fails.
    """
    targets = sorted(dict.fromkeys(targets), key=_number)
    if not targets:
        raise PluginError("Name at least one target, such as 90.")
    if out is not None and not (above := Path(out).absolute().parent).is_dir():
        raise PluginError(f"{above} is no folder; make it first, or name another place for the library.")
    nvcc = str(find_tool("nvcc"))
    found = read_headers(Path(headers)) if headers else find_headers()
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    code = [f"-gencode=arch=compute_{t},code=sm_{t}" for t in targets]
    code += [f"-gencode=arch=compute_{targets[-1]},code=compute_{targets[-1]}"]
    jobs = [(source, [*device_library.FLAGS, *code]) for source in (SOURCES / "abi.cpp", *kernel_sources())]
    jobs += [(s, [*f, *device_library.FLAGS, *(code if "-x" in f else [])]) for s, f in _plugin_jobs(found, targets)]
    cache = _folder()
    cache.mkdir(exist_ok=True)
    objects = _compile_all(nvcc, jobs, version, cache)
    folder = cache / digest([o.name for o in objects])
    folder.mkdir(exist_ok=True)
    link = [nvcc, "-shared", "-cudart=static", "-Xlinker", "--exclude-libs=ALL", *code]
    library = make(folder / FILE_NAME, [*link, *map(str, objects)])
    host_build.remove_old(cache)
    return check(_copied(library, Path(out)) if out else library)


def build_host(headers: str | Path | None = None) -> LibraryInfo:
    """The library for the host execution of the kernels, with g++.

    Raises:
        PluginError: g++ or the headers are not here, or g++ fails.
    """
    found = read_headers(Path(headers)) if headers else find_headers()
    jobs = [*host_build.kernel_jobs(), *host_plugin_jobs(found)]
    return check(host_build.build_from(jobs, "plain", shared=True, name="plugins"))


def host_plugin_jobs(headers: Headers, kind: str = "plain") -> list[Job]:
    """The plugins' sources for g++, in one of host_build's kinds of builds."""
    flags = [*host_build.COMMON, *host_build.KERNEL, *host_build.BUILDS[kind], f"-I{FOLDER / 'host'}"]
    return [(s, [*flags, *(x for x in f if x not in ("-x", "cu"))]) for s, f in _plugin_jobs(headers, ())]


def source_digest() -> str:
    """Hash of the sources that a library is made from."""
    sources = [SOURCES / "abi.cpp", *kernel_sources(), *sorted(FOLDER.glob("*.cpp"))]
    return digest([source_key(source, []) for source in sources])


# --- building ---------------------------------------------------------------------------------------


def _plugin_jobs(headers: Headers, targets: Sequence[str]) -> list[Job]:
    """The plugins' own sources; `-x cu` marks the one with a kernel."""
    # The version is named so that an object is compiled again where the folder gets other headers.
    include = ["-isystem", str(headers.folder), f"-DFLASHNEXT_HEADERS={headers.version}"]
    says = [f'-DFLASHNEXT_CAPABILITIES="{" ".join(targets)}"', f'-DFLASHNEXT_SOURCES="{source_digest()}"']
    extra = {"info": says, "device": ["-x", "cu"]}
    return [(source, [*include, *extra.get(source.stem, [])]) for source in sorted(FOLDER.glob("*.cpp"))]


def _compile_all(nvcc: str, jobs: Sequence[Job], version: str, folder: Path) -> list[Path]:
    with progress_bar(len(jobs), "sources", delay=0) as bar:

        def compiled(job: Job) -> Path:
            source, flags = job
            name = f"{source.parent.name}-{source.stem}-{source_key(source, [version, *flags])}.o"
            made = make(folder / name, [nvcc, *flags, "-c", str(source)])
            bar.update()
            return made

        with ThreadPoolExecutor(min(os.cpu_count() or 1, host_build.MAX_COMPILERS)) as pool:
            return list(pool.map(compiled, jobs))


def _folder() -> Path:
    return cache_folder() / "plugins"


def _copied(library: Path, out: Path) -> Path:
    """A copy that appears whole or not at all."""
    if out.is_dir():
        out = out / FILE_NAME
    unfinished = out.with_name(f".{out.name}.unfinished")
    try:
        shutil.copyfile(library, unfinished)
        unfinished.replace(out)
    finally:
        unfinished.unlink(missing_ok=True)
    return out


# --- what a file says -------------------------------------------------------------------------------


def _info_text(data: mmap.mmap) -> bytes | None:
    start = data.find(MARK)
    if start < 0:
        return None
    begin = start + len(MARK)
    end = data.find(b"\0", begin, begin + MAX_INFO)
    return data[begin:end] if end >= 0 else None


def _is_whole(data: mmap.mmap) -> bool:
    """Whether the section headers, which linkers write last, lie within the file (64-bit ELF, little-endian)."""
    if len(data) < ELF_HEADER_BYTES:
        return False
    (offset,), (entry_bytes, entries) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<HH", data, 58)
    return bool(offset + entry_bytes * entries <= len(data))


def _parse(path: Path, sha256: str, text: bytes | None) -> LibraryInfo | None:
    try:
        said = json.loads(text or b"null")
        capabilities = tuple(str(said["capabilities"]).split())
        texts = [str(said[name]) for name in ("op_table", "tensorrt_headers", "sources")]
        for capability in capabilities:
            _number(capability)
        version = int(said["op_version"])
    except (ValueError, TypeError, KeyError, RecursionError, PluginError):
        return None
    return LibraryInfo(path, sha256, version, texts[0], texts[1], capabilities, texts[2])


def _number(capability: str) -> tuple[int, int]:
    """Major and minor of "90", "9.0", "sm_90" or "120"."""
    digits = capability.removeprefix("sm_").replace(".", "")
    if not digits.isascii() or not digits.isdigit() or not 2 <= len(digits) <= 3:
        raise PluginError(f"{capability!r} is no compute capability. Write it as 90 or 120.")
    return int(digits[:-1]), int(digits[-1])


def _list(capabilities: Sequence[str]) -> str:
    return ", ".join(f"sm_{c}" for c in capabilities) or "the host execution"
