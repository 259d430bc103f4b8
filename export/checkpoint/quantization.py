"""What a checkpoint's configuration says about quantization, compared with what its files hold.

Met in the wild: `quantization_config` in config.json (or inside its `text_config`), or ModelOpt's hf_quant_config.json:

    {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": […]}
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "mtp*", …]}
    {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
     "quantized_layers": {"model.language_model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16}, …}}

The files decide: dtypes and scales say how a tensor is to be read. What the configuration says is a fault where it
would change the meaning of the bytes (another method, other block sizes), or where it names a module and says otherwise
than the files; a list or a label for the whole checkpoint that is imprecise (about MTP layers it often is) gives a
remark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashnext.export.checkpoint.forms import FP8, FP8_BLOCK, NVFP4, PLAIN
from flashnext.export.checkpoint.safetensors_file import shown
from flashnext.export.errors import CheckpointError
from flashnext.export.files import read_json_object
from flashnext.export.number_formats import BLOCK, GROUP

PREFIXES = ("model.language_model.", "language_model.model.", "model.")
MODELOPT_NAME = "hf_quant_config.json"
MAX_BYTES = 64 << 20
"""A list of every expert's matrices has 75,000 entries."""

ALGORITHMS = {
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "FP8_PB_WO": FP8_BLOCK,
    "FP8_BLOCK_SCALES": FP8_BLOCK,
    "FP8": FP8,
    "NONE": PLAIN,
}
"""ModelOpt's `quant_algo`. FP8 (one scale per tensor) is read in n-gram tables only."""
MIXED = "MIXED_PRECISION"
EXPERTS = ".mlp.experts"
GROUP_SIZES = {NVFP4: GROUP, FP8_BLOCK: BLOCK}
MAX_PATTERNS = 20_000
"""Releases list up to a thousand modules; each is compared with each layer."""
IGNORE_KEYS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")


@dataclass(frozen=True)
class Declared:
    """What a configuration says: `named` gives the form of single modules, `ignored` patterns of unquantized ones,
    `default` the form of the others (None: it says nothing about them)."""

    file: str
    default: str | None = None
    named: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def form(self, module: str) -> tuple[str | None, bool]:
        """Form of a module (prefix stripped), and whether it is named as such."""
        for name in (module, f"{module}.0.gate_proj", f"{module}.gate_up_proj"):
            if name in self.named:
                return self.named[name], True
        if any(_matches(pattern, module) for pattern in self.ignored):
            return PLAIN, False
        return self.default, False


def declared(folder: Path, config: Mapping[str, Any]) -> Declared | None:
    """What `config` (config.json as it is) or hf_quant_config.json says; None when neither says anything.

    Raises:
        CheckpointError: a method or sizes that this project does not read, or a malformed entry.
    """
    text = config.get("text_config")
    raw = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    file = folder / "config.json"
    if not raw and (folder / MODELOPT_NAME).is_file():
        file = folder / MODELOPT_NAME
        raw = read_json_object(file, CheckpointError, "ModelOpt's quantization settings", MAX_BYTES).get("quantization")
        raw = {"quant_method": "modelopt", **raw} if isinstance(raw, dict) else raw
    if not raw:
        return None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file}: the quantization settings are {raw!r:.80}, expected an object.")
    return _parse(file, raw)


def compare(said: Declared | None, found: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Faults and remarks: `found` gives the form of each module that may be quantized, as the files hold it."""
    if said is None:
        return [], []
    faults: list[str] = []
    differing: dict[tuple[str, str], list[str]] = {}
    for module, form in found.items():
        expected, is_named = said.form(module)
        if expected is None or expected == form or not (is_named or module.endswith(EXPERTS)):
            continue  # labels for the whole checkpoint are about its linear layers, not about n-gram tables
        if is_named:
            faults.append(f"{said.file} says that {module} is {expected}, but the files hold it as {form}")
        else:
            differing.setdefault((expected, form), []).append(module)
    remarks = [
        f"{said.file} describes {modules[0]}{_more(modules)} as {expected}; the files hold {form} and decide."
        for (expected, form), modules in differing.items()
    ]
    return faults, remarks


# --- parsing --------------------------------------


def _parse(file: Path, raw: Mapping[str, Any]) -> Declared:
    method = raw.get("quant_method", "modelopt" if "quant_algo" in raw else None)
    ignored = tuple(_stripped(p) for p in _ignored(file, raw))
    if method == "fp8":
        _check_block_size(file, raw.get("weight_block_size"))
        return Declared(file.name, FP8_BLOCK, ignored=ignored)
    if not isinstance(method, str) or not method.startswith("modelopt"):
        raise CheckpointError(
            f"{file}: quant_method is {method!r:.60}; read are fp8 ({BLOCK}x{BLOCK} blocks) and modelopt (NVFP4, "
            "FP8_PB_WO, MIXED_PRECISION). Use such a checkpoint, or the BF16 one."
        )
    default = None if raw.get("quant_algo") == MIXED else _algorithm(file, raw)
    return Declared(file.name, default, dict(_named(file, raw)), ignored)


def _named(file: Path, raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    layers = raw.get("quantized_layers") or {}
    if not isinstance(layers, dict) or not all(isinstance(entry, dict) for entry in layers.values()):
        raise CheckpointError(f"{file}: quantized_layers must map module names to objects.")
    for module, entry in layers.items():
        yield _stripped(module), _algorithm(file, entry, module)


def _algorithm(file: Path, entry: Mapping[str, Any], module: str = "") -> str:
    name = entry.get("quant_algo") or "NONE"
    where = f"{file}{': ' + shown(module) if module else ''}"
    if not isinstance(name, str) or name not in ALGORITHMS:
        known = ", ".join((*ALGORITHMS, MIXED))
        raise CheckpointError(f"{where}: quant_algo is {name!r:.60}; read are {known}. Use another checkpoint.")
    form = ALGORITHMS[name]
    size = entry.get("group_size")
    if size is not None and form in GROUP_SIZES and size != GROUP_SIZES[form]:
        raise CheckpointError(f"{where}: {name} has group_size {size!r:.60}; only {GROUP_SIZES[form]} is read.")
    return form


def _check_block_size(file: Path, size: Any) -> None:
    if size != [BLOCK, BLOCK]:
        raise CheckpointError(
            f"{file}: weight_block_size is {size!r:.60}; FP8 experts are read in blocks of [{BLOCK}, {BLOCK}] only. "
            "Use the official FP8 checkpoint, or convert again."
        )


def _ignored(file: Path, raw: Mapping[str, Any]) -> Iterator[str]:
    for key in IGNORE_KEYS:
        patterns = raw.get(key) or []
        if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
            raise CheckpointError(f"{file}: {key} must be a list of module names, found {patterns!r:.80}.")
        if len(patterns) > MAX_PATTERNS:
            raise CheckpointError(f"{file}: {key} has {len(patterns):,} entries, more than {MAX_PATTERNS:,}.")
        yield from patterns


def _stripped(module: str) -> str:
    return next((module.removeprefix(p) for p in PREFIXES if module.startswith(p)), module)


def _matches(pattern: str, module: str) -> bool:
    """A module's own name or one above it, or a pattern with `*`. Regular expressions of strangers are not run."""
    first, *rest = pattern.split("*")
    if not rest:
        return module == first or module.startswith(f"{first}.")
    if not module.startswith(first) or not module.endswith(rest[-1]):
        return False
    at, end = len(first), len(module) - len(rest[-1])
    for piece in rest[:-1]:
        at = module.find(piece, at, end)
        if at < 0:
            return False
        at += len(piece)
    return at <= end


def _more(modules: list[str]) -> str:
    return f" and {len(modules) - 1:,} more" if len(modules) > 1 else ""
