"""The golden check: is an engine that was just built right, before anyone uses it?

Seeded steps (a prefill chunk, a decode step, a verification of which a part is kept, and the draft layer's) run through
every graph of the engine on this GPU and through a reference on the host, as in `flashnext validate`, and every output
must be within its tolerance (`flashnext.runtime.validation.comparison.TOLERANCES`). `flashnext build` calls this where
there is a GPU, and keeps no engine that fails.

    check = find_check("bundle")
    if check: print(check(Path("bundle"), Path("bundle/engines/tensorrt-sm90")))
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path

from flashnext.builder.engine_manifest import EngineManifest
from flashnext.export.errors import EngineError
from flashnext.export.graphs.manifest import Manifest

Check = Callable[[Path, Path], str]
"""Takes the bundle and the engine's folder; returns what was compared, raises where it differs."""


def find_check(
    bundle: str | Path, checkpoint: str | Path | None = None, plugins: str | Path | None = None
) -> Check | None:
    """The check with the best reference that is installed; None where there is none: Polygraphy, and PyTorch or (for a
    bundle in float32) ONNX Runtime. `plugins` is the library that the engine is built with, if it was named."""
    if not _installed("polygraphy"):
        return None
    if _installed("torch"):
        return partial(golden_check, reference="torch:reference", checkpoint=checkpoint, plugins=plugins)
    if _installed("onnxruntime") and Manifest.read(bundle).dtype == "float32":
        return partial(golden_check, reference="onnxruntime", checkpoint=checkpoint, plugins=plugins)
    return None


def golden_check(
    bundle: Path,
    folder: Path,
    reference: str,
    checkpoint: str | Path | None = None,
    plugins: str | Path | None = None,
) -> str:
    """Compare an engine with a reference; returns what was compared.

    Raises:
        EngineError: an output differs by more than its tolerance, or the engine cannot be run.
    """
    from flashnext.runtime.validation.validator import validate

    kind = EngineManifest.read(folder).kind
    report = validate(bundle, kind, checkpoint, reference=reference, engine_path=folder, plugins=plugins)
    worst = max(report.rows, key=lambda row: row.relative / row.tolerance)
    found = (
        f"{worst.relative:.1e} standard deviations of {worst.output} in {worst.graph}, tolerance {worst.tolerance:.0e}"
    )
    if not report.passed:
        raise EngineError(
            f"The engine in {folder} is wrong: it differs from {reference} by up to {found}. {report.faults[0]} "
            "Nothing was kept."
        )
    return f"{len(report.rows)} outputs compared with {reference}, seed 0; largest error {found}"


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
