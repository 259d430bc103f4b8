"""Order the parity tests by configuration, so that each process builds each configuration once.

Under pytest-xdist the tests of one configuration form a group (`--dist loadgroup` keeps it on one process; any other
distribution works too, checkpoints and bundles are shared).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from . import references
from .configs import CASES, Case

ORDER = {case.name: i for i, case in enumerate(CASES)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    mine = [item for item in items if here in item.path.parents]
    places = [i for i, item in enumerate(items) if here in item.path.parents]
    ordered = sorted(mine, key=lambda item: ORDER.get(_case_name(item), -1))
    for place, item in zip(places, ordered, strict=True):
        items[place] = item
        item.add_marker(pytest.mark.xdist_group(f"parity-{_case_name(item)}"))


def _case_name(item: pytest.Item) -> str:
    """The configuration that a test is parametrized with, by `case` or by `name`; "" for none."""
    call = getattr(item, "callspec", None)
    case = call.params.get("case", call.params.get("name", "")) if call else ""
    return case.name if isinstance(case, Case) else str(case)


@pytest.fixture(scope="session", autouse=True)
def _shared_folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> None:
    """One folder for checkpoints and bundles, the same for every process of the run."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if hasattr(request.config, "workerinput") else base) / "parity"
    shared.mkdir(exist_ok=True)
    references.SHARED[:] = [shared]
