#!/usr/bin/env python3
"""Makes tests/data/plamo2.json: a small vocabulary of PLaMo 2's kind, and the ids of strings.

    python tests/reference_plamo2.py

The published tokenizer (huggingface.co/pfnet/plamo-2-8b, `tokenization_plamo.py`) walks a table of suffixes from a text's end. Here
every split of the text is tried instead, which says what that table is for: the cheapest one, where a token costs its score, rounded to
ten-thousandths and negated, and a character without one 1000; of equal ones that with the longer first token.
"""

import functools
import json
import pathlib
import random

OUT = pathlib.Path(__file__).parent / "data" / "plamo2.json"
FIRST = 3 + 256  # behind control tokens and bytes
ALPHABET = "ab c\u3042\u6f22\U0001F642\u00e9"


def encode(tokens, text):
    text = text.removeprefix("\ufeff")
    costs = {token: -round(score * 1e4) for token, score in tokens}
    ids = {token: FIRST + i for i, (token, _) in enumerate(tokens)}

    @functools.cache
    def best(start):
        """Cost from there on, and ids."""
        if start == len(text):
            return 0, ()
        found = None
        for end in range(len(text), start, -1):
            piece = text[start:end]
            if piece in costs:
                cost, rest = best(end)
                cost += costs[piece]
                if found is None or cost < found[0]:
                    found = cost, (ids[piece], *rest)
        cost, rest = best(start + 1)
        if found is None or cost + 10_000_000 < found[0]:
            found = cost + 10_000_000, (*(3 + byte for byte in text[start].encode()), *rest)
        return found

    return list(best(0)[1])


def main():
    random.seed(7)
    word = lambda longest: "".join(random.choice(ALPHABET) for _ in range(random.randint(1, longest)))
    # Few scores, so that sums are often equal; \u00e9 stands in no token alone.
    tokens = sorted({word(5) for _ in range(120)} - {"\u00e9"})
    tokens = [(token, random.choice([-1.0, -1.5, -2.0, -2.5, -3.25])) for token in tokens]
    texts = ["", "\ufeffab", "\u00e9", "\U0001F680x", "  a  b"] + [word(24) for _ in range(200)]
    cases = [[text, encode(tokens, text)] for text in texts]
    OUT.write_text(json.dumps({"tokens": tokens, "cases": cases}, ensure_ascii=False, separators=(",", ":")) + "\n")


main()
