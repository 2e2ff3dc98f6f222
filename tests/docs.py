"""Checks the documents: every relative link and its heading exists, every file of the source that the map or a design page
names exists, pages keep their sizes, and the list of families is that of the source (`--write` writes it anew)."""
import os
import re
import subprocess
import sys

os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
FILES = [f for f in subprocess.check_output(["git", "ls-files"], text=True).split("\n") if os.path.isfile(f)]
PAGES = [f for f in FILES if f.endswith(".md")]
# Most lines of a page.
LIMITS = {"README.md": 150, "ARCHITECTURE.md": 150, "docs/design/": 60}
faults = []


def headings(page):
    """Anchors of a page, as GitHub makes them."""
    lines = re.findall(r"^#+ (.*)$", open(page, encoding="utf-8").read(), re.M)
    return [re.sub(r"[^\w\- ]", "", line.strip().lower()).replace(" ", "-") for line in lines]


for page in PAGES:
    text = open(page, encoding="utf-8").read()
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
        if not os.path.exists(target):
            faults.append(f"{page}: {link} does not exist")
        elif anchor and anchor not in headings(target):
            faults.append(f"{page}: {link} has no such heading")
    for name, limit in LIMITS.items():
        n = text.count("\n")
        if page.startswith(name) and n > limit:
            faults.append(f"{page}: {n} lines, at most {limit}")
    if page.startswith(("docs/design/", "ARCHITECTURE.md")):
        for name in re.findall(r"`([\w./-]+(?:\.(?:rs|py|sh|metal|jsonl?|h|txt)|/))`", text):
            part = "/" + name.rstrip("/") + ("/" if name.endswith("/") else "")
            if not any(part in "/" + f if name.endswith("/") else ("/" + f).endswith(part) for f in FILES):
                faults.append(f"{page}: there is no {name}")

# The book has every page once.
listed = re.findall(r"\]\(([^)]+)\)", open("docs/SUMMARY.md", encoding="utf-8").read())
pages = [p.removeprefix("docs/") for p in PAGES if p.startswith("docs/") and p != "docs/SUMMARY.md"]
faults += [f"docs/SUMMARY.md: {page} is there {listed.count(page)} times" for page in pages if listed.count(page) != 1]

# Pages that the source names.
for file in FILES:
    if file.endswith((".rs", ".md", ".toml", ".sh", ".py", ".yaml", ".yml")):
        for name in re.findall(r"(?<![\w/.-])docs/[\w./-]+\.(?:md|yaml)", open(file, encoding="utf-8").read()):
            if not os.path.exists(name):
                faults.append(f"{file}: there is no {name}")



PAGE = "docs/guide/models.md"


def source(path):
    return open(path, encoding="utf-8").read()


def families():
    """What each family does, by the tables of the source: families, drafters, kinds of projectors, and the lists of those
    without gradients or context shift, and of those with kernels on a GPU, which tests check."""
    kinds = source("src/vision/kinds/mod.rs")
    kinds = re.findall(r'name: "([^"]+)",\s*of_models: &\[([^\]]*)\]', kinds)
    lists = [("tests/it/gradient.rs", "REFUSED"), ("tests/it/shift.rs", "REFUSED"), ("tests/metal/passes.rs", "COMPUTED")]
    no_gradient, no_shift, on_gpu = (
        re.search(rf"const {name}: &\[&str\] = &\[(.*?)\];", source(path), re.S)[1] for path, name in lists)
    # Stars in the table of special features, and those of the reference data's third part that Hugging Face has no class of.
    by_llama_cpp = re.findall(r"`([\w.-]+)`\*", source(PAGE)) + """arctic arwkv7 deepseek2-ocr dflash dream eagle3 graniteswitch
        grok grovemoe kimi-k3 llada llada-moe maple nanbeige plamo2 refact rnd1 rwkv6qwen2 spark2_5 step35 talkie""".split()
    reference = lambda arch: "llama.cpp" if arch in by_llama_cpp else "Hugging Face"
    lines = ["| architecture | text | projectors of images | gradients | GPU | context shift | logits of |",
             "|---|---|---|---|---|---|---|"]
    pair = r'arch: "([^"]+)",\s*hparams: ([\w:]+)'
    for arch, of in re.findall(pair, source("src/model/family/mod.rs")):
        if of.startswith("bert::") or of in ("gemma::embedding", "t5::encoder"):
            text = "vectors"
        else:
            text = {"t5::t5": "behind an encoder"}.get(of, "denoises" if of.startswith("diffusion::") else "yes")
        images = ", ".join(f"`{name}`" for name, models in kinds if f'"{arch}"' in models)
        # Mistral's files are another name's.
        known = '"llama"' if arch == "mistral" else f'"{arch}"'
        yes = ("no" if no else "yes" for no in (known in no_gradient, known not in on_gpu, known in no_shift))
        lines.append(f"| `{arch}` | {text} | {images or 'none'} | {' | '.join(yes)} | {reference(arch)} |")
    for arch, _ in re.findall(pair, source("src/model/family/drafters.rs")):
        lines.append(f"| `{arch}` | drafts for another (`-md`) | none | no | no | no | {reference(arch)} |")
    return "\n".join(lines)


HEAD = "## Family by family\n\n"
page = source(PAGE)
begin = page.find(HEAD) + len(HEAD)
end = page.find("\n\n", page.find("|---|", begin))
table = page.find("| architecture |", begin)
listed = families()
if page[table:end] != listed:
    if "--write" in sys.argv:
        open(PAGE, "w", encoding="utf-8").write(page[:table] + listed + page[end:])
    else:
        faults.append(f"{PAGE}: the list of families is not that of the source: python3 tests/docs.py --write")

print("\n".join(faults) or f"{len(PAGES)} pages: links, names and sizes are right")
sys.exit(bool(faults))
