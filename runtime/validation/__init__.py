"""Whether an engine computes what the model says: engines and saved outputs compared, output by output.

`validator.py` runs the comparison (`flashnext validate`), `comparison.py` measures errors and finds where they begin,
`page.py` shows them.
"""
