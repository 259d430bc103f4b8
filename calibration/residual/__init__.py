"""FP8 residual stream: what it looks like on real text, scales for it, and what storing it in eight bits costs.

stream.py      the PyTorch model over batches of tokens; every read and store of the residual is shown to a listener
text.py        calibration and held-out text as windows of token ids
histogram.py   histograms with logarithmic bins, percentiles
observers.py   statistics for each store and branch
sample.py      the sampled tokens that scales are searched on
search.py      static scales by maximum, percentile, mean-square error, or error of the next block's input
storage.py     ways to store the residual, for the simulation
quality.py     loss, divergence and greedy text of the model under each way of storing
calibrate.py   all of it in order: text to `scales.json` and report
report.py      the report as plain data; page.py makes an HTML page of it
gates.py       how far the gates of each block are open
paths.py       which earlier writes every block's input is made of, exactly
diagnose.py    both of them over text, and the comparison of two checkpoints; paths_page.py makes a page of it
html.py        pages that need nothing else; svg.py draws on them
"""
