"""Hashing and gathering n-gram rows in native code: `rows.cpp`, compiled on first use, and the loader `library.py`.

Without a compiler the same is done by numpy (`flashnext.runtime.ngram`), which takes ten times as long for a table in
memory, and up to fifty times for one in files.
"""
