"""What is done with a corrupted checkpoint or bundle: everything that reads files, short of running an engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flashnext.export.checkpoint import Checkpoint, generation_settings, identity
from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime.chat import ChatTemplate
from flashnext.runtime.cli import info
from flashnext.runtime.ngram import HostRows
from flashnext.runtime.states import allocate_states, bytes_per_slot
from flashnext.runtime.tokenizer import Tokenizer
from flashnext.runtime.weights import load_weights

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]


def use_checkpoint(folder: Path, sound: Path) -> None:
    """Open, describe, hash; read what ends a text."""
    checkpoint = Checkpoint.open(folder)
    identity(folder)
    generation_settings(folder, checkpoint.config)
    info.text(info.checkpoint_facts(folder))
    use_text_files(folder, sound)


def use_bundle(folder: Path, sound: Path) -> None:
    """Read the manifest, describe it, bind weights of the sound checkpoint, look up n-gram rows."""
    manifest = Manifest.read(folder)
    info.text(info.bundle_facts(folder))
    bytes_per_slot(manifest)
    checkpoint = Checkpoint.open(sound)
    allocate_states(manifest)
    load_weights(manifest, checkpoint)
    for spec in manifest.ngrams:
        rows = HostRows.open(spec, checkpoint, manifest.dtype)
        tokens, context = np.array([[5, 6, 7]]), np.full((1, len(spec.multipliers) - 1), spec.eos)
        rows.submit(tokens, context, np.array([3])).wait()
        rows.close()
    use_text_files(folder, sound)


def use_text_files(folder: Path, sound: Path) -> None:
    """Tokenize, render a conversation."""
    tokenizer = Tokenizer.open(folder)
    if tokenizer is not None:
        tokenizer.decode(tokenizer.encode("Hello, wörld \u2014 123"))
    template = ChatTemplate.open(folder)
    if template is not None:
        template.render(MESSAGES)
