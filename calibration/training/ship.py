"""A trained model as a checkpoint in the official layout: configuration, weights, tokenizer, generation settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from flashnext.calibration.training.model import TrainingModel
from flashnext.calibration.training.small_config import END_OF_TEXT, IM_END
from flashnext.calibration.training.tokenizer import write_tokenizer
from flashnext.calibration.training.weights import TrainedWriter

GENERATION_CONFIG = {
    "eos_token_id": [IM_END, END_OF_TEXT],
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 40,
    "top_p": 0.95,
}
SHARDS = 2


def write_checkpoint(model: TrainingModel, config: Mapping[str, Any], tokenizer: Tokenizer, folder: Path) -> None:
    """Write everything that a release has but its model card."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in (("config", config), ("generation_config", GENERATION_CONFIG)):
        (folder / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(tokenizer, folder)
    TrainedWriter(model).write(folder, SHARDS)
