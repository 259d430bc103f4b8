"""FP8 residual stream: what it looks like on real text, scales for it, and what storing it in eight bits costs.

calibrate.py     from text to `scales.json` and the figures of a report
text.py          calibration and held-out text as windows of token ids
stream.py        the PyTorch model over batches; every read and store of the residual is shown to a listener
observers.py     statistics for each store and branch, and the check for values that are not finite
histogram.py     histograms with logarithmic bins, percentiles
lost_updates.py  writes below half a step of the grid that the branches are stored on
sample.py        the tokens that scales are searched on
search.py        static scales by maximum, percentile, squared error, or error of the next block's input
storage.py       ways to store the residual, for the simulation
quality.py       loss, divergence and greedy text of the model under each way
report.py        the report as data, and the recommendation with its rule; page.py makes an HTML page of it
gates.py         how far the gates of each block are open
paths.py         which earlier writes every block's input is made of, exactly
diagnose.py      both of them over text, and the comparison of two checkpoints; paths_page.py makes a page of it
html.py          pages that need nothing else; svg.py draws on them
"""
