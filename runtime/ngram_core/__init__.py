"""Hashing and gathering n-gram rows in native code: `rows.cpp`, compiled on first use, and the loader `library.py`.

Without a compiler the same is done by numpy (`flashnext.runtime.ngram`), a few times slower.
"""
