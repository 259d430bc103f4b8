"""Measure a trained checkpoint on the held-out text: a table, and one JSON line at the end.

    python -m flashnext.calibration.evaluation.evaluate models/small --corpus build/corpus [--run build/train_small]

`--run` names the training run's folder: the indexer is then also measured as it was after each stage. Everything runs
on the processor, in some minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from flashnext.calibration.corpus.build import read_documents
from flashnext.calibration.evaluation import text
from flashnext.calibration.evaluation.drafts import acceptance_lengths
from flashnext.calibration.evaluation.kneser_ney import KneserNey
from flashnext.calibration.training.data import encode
from flashnext.calibration.training.model import TrainingModel
from flashnext.calibration.training.settings import STAGES
from flashnext.calibration.training.weights import initialize, load_model
from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.errors import FlashNextError, message_at_exit
from flashnext.export.graphs.bundle import ExportOptions, export_bundle

Figures = Iterator[tuple[str, float]]
BUDGETS = 4
"""Length of the windows in budgets of the indexer."""
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 64, 96
INDEXER_WINDOWS = 40


class Evaluation:
    """A checkpoint, and the text that it is measured on."""

    def __init__(self, folder: Path, corpus: Path, run: Path | None, limit: int | None) -> None:
        self.folder, self.run, self.limit = folder, run, limit
        self.checkpoint = Checkpoint.open(folder)
        self.model = load_model(self.checkpoint)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.train, self.held_out = (read_documents(corpus / f"{n}.jsonl") for n in ("train", "held_out"))
        self.tokens = encode(self.tokenizer, self.held_out)
        self.length = BUDGETS * self.checkpoint.config.indexer_budget

    def losses(self) -> Figures:
        """Loss in its units, and the baseline on exactly the same tokens."""
        nats = text.token_losses(self.model, self.tokens, self.length, "sparse", limit=self.limit)
        bytes_per_token = sum(len(d.text.encode()) for d in self.held_out) / len(self.tokens)
        yield "held-out loss, nats per token", nats.mean()
        yield "held-out perplexity", math.exp(nats.mean())
        yield "held-out bits per byte", nats.mean() / bytes_per_token / math.log(2)
        yield "tokens predicted", nats.size
        baseline = KneserNey(encode(self.tokenizer, self.train), self.checkpoint.config.vocab_size)
        predicted = -np.log(baseline.probabilities(self.tokens))[1 : nats.size + 1]
        yield "Kneser-Ney 5-gram loss", predicted.mean()
        yield "Kneser-Ney 5-gram bits per byte", predicted.mean() / bytes_per_token / math.log(2)
        dense = text.token_losses(self.model, self.tokens, self.length, "plain", limit=self.limit)
        budget = self.checkpoint.config.indexer_budget
        yield f"loss beyond the budget of {budget} tokens, QSA", nats[:, budget:].mean()
        yield f"loss beyond the budget of {budget} tokens, dense attention", dense[:, budget:].mean()
        without = text.token_losses(self.model, self.tokens, self.length, "sparse", ngrams=False, limit=self.limit)
        yield "loss without n-gram rows", without.mean()

    def indexer(self) -> Figures:
        """Recall and divergence, of the checkpoint and of the run's stages."""
        for name, model in self._stages():
            recall, divergence = text.indexer_figures(model, self.tokens, self.length, INDEXER_WINDOWS)
            yield f"indexer recall, {name}", recall
            yield f"indexer divergence, {name}", divergence

    def _stages(self) -> Iterator[tuple[str, TrainingModel]]:
        if self.run is not None:
            model = TrainingModel(self.checkpoint.config)
            for stage in STAGES:
                path = self.run / f"after_{stage}.pt"
                if path.exists():
                    model.load_state_dict(torch.load(path, weights_only=True))
                    yield f"after stage {stage}", model
        chance = TrainingModel(self.checkpoint.config)
        initialize(chance, 0)
        chance.load_state_dict({n: v for n, v in self.model.state_dict().items() if ".indexer." not in n}, strict=False)
        yield "untrained indexer on the final model", chance
        yield "final", self.model

    def drafts(self) -> Figures:
        """Tokens per round with 1 to 4 drafts on held-out passages, with and without reuse of blocks."""
        starts = np.linspace(0, len(self.tokens) - PROMPT_TOKENS, PROMPTS, endpoint=False, dtype=int)
        prompts = [self.tokens[s : s + PROMPT_TOKENS].tolist() for s in starts]
        with tempfile.TemporaryDirectory() as folder:
            bundle = Path(folder) / "bundle"
            export_bundle(self.folder, bundle, ExportOptions(capacity=256, slots=PROMPTS, dtype="float32"))
            for reuse, remark in ((True, ""), (False, ", blocks chosen anew")):
                found = acceptance_lengths(bundle, prompts, NEW_TOKENS, reuse_blocks=reuse)
                for drafts, length in enumerate(found, start=1):
                    yield f"tokens per round, {drafts} draft{'s' if drafts > 1 else ''}{remark}", length


def print_figures(figures: Figures) -> dict[str, float]:
    """Print each figure as soon as it is known."""
    out: dict[str, float] = {}
    for name, value in figures:
        out[name] = float(value)
        print(f"{name:58} {value:10,.0f}" if name.startswith("tokens pred") else f"{name:58} {value:10.4f}", flush=True)
    return out


@message_at_exit()
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Measure a trained checkpoint on held-out text.")
    parser.add_argument("checkpoint", type=Path, nargs="?", default=Path("models/small"))
    parser.add_argument("--corpus", type=Path, default=Path("build/corpus"), help="made by scripts/build_corpus")
    parser.add_argument("--run", type=Path, help="folder of the training run: measures its stages too")
    parser.add_argument("--windows", type=int, metavar="N", help="only the first N windows of the held-out text")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(argv)
    for name in ("windows", "threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise FlashNextError(f"--{name} is {value}; give 1 or more.")
    torch.set_num_threads(options.threads)
    evaluation = Evaluation(options.checkpoint, options.corpus, options.run, options.windows)
    print(f"{options.checkpoint}, windows of {evaluation.length} tokens", file=sys.stderr)
    figures: dict[str, Any] = {}
    for part in (evaluation.losses, evaluation.indexer, evaluation.drafts):
        figures |= print_figures(part())
    print(json.dumps({k: round(v, 4) for k, v in figures.items()}))


if __name__ == "__main__":
    main()
