"""Files that stay mapped while a model runs, and what happens when one of them is cut short: an error for whoever reads
from it instead of the end of the process.

`files.py` is what readers use; `bus_errors.cpp` is the handler of the signal that such a read raises, with its loader
`guard.py`; `file_rows.py` reads rows without a mapping where there is no handler.
"""
