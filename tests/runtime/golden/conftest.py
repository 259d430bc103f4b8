"""Golden files of small bundles."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashnext.runtime.golden.write import GoldenOptions, Written, write_golden


@pytest.fixture(scope="session")
def written(random_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A complete folder, by layer and with raw inputs. Read it, never write into it."""
    folder = tmp_path_factory.mktemp("golden") / "golden"
    return write_golden(random_bundle, folder, GoldenOptions(per_layer=True, copy_weights=True, raw=True))
