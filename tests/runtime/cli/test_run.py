"""`flashnext run` end to end: streams, JSON, prompts from everywhere, conversations, and what it refuses."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext.export.checkpoint.identity import identity
from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.graphs.io import BuildOptions, graph_spec
from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime import LLM, SamplingParams
from flashnext.runtime.cli.main import main

GREEDY = ["--temperature", "0", "--max-tokens", "6"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=6)
PROMPT = "The rain had stopped"


def run(bundle: Path, *argv: str) -> int:
    return main(["run", str(bundle), *argv])


def give_input(monkeypatch: pytest.MonkeyPatch, data: bytes, terminal: bool = False) -> None:
    stream = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", stream)


@pytest.fixture(scope="module")
def llm(random_bundle: Path) -> Iterator[LLM]:
    """The bundle opened once, to say what the command has to print."""
    with LLM(random_bundle) as opened:
        yield opened


def encoded(llm: LLM, text: str) -> list[int]:
    assert llm.tokenizer is not None
    return llm.tokenizer.encode(text)


def test_text_streams_and_timings_are_beside_it(
    llm: LLM, random_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(random_bundle, "--prompt", PROMPT, *GREEDY) == 0
    captured = capsys.readouterr()
    assert captured.out == llm.generate(PROMPT, PARAMS)[0].text + "\n"
    assert "6 tokens, the rest in" in captured.err
    assert "ended by length" in captured.err


def test_json_holds_everything(random_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(random_bundle, "--token-ids", "1,2,3", "--json", "--logprobs", "2", *GREEDY) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompt_token_ids"] == [1, 2, 3]
    assert found["finish_reason"] == "length"
    likeliest = [entry[0]["token_id"] for entry in found["logprobs"]]
    assert likeliest == found["token_ids"]
    assert {entry[0]["rank"] for entry in found["logprobs"]} == {1}


@pytest.mark.parametrize("engine", ["onnxruntime", "torch"])
def test_engines_agree(engine: str, llm: LLM, random_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--token-ids", "7,8,9", "--engine", engine, "--threads", "1", *GREEDY, "--json"]
    assert run(random_bundle, *argv) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == llm.generate([[7, 8, 9]], PARAMS)[0].token_ids


def test_prompt_from_standard_input(
    llm: LLM, random_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give_input(monkeypatch, "Où vas-tu ?".encode())
    assert run(random_bundle, "--json", *GREEDY) == 0
    assert json.loads(capsys.readouterr().out)["prompt_token_ids"] == encoded(llm, "Où vas-tu ?")


def test_chat_puts_the_prompt_into_the_template(
    llm: LLM, random_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(random_bundle, "--chat", "--system", "Be brief.", "--prompt", PROMPT, "--json", *GREEDY) == 0
    found = json.loads(capsys.readouterr().out)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
    assert found["token_ids"] == llm.chat(messages, PARAMS)[0].token_ids


def test_conversation_remembers_its_turns(
    llm: LLM, random_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give_input(monkeypatch, b"one\n\ntwo\n", terminal=True)
    assert run(random_bundle, "--chat", *GREEDY) == 0
    messages = [{"role": "user", "content": "one"}]
    first = llm.chat(messages, PARAMS)[0].text
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "two"}]
    assert capsys.readouterr().out == f"{first}\n{llm.chat(messages, PARAMS)[0].text}\n"


def test_chat_stops_at_the_end_of_the_turn(
    llm: LLM, random_checkpoint: Path, random_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The configuration's eos separates documents; a turn ends with another token (generation_config.json)."""
    (turn_end,) = encoded(llm, "<|im_end|>")
    assert turn_end not in llm.manifest.config.eos_token_id
    tokens = llm.chat([{"role": "user", "content": PROMPT}], PARAMS)[0].token_ids
    place = next(i for i in range(2, len(tokens)) if tokens[i] not in tokens[:i])

    bundle = swapped_logits(random_checkpoint, random_bundle, tmp_path, tokens[place], turn_end)
    assert run(bundle, "--chat", "--prompt", PROMPT, "--json", *GREEDY) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["token_ids"] == [*tokens[:place], turn_end]
    assert found["finish_reason"] == "stop"
    assert "<|im_end|>" not in found["text"]


def swapped_logits(checkpoint: Path, bundle: Path, folder: Path, a: int, b: int) -> Path:
    """A copy of bundle and checkpoint in which tokens a and b have each other's logits."""
    weights, copy = folder / "checkpoint", folder / "bundle"
    shutil.copytree(checkpoint, weights)
    shutil.copytree(bundle, copy)
    info = Checkpoint.open(weights).tensors["lm_head.weight"]
    table = np.memmap(info.file, np.uint16, "r+", info.offset, info.shape)
    table[[a, b]] = table[[b, a]]
    table.flush()
    manifest = Manifest.read(copy)
    moved = dataclasses.replace(
        manifest.checkpoint, path=str(weights), identity=identity(weights), common_parent=str(weights)
    )
    dataclasses.replace(manifest, checkpoint=moved).write(copy)
    return copy


def copied_bundle(bundle: Path, copy: Path, **changes: Any) -> Path:
    """A copy whose manifest says something else."""
    shutil.copytree(bundle, copy)
    dataclasses.replace(Manifest.read(copy), **changes).write(copy)
    return copy


def test_bundle_without_tokenizer_prints_token_ids(
    llm: LLM, random_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = copied_bundle(random_bundle, tmp_path / "bundle", tokenizer_files=())
    (bundle / "tokenizer.json").unlink()
    assert run(bundle, "--token-ids", "1,2,3", *GREEDY) == 0
    assert [int(word) for word in capsys.readouterr().out.split()] == llm.generate([[1, 2, 3]], PARAMS)[0].token_ids
    assert run(bundle, "--prompt", PROMPT) == 2
    assert "no tokenizer.json" in capsys.readouterr().err


def test_bundle_for_another_engine(random_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Manifest.read(random_bundle)
    options = BuildOptions(made.window, made.capacity, made.slots, "bfloat16")
    graphs = {name: graph_spec(made.config, options, name) for name in made.graphs}
    dtypes = {t.name: t.dtype for graph in graphs.values() for t in graph.inputs}
    weights = tuple(dataclasses.replace(w, dtype=dtypes[w.name]) for w in made.weights)
    changes = {"dtype": "bfloat16", "residual_dtype": "bfloat16", "graphs": graphs, "weights": weights}
    bundle = copied_bundle(random_bundle, tmp_path / "bundle", **changes)
    assert run(bundle, "--prompt", PROMPT) == 2
    assert "Export it with --dtype float32" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--prompt", ""], "prompt is empty"),
        (["--prompt", "\udcff"], "not valid UTF-8 at character 0"),
        (["--token-ids", "1,2,100000"], "100000"),
        (["--token-ids", "1", "--chat"], "leave out --chat"),
        (["--prompt", "a", "--system", "b"], "add --chat"),
        (["--prompt", "a", "--token-ids", "1"], "not allowed with"),
        (["--prompt", "a", "--temperature", "-1"], "temperature = -1.0 is out of range"),
        (["--prompt", "a", "--logprobs", "1"], "--logprobs needs --json"),
        (["--prompt", "a", "--engine", "abacus"], "no engine 'abacus'"),
        (["--prompt", "a", "--checkpoint", "nowhere"], "--checkpoint FOLDER"),
        (["--prompt", "many words " * 300], "256"),
    ],
)
def test_what_is_refused(argv: list[str], words: str, random_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(random_bundle, *argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err.splitlines()[-1]


def test_standard_input_that_is_not_utf8(
    random_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give_input(monkeypatch, b"caf\xe9")
    assert run(random_bundle) == 2
    assert "byte 0xe9 at offset 3" in capsys.readouterr().err


def test_no_prompt_at_a_terminal(
    random_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give_input(monkeypatch, b"", terminal=True)
    assert run(random_bundle) == 2
    assert "Use --prompt TEXT" in capsys.readouterr().err


def test_conversation_that_is_not_utf8(
    random_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give_input(monkeypatch, b"one\ncaf\xe9\n", terminal=True)
    assert run(random_bundle, "--chat", *GREEDY) == 2
    assert "byte 0xe9 at offset 3" in capsys.readouterr().err


@pytest.mark.parametrize("streams", [">&-", "<&-", "2>&-"])
def test_streams_that_are_closed_or_narrow(random_bundle: Path, streams: str) -> None:
    """The text holds characters beyond ASCII; a terminal that cannot show them shows question marks."""
    command = f'exec "$0" -m flashnext.runtime.cli.main run "$1" --token-ids 64 --seed 1 --max-tokens 20 {streams}'
    run = subprocess.run(
        ["sh", "-c", command, sys.executable, random_bundle],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert b"Traceback" not in run.stderr
    assert run.stdout.isascii()


def test_not_a_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--prompt", "a") == 2
    assert "is not a bundle" in capsys.readouterr().err


def test_no_torch_from_prompt_to_text(random_bundle: Path) -> None:
    code = (
        "import sys\nfrom flashnext.runtime.cli.main import main\n"
        "assert main(['run', sys.argv[1], '--prompt', 'a', '--max-tokens', '2']) == 0\n"
        "assert not {'torch', 'onnx', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, random_bundle], check=True, capture_output=True)
