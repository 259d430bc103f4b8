"""`flashnext golden`: inputs and outputs of a bundle's graphs as files of Polygraphy. The work: `runtime.golden`."""

from __future__ import annotations

import argparse
import sys

from flashnext.runtime.cli.parser import Commands, Parser, output_folder, whole_number
from flashnext.runtime.engines.base import MOST_THREADS

DESCRIPTION = """\
Run the PyTorch model on seeded steps and save what every graph takes and gives, states included, as JSON of Polygraphy.
Beside them it writes the graphs with their weights inside (pointing into the checkpoint's files), in portable form and
in plugin form, and README.md with the command lines. So a machine with a GPU needs only Polygraphy, TensorRT and the
plugin library to compare an engine with PyTorch, and `flashnext validate --golden` needs no PyTorch."""

EXAMPLES = """\
examples:
  flashnext golden BUNDLE --out golden                 graphs go beside the checkpoint: golden-1f2e3d4c.body.onnx, …
  flashnext golden BUNDLE --out golden --copy-weights  everything in one folder, to be carried elsewhere
  flashnext golden BUNDLE --out golden --per-layer     what happens at every Gated Residual, to find the block at fault
  flashnext golden BUNDLE --out golden --raw           raw inputs too, for trtexec --loadInputs

States are saved with every step: export a bundle for this with a small --capacity and few --slots.
"""


def add_parser(commands: Commands, parents: list[Parser]) -> Parser:
    """Describe the subcommand."""
    parser = commands.add_parser(
        "golden",
        help="save inputs and outputs for other tools",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        parents=parents,
    )
    add = parser.add_argument
    add("bundle", metavar="BUNDLE", help="folder made by `flashnext export`")
    add(
        "--out",
        type=output_folder,
        required=True,
        metavar="FOLDER",
        help="where to write; earlier golden files there are replaced",
    )
    add("--per-layer", action="store_true", help="save what happens inside the graphs too")
    add("--copy-weights", action="store_true", help="copy the weights' files, so that the folder is complete")
    add("--weights-as-inputs", action="store_true", help="save weights as inputs, as engines take them: much larger")
    add("--raw", action="store_true", help="write every input as raw bytes too")
    add("--tokens", type=whole_number(1), default=0, metavar="N", help="length of the prefill (default: short)")
    add("--seed", type=whole_number(0), default=0, metavar="N", help="of the random tokens (default: 0)")
    add("--checkpoint", metavar="FOLDER", help="where the weights are, if they have moved")
    add("--threads", type=whole_number(1, MOST_THREADS), metavar="N", help="threads of PyTorch (default: all cores)")
    return parser


def execute(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    from flashnext.runtime.golden.write import GoldenOptions, write_golden

    names = ("per_layer", "weights_as_inputs", "copy_weights", "raw", "tokens", "seed", "threads")
    options = GoldenOptions(**{name: getattr(arguments, name) for name in names})
    written = write_golden(arguments.bundle, arguments.out, options, arguments.checkpoint, note=_remark)
    print(written.readme)
    return 0


def _remark(text: str) -> None:
    print(f"flashnext: {text}", file=sys.stderr)
