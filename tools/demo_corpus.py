#!/usr/bin/env python3
"""Turn the Rust documentation on this machine into the demo model's corpus.

    python3 tools/demo_corpus.py OUT.jsonl [SAMPLE.txt]   # lxml, and `rustup component add rust-docs`

One line per page: {"page", "split", "text"}. SAMPLE.txt gets some 40 KB of the held-out pages. A page belongs to the held-out split by the hash
of its name alone, so the split does not move when the extraction changes.
"""
import hashlib
import json
import re
import subprocess
import sys
from multiprocessing import Pool
from pathlib import Path

from lxml import html

BOOKS = ["book", "reference", "nomicon", "cargo", "rust-by-example", "edition-guide", "rustc",
         "rustdoc", "clippy", "style-guide", "error_codes", "unstable-book"]
CRATES = ["std", "alloc", "core", "proc_macro", "test"]
# embedded-book is left out: its prose is CC-BY-SA. The vendor intrinsics (`arch`, `simd`) are
# thousands of pages of one template. The other names are stubs, listings or translations.
SKIP = re.compile(r"(^|/)(core_arch|core_simd|std_detect|arch|simd|all|print|toc|404|help|SUMMARY|"
                  r"first-edition|second-edition|2018-edition|ja|zh|ko|es|fr)(/|\.html$)|!\.html$")
NOISE = {"button", "script", "style", "nav", "summary", "table", "svg", "img", "sup", "noscript",
         "rustdoc-toolbar", "template"}
ASCII = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "…": "...", "–": "-", "—": "--",
                       "\u00a0": " ", "\u200b": None, "\u00ad": None})
HELDOUT_IN = 20


def inline(node):
    """The text of a paragraph, with code in backticks."""
    if not isinstance(node.tag, str) or node.tag in NOISE:
        return ""
    if "doc-anchor" in (node.get("class") or ""):
        return ""
    out = [node.text or ""]
    for child in node:
        out += [inline(child), child.tail or ""]
    text = "".join(out)
    return f"`{text}`" if node.tag == "code" and text.strip() else text


def squeeze(text):
    text = re.sub(r"\s+", " ", text.translate(ASCII)).replace("Read more", "").strip()
    return text.replace("``", "")


def code(pre):
    for hidden in pre.xpath(".//*[contains(@class,'boring')]|.//button"):
        hidden.drop_tree()
    lines = [l.rstrip() for l in pre.text_content().translate(ASCII).strip("\n").split("\n")]
    return "\n".join(lines).strip("\n")


def blocks(node):
    """(kind, text) for what a reader sees inside `node`, in order."""
    for child in node:
        tag = child.tag if isinstance(child.tag, str) else ""
        cls = (child.get("class") or "")
        if tag in NOISE and tag != "summary":
            continue
        if re.fullmatch(r"h[1-6]", tag) and "code-header" not in cls:
            yield "head", squeeze(inline(child))
        elif tag == "section" and re.match(r"(ty)?method\.", (child.get("id") or "")):
            yield "head", "`" + child.get("id").split(".", 1)[1].split("-")[0] + "`"
        elif tag == "pre":
            if "item-decl" not in cls:
                yield "code", code(child)
        elif tag in ("p", "dd", "dt", "figcaption"):
            yield "para", squeeze(inline(child))
        elif tag == "li" and not child.xpath("./p|./pre|./ul|./div"):
            yield "item", squeeze(inline(child))
        elif "item-table" in cls or "out-of-band" in cls or "sub-heading" in cls:
            continue
        elif "docblock" in cls and not child.xpath("./p|./ul|./ol|./h2|./div|./pre"):
            yield "para", squeeze(inline(child))
        else:
            yield from blocks(child)


def read(job):
    root, page = job
    tree = html.parse(str(root / page), html.HTMLParser(encoding="utf-8")).getroot()
    main = tree.xpath("//main")
    return page, list(blocks(main[0])) if main else []


def canonical(page):
    """std re-exports core and alloc page by page; the three copies must share a split."""
    return re.sub(r"^(std|alloc|core)/", "lib/", page)


def heldout(page):
    return int.from_bytes(hashlib.sha256(canonical(page).encode()).digest()[:4], "big") % HELDOUT_IN == 0


def key(text):
    text = re.sub(r"\b[iuf](8|16|32|64|128|size)\b", "T", text)
    bare = re.sub(r"`[^`]*`", "`", text)
    text = bare if len(re.sub(r"\W", "", bare)) >= 25 else text
    return re.sub(r"\W+", " ", re.sub(r"\d+", "0", text.lower())).strip()


class Seen:
    """Drops what was said before: the library repeats one text for every integer type and trait."""

    def __init__(self):
        self.keys, self.grams = set(), set()

    def new(self, text):
        k = key(text)
        words = k.split()
        grams = {hash(tuple(words[i:i + 7])) for i in range(len(words) - 6)}
        stale = k in self.keys or (grams and len(grams & self.grams) > 0.5 * len(grams))
        if not stale:
            self.keys.add(k)
            self.grams |= grams
        return not stale


def keep(kind, text):
    if kind == "code":
        return 20 <= len(text) <= 700 and text.count("\n") < 20
    letters = sum(c.isascii() and (c.isalpha() or c == " ") for c in text)
    if kind == "head":
        return 0 < len(text) <= 90 and text.strip("`") not in ("Examples", "Example")
    return len(text) >= 12 and letters >= 0.6 * len(text) and len(text) < 4000


def page_text(parts, seen):
    out, heads, last = [], [], None
    for kind, text in parts:
        if not keep(kind, text):
            continue
        if kind == "head":
            heads = [text]
            continue
        if not seen.new(text):
            last = None
            continue
        # A code block whose introduction was dropped as a repeat has lost its meaning.
        if kind == "code" and last is None and not heads:
            continue
        out += [f"\n# {h}\n" for h in heads]
        heads = []
        if kind == "code":
            out.append(f"\n```\n{text}\n```\n")
        elif kind == "item":
            out.append(("" if last == "item" else "\n") + f"- {text}\n")
        else:
            out.append(f"\n{text}\n")
        last = kind
    return "".join(out).strip() + "\n"


def main():
    rustc = subprocess.run(["rustc", "--version"], capture_output=True, text=True).stdout.strip()
    root = Path(subprocess.run(["rustup", "doc", "--path"], capture_output=True, text=True,
                               check=True).stdout.strip()).parent
    pages = [p.relative_to(root).as_posix() for top in BOOKS + CRATES
             for p in sorted((root / top).rglob("*.html"))]
    pages = [p for p in pages if not SKIP.search(p)]
    with Pool(2) as pool:
        parsed = pool.map(read, [(root, p) for p in pages], chunksize=32)
    # Training pages come first, so what the held-out split repeats is dropped from the held-out side.
    parsed.sort(key=lambda d: heldout(d[0]))
    seen, total = Seen(), {}
    with open(sys.argv[1], "w") as out:
        for page, parts in parsed:
            text = page_text(parts, seen)
            if len(text) < 300:
                continue
            split = "heldout" if heldout(page) else "train"
            out.write(json.dumps({"page": page, "split": split, "text": text}, ensure_ascii=False) + "\n")
            for k in (split, page.split("/")[0]):
                n, b = total.get(k, (0, 0))
                total[k] = n + 1, b + len(text.encode())
    if len(sys.argv) > 2:
        docs = [json.loads(line) for line in open(sys.argv[1])]
        docs = [d for d in docs if d["split"] == "heldout" and len(d["text"]) < 8000]
        docs.sort(key=lambda d: hashlib.sha256(d["page"].encode()).digest())
        sample = ""
        for d in docs:
            if len(sample) + len(d["text"]) < 41000:
                sample += "\n" * bool(sample) + d["text"]
        Path(sys.argv[2]).write_text(sample)
    print(rustc, *(f"{k}: {n} pages, {b / 1e6:.2f} MB" for k, (n, b) in total.items()), sep="\n")


if __name__ == "__main__":
    main()
