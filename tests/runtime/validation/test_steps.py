"""The steps of a validation follow the rules of a step."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from flashnext.export.errors import RequestError
from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime.engines.engine_set import StepLimits
from flashnext.runtime.validation.steps import FeedMaker, draft_step, plan


@pytest.fixture
def manifest(random_bundle: Path) -> Manifest:
    return Manifest.read(random_bundle)


def test_lengths_continue_from_step_to_step(manifest: Manifest) -> None:
    steps = plan(manifest)
    for before, after in itertools.pairwise(steps):
        commits = before.tokens > manifest.window
        kept = before.new_len if commits else after.accepted
        assert after.past_len == tuple(p + k for p, k in zip(before.past_len, kept, strict=True))
        assert all(a <= n for a, n in zip(after.accepted, before.new_len, strict=True))
        assert after.accepted == (0, 0) or not commits
    assert draft_step(steps[-1]).past_len[0] <= manifest.capacity


def test_prompts_come_one_by_one_for_an_engine_that_takes_no_more(manifest: Manifest) -> None:
    limits = StepLimits(sequences=2, prompts=1, tokens=20, logit_rows=20)
    first, second, *others = plan(manifest, limits=limits)
    assert (first.tokens, first.new_len, first.slots) == (20, (20,), (1,))
    assert (second.tokens, second.new_len, second.slots) == (20, (15,), (0,))
    assert others[0].past_len == (20, 15)
    assert [step.name for step in others] == [step.name for step in plan(manifest)[1:]]
    alone = plan(manifest, limits=StepLimits(sequences=1, prompts=1, tokens=20, logit_rows=20))
    assert {len(step.new_len) for step in alone} == {1}
    with pytest.raises(RequestError, match="the engines have to take it"):
        plan(manifest, 30, limits=limits)


def test_feeds_are_what_the_graphs_take(manifest: Manifest) -> None:
    maker, step = FeedMaker(manifest, seed=1), plan(manifest)[0]
    known = {name: np.zeros((2, step.tokens, 1)) for name in ("r", "y", "s")}
    feeds = maker.feeds(manifest.graphs["body"], 0, step, known)
    assert set(feeds) == {t.name for t in manifest.graphs["body"].inputs if t.role in ("step", "rows", "edge")}
    again = maker.feeds(manifest.graphs["body"], 0, step, known)
    assert all(np.array_equal(feeds[name], again[name]) for name in feeds)
