"""How many tokens to draft: as many as pay, judged by what was kept of one request's drafts so far.

With probability a that a draft is kept, given that those before it were, k drafts give 1 + a + … + a^k tokens for the
price of one step and k times `cost`, in steps. The best k follows; when no k gives more than it costs, drafting ends
for good. Only counts decide, no clocks, so equal requests are treated alike.

Costs count bytes, which is what a decode step is made of (docs/architecture.md): at the official sizes a step at batch
1 reads 11.2 GB; verifying one more token reads ten more experts in every layer, at most 2.36 GB; a draft reads the
draft layer and the LM head, 1.5 GB.
"""

from __future__ import annotations

VERIFY_COST = 0.21
DRAFT_COST = 0.13
MEMORY = 0.95
"""Weight of the past when a new draft is judged: about the last twenty count."""
PRIOR_KEPT, PRIOR_JUDGED = 1.4, 2.0
EVIDENCE = 12
"""Drafts judged before drafting may be given up."""


class DraftLength:
    """The next number of drafts of one request, 0 … `most`."""

    def __init__(self, most: int, cost: float, adaptive: bool = True) -> None:
        self.most = most
        self.off = most == 0
        self.proposed = self.kept = 0
        self._cost, self._adaptive = cost, adaptive
        self._recent_kept, self._recent_judged = PRIOR_KEPT, PRIOR_JUDGED
        self._judged = 0

    def record(self, proposed: int, kept: int) -> None:
        """Note a verification: of `proposed` drafts the first `kept` stood, and the next one did not."""
        self.proposed += proposed
        self.kept += kept
        for stood in [True] * kept + [False] * (kept < proposed):
            self._judged += 1
            self._recent_kept = MEMORY * self._recent_kept + stood
            self._recent_judged = MEMORY * self._recent_judged + 1
        if self._adaptive and self._judged >= EVIDENCE and self._gain(self.next()) < 1:
            self.off = True

    def next(self) -> int:
        """How many to draft now."""
        if self.off:
            return 0
        return max(range(1, self.most + 1), key=self._gain) if self._adaptive else self.most

    def _gain(self, drafts: int) -> float:
        """Tokens for the price of one plain step."""
        chance = self._recent_kept / self._recent_judged
        return sum(chance**i for i in range(drafts + 1)) / (1 + self._cost * drafts)
