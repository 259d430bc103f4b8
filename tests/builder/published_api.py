"""TensorRT's own bindings without TensorRT: whatever is called is held to the signatures that they publish.

The bindings' wheel is 1 MB and can be imported with empty libraries in the place of TensorRT's; then classes, enums,
properties and the signatures of all methods are there, and nothing can be run. `Module` stands before it: a call is
bound to the method's signature (names, number and types of arguments), an attribute has to exist, what is set has to
be a property that can be set, and a result is an object of the class that the signature names, held to it in turn.

    python tests/builder/published_api.py JOB     # walks build_plan with a job in JSON; prints the calls, one a line
"""

from __future__ import annotations

import ctypes
import inspect
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LIBRARIES = ("libnvinfer.so.11", "libnvonnxparser.so.11", "libnvinfer_plugin.so.11")
ENTRY_POINTS = (
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "getBuilderPluginRegistry",
    "getNvOnnxParserVersion",
    "getPluginRegistry",
    "initLibNvInferPlugins",
)
PLAIN = {
    "str": str,
    "bool": bool,
    "int": int,
    "float": (int, float),
    "typing.SupportsInt": int,
    "typing.SupportsFloat": (int, float),
    "typing_extensions.Buffer": (bytes, bytearray, memoryview),
}
RESULTS: dict[str, Any] = {"bool": True, "int": 0, "str": "", "None": None}
OTHER_NAMES = {"nvonnxparser::IParserError": "ParserError"}


def import_bindings(folder: Path) -> Any:
    """The real module `tensorrt_bindings`, over empty libraries that are made in a folder."""
    source = folder / "empty.c"
    source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in ENTRY_POINTS), encoding="ascii")
    for name in LIBRARIES:
        command = ["cc", "-shared", "-fPIC", "-o", str(folder / name), f"-Wl,-soname,{name}", str(source)]
        subprocess.run(command, check=True)
        ctypes.CDLL(str(folder / name))
    import tensorrt_bindings

    return tensorrt_bindings


class Module:
    """The module as `apis.Api` takes it; `calls` lists what was used."""

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings
        self.calls: list[str] = []
        self.__version__ = bindings.__version__

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._bindings, name)  # an AttributeError names what TensorRT has not
        if not inspect.isclass(found) or name in ("ILogger", "IProgressMonitor") or hasattr(found, "__members__"):
            return found
        return lambda *args, **kwargs: self._construct(found, args, kwargs)

    def _construct(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Object:
        made = Object(self, kind)
        self.call(made, kind, "__init__", args, kwargs)
        return made

    def call(self, owner: Object, kind: type, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Bind a call to the published signature; the result is what the signature says."""
        self.calls.append(f"{kind.__name__}.{name}")
        faults = []
        for parameters, result in signatures(getattr(kind, name).__doc__ or "", name):
            try:
                bound = inspect.Signature(parameters).bind(owner, *args, **kwargs)
                for argument, value in bound.arguments.items():
                    self._check(value, next(p for p in parameters if p.name == argument).annotation, argument)
                return self._result(result)
            except TypeError as fault:
                faults.append(str(fault))
        raise TypeError(f"{kind.__name__}.{name}: {'; '.join(faults) or 'no signature'}")

    def _check(self, value: Any, annotation: str, argument: str) -> None:
        short = annotation.rpartition("tensorrt.")[2]
        if short == "Dims":
            fits = isinstance(value, tuple | list) and all(isinstance(d, int) for d in value)
        elif annotation in PLAIN:
            fits = isinstance(value, PLAIN[annotation])
        elif isinstance(value, Object):
            fits = value.kind.__name__ == short
        else:
            fits = isinstance(value, self._class(short))
        if not fits:
            raise TypeError(f"{argument} must be {annotation}, found {value!r:.80}")

    def _class(self, name: str) -> Any:
        found = self._bindings
        for part in OTHER_NAMES.get(name, name).split("."):
            found = getattr(found, part)
        return found

    def _result(self, annotation: str) -> Any:
        if annotation in RESULTS:
            return RESULTS[annotation]
        if annotation.startswith("typing"):
            return object()
        return Object(self, self._class(annotation.rpartition("tensorrt.")[2]))


class Object:
    """An object of one of the bindings' classes."""

    def __init__(self, module: Module, kind: type) -> None:
        object.__setattr__(self, "module", module)
        object.__setattr__(self, "kind", kind)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.kind, name)
        if isinstance(found, property):
            self.module.calls.append(f"{self.kind.__name__}.{name}")
            ((_, result),) = signatures(found.fget.__doc__ or "", "")
            return self.module._result(result)
        return lambda *args, **kwargs: self.module.call(self, self.kind, name, args, kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        found = getattr(self.kind, name)
        if not isinstance(found, property) or found.fset is None:
            raise TypeError(f"{self.kind.__name__}.{name} cannot be set")
        self.module.calls.append(f"{self.kind.__name__}.{name}=")
        ((parameters, _),) = signatures(found.fset.__doc__ or "", "")
        self.module._check(value, parameters[1].annotation, name)

    def __bytes__(self) -> bytes:
        if self.kind.__name__ != "IHostMemory":
            raise TypeError(f"{self.kind.__name__} has no bytes")
        return b"plan"


def signatures(doc: str, name: str) -> list[tuple[list[inspect.Parameter], str]]:
    """Parameters and result of each overload in the text that pybind11 puts before a method's documentation."""
    pattern = re.compile(rf"^(?:\d+\. )?{re.escape(name)}\((.*)\) -> (.+?)$", re.MULTILINE)
    found = [(m[1], m[2]) for m in pattern.finditer(doc.strip()) if not m[1].startswith("*args")]
    return [([_parameter(part) for part in _split(text)], result.strip()) for text, result in found]


def _split(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += letter in "[(<"
        depth -= letter in "])>"
        if letter == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [p.strip() for p in [*parts, text[start:]] if p.strip()]


def _parameter(text: str) -> inspect.Parameter:
    head, _, default = text.partition(" = ")
    name, _, annotation = head.partition(": ")
    empty = inspect.Parameter.empty
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, kind, default=default or empty, annotation=annotation.strip())


def main() -> None:
    from flashnext.builder.apis import Api
    from flashnext.builder.build_plan import build_plan
    from flashnext.builder.job import PlanJob

    with tempfile.TemporaryDirectory() as folder:
        module = Module(import_bindings(Path(folder)))
        plan, _ = build_plan(Api("tensorrt", "TensorRT", module), PlanJob.from_json(sys.argv[1]), lambda *_: True)
        assert plan == b"plan"
    print(module.__version__, *module.calls, sep="\n")


if __name__ == "__main__":
    main()
