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
report.py      the report as JSON and as one HTML page
"""
