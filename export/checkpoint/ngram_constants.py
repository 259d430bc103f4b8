"""Constants of the n-gram hash, derived from the configuration as training derives them.

Official checkpoints store them (`layer_multipliers`, `ngram_heads_vocab_sizes`, `ngram_heads_offsets`); new ones are
made from these formulas. Head sizes are consecutive primes, so that the heads of all layers hash differently;
multipliers are odd and small enough that token * multiplier stays below 2^63. Plain Python integers throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from flashnext.export.config import ModelConfig
from flashnext.export.errors import ConfigError

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
LAYER_STRIDE = 10007
MAX_HEADS = 4096
"""Heads of all n-gram layers together; the official model has 16. Bounds the search for primes."""


@dataclass(frozen=True)
class NgramConstants:
    """Hash constants of one n-gram layer and the rows of its table, padding included."""

    multipliers: tuple[int, ...]
    head_sizes: tuple[int, ...]
    head_offsets: tuple[int, ...]
    rows: int


def derive(config: ModelConfig, layer: int) -> NgramConstants:
    """Constants of the n-gram layer with this (zero-based) layer index.

    Raises:
        ConfigError: more heads than a model can reasonably have.
    """
    number = config.ngram_layers.index(layer)
    sizes = head_sizes(config, number)
    return NgramConstants(
        multipliers=multipliers(config.vocab_size, config.ngram_size, number, config.seed),
        head_sizes=sizes,
        head_offsets=(0, *accumulate(sizes[:-1])),
        rows=padded(sum(sizes), config.make_ngram_vocab_size_divisible_by),
    )


def multipliers(vocab_size: int, ngram_size: int, number: int, seed: int) -> tuple[int, ...]:
    """Odd multiplier of each history position for the n-gram layer of this number (0, 1, …)."""
    half = max(1, ((1 << 63) - 1) // max(vocab_size, 1) // 2)
    base = seed + LAYER_STRIDE * number
    return tuple(2 * (splitmix64((base + GOLDEN * (i + 1)) & MASK64) % half) + 1 for i in range(ngram_size))


def head_sizes(config: ModelConfig, number: int) -> tuple[int, ...]:
    """Primes from `ngram_vocab_size_base` on; layer number l takes the l-th run of `ngram_heads` of them."""
    last = (number + 1) * config.ngram_heads
    if last > MAX_HEADS:
        raise ConfigError(f"The n-gram layers have {last} heads or more; at most {MAX_HEADS} are supported.")
    primes: list[int] = []
    candidate = config.ngram_vocab_size_base
    while len(primes) < last:
        if is_prime(candidate):
            primes.append(candidate)
        candidate += 1
    return tuple(primes[-config.ngram_heads :])


def padded(rows: int, divisor: int) -> int:
    """Rows of the stored table: the next multiple of `make_ngram_vocab_size_divisible_by`."""
    return -(-rows // divisor) * divisor


def splitmix64(value: int) -> int:
    """One step of the SplitMix64 generator (Steele, Lea, Flood 2014)."""
    value = (value + GOLDEN) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def is_prime(value: int) -> bool:
    """Miller-Rabin with the bases that decide every number below 3.3e24 (Sorenson, Webster 2015)."""
    bases = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)
    if value < 2 or any(value % p == 0 for p in bases):
        return value in bases
    twos = ((value - 1) & (1 - value)).bit_length() - 1
    return all(_is_probable_prime(value, base, twos) for base in bases)


def _is_probable_prime(value: int, base: int, twos: int) -> bool:
    x = pow(base, (value - 1) >> twos, value)
    if x in (1, value - 1):
        return True
    for _ in range(twos - 1):
        x = x * x % value
        if x == value - 1:
            return True
    return False
