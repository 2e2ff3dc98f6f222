#!/usr/bin/env python3
"""What the demo model is measured against: byte n-grams and xz, on the same split.

    python3 tools/demo_baseline.py CORPUS.jsonl

The n-gram model predicts a byte from the five before it, interpolated down to order 0 by
Witten-Bell: P_k = (count + distinct * P_{k-1}) / (total + distinct), and P_{-1} = 1/256.
"""
import json
import lzma
import math
import sys
from collections import Counter

ORDER = 5


def ngram(train, heldout):
    counts, totals, distinct = Counter(), Counter(), Counter()
    for doc in train:
        for k in range(ORDER + 1):
            counts.update(doc[i : i + k + 1] for i in range(len(doc) - k))
    for gram, n in counts.items():
        totals[gram[:-1]] += n
        distinct[gram[:-1]] += 1
    nats = 0.0
    for doc in heldout:
        for i in range(len(doc)):
            p = 1 / 256
            for k in range(min(i, ORDER) + 1):
                context = doc[i - k : i]
                t = totals.get(context)
                if t is None:
                    break
                d = distinct[context]
                p = (counts.get(doc[i - k : i + 1], 0) + d * p) / (t + d)
            nats -= math.log(p)
    return nats / sum(map(len, heldout))


def main():
    docs = [json.loads(line) for line in open(sys.argv[1])]
    train, heldout = ([d["text"].encode() for d in docs if d["split"] == s] for s in ("train", "heldout"))
    size = sum(map(len, heldout))
    xz = lambda parts: 8 * len(lzma.compress(b"".join(parts), preset=9 | lzma.PRESET_EXTREME)) * math.log(2)
    print(f"held-out: {size} bytes; nats per byte:")
    print(f"byte n-gram, contexts to {ORDER} bytes: {ngram(train, heldout):.4f}")
    print(f"xz -9e of the held-out text alone: {xz(heldout) / size:.4f}")
    print(f"xz -9e of it behind the training text: {(xz(train + heldout) - xz(train)) / size:.4f}")


if __name__ == "__main__":
    main()
