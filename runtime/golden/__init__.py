"""Golden files: a bundle's inputs and the PyTorch model's outputs, saved as Polygraphy's JSON.

`flashnext golden` writes them (`write.py`); `flashnext validate --golden` and the command `polygraphy` compare with
them. `folder.py` says what lies where, and reads it.
"""
